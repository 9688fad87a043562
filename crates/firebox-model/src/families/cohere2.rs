//! `cohere2`: mixer and feed-forward side by side behind one layer norm, positions in layers with a window only.

use super::common::{Common, Defaults};
use super::dense::{Dense, Flag, Norms, Rotated, Window};
use crate::ModelError;
use crate::config::{DecoderConfig, NormKind, RopeLayout};

pub(super) const COHERE2: Dense = Dense {
    family: "cohere2",
    defaults: Defaults {
        tied_embeddings: true,
        norm_epsilon: 1e-5,
        norm_epsilon_field: "layer_norm_eps",
        norm_kind: NormKind::Layer { bias: false },
        rope_layout: RopeLayout::Interleaved,
        ..Defaults::USUAL
    },
    norms: Norms { feed_forward: "", ..Norms::BEFORE },
    feed_forward_bias: Flag::Never,
    window: Window::AllBut(4),
    rotated: Rotated::Sliding,
    parallel: true,
    finish: scale_logits,
    ..Dense::LLAMA
};

fn scale_logits(common: &Common<'_>, model: &mut DecoderConfig) -> Result<(), ModelError> {
    if common.fields.flag("use_qk_norm")?.unwrap_or(false) {
        return Err(common
            .fields
            .error("use_qk_norm", "is set; norms of queries and keys are not supported"));
    }
    if common.fields.count_or("sliding_window", Some(1))?.is_none() {
        return Err(common
            .fields
            .error("sliding_window", "is null; only layers with a window have positions"));
    }
    model.logit_scale = Some(common.fields.positive("logit_scale")?.unwrap_or(0.0625) as f32);
    Ok(())
}
