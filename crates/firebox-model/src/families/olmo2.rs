//! `olmo2` and `olmo3`: norms of the outputs, a norm over all queries and one over all keys; `olmo3` has windows.

use super::common::{Common, Defaults};
use super::dense::{Dense, Norms, Window};
use super::rope;
use crate::ModelError;
use crate::config::{DecoderConfig, HeadNormPlace, MixerConfig, RopeScaling};

pub(super) const OLMO2: Dense = Dense {
    family: "olmo2",
    defaults: Defaults { norm_epsilon: 1e-5, ..Defaults::USUAL },
    norms: Norms::AFTER,
    head_norm: Some(HeadNormPlace::Projection),
    ..Dense::LLAMA
};

pub(super) const OLMO3: Dense =
    Dense { family: "olmo3", window: Window::AllBut(4), finish: scale_full_layers_only, ..OLMO2 };

/// A configuration with one scheme for all layers scales those without a window only.
fn scale_full_layers_only(common: &Common<'_>, model: &mut DecoderConfig) -> Result<(), ModelError> {
    if model.ropes.len() > 1 || model.ropes[0].scaling == RopeScaling::None {
        return Ok(());
    }
    model.ropes.push(rope::plain(&common.fields, common.rope_head(), model.ropes[0].theta)?);
    for block in &mut model.blocks {
        if let MixerConfig::Attention(attention) = &mut block.mixer
            && attention.window.is_some()
        {
            attention.rope = Some(1);
        }
    }
    Ok(())
}
