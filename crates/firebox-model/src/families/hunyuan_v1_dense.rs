//! `hunyuan_v1_dense`: norms of heads after their rotation.

use super::common::{Common, Defaults};
use super::dense::{Dense, Flag, Names};
use super::rope;
use crate::ModelError;
use crate::config::{DecoderConfig, HeadNormPlace};

pub(super) const HUNYUAN_V1_DENSE: Dense = Dense {
    family: "hunyuan_v1_dense",
    defaults: Defaults { norm_epsilon: 1e-5, ..Defaults::USUAL },
    head_norm: Some(HeadNormPlace::RotatedHeads),
    feed_forward_bias: Flag::Never,
    names: Names {
        renamed: &[(".q_norm.", ".query_layernorm."), (".k_norm.", ".key_layernorm.")],
        ..Names::USUAL
    },
    finish: stretch_base,
    ..Dense::LLAMA
};

/// A scheme that is called dynamic and has an `alpha` is a plain one with a larger base.
fn stretch_base(common: &Common<'_>, model: &mut DecoderConfig) -> Result<(), ModelError> {
    let scheme = match common.fields.object("rope_parameters")? {
        Some(parameters) => Some(parameters),
        None => common.fields.object("rope_scaling")?,
    };
    let Some(scheme) = scheme else { return Ok(()) };
    let kind = scheme.text("rope_type")?.or(scheme.text("type")?);
    let (Some("dynamic"), Some(alpha)) = (kind, scheme.positive("alpha")?) else { return Ok(()) };
    let width = common.head_dim as f64;
    let theta = model.ropes[0].theta * alpha.powf(width / (width - 2.0));
    model.ropes = vec![rope::plain(&common.fields, common.rope_head(), theta)?];
    Ok(())
}
