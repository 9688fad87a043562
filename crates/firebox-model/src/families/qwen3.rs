//! `qwen3`: a norm on every query and key head.

use super::common::{Common, Defaults};
use crate::ModelError;
use crate::config::{AttentionConfig, DecoderConfig, FeedForwardConfig};
use crate::fields::Fields;

pub(super) fn config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let common = Common::read(fields, "qwen3", Defaults { head_dim: Some(128), ..Defaults::default() })?;
    let blocks = common
        .qwen_layer_kinds()?
        .into_iter()
        .map(|kind| {
            let attention = AttentionConfig {
                head_norm: Some(common.norm("", common.head_dim)),
                window: common.window_of(kind)?,
                ..common.attention_with_configured_bias()?
            };
            Ok(common.block(attention, FeedForwardConfig::Gated(common.gated())))
        })
        .collect::<Result<_, ModelError>>()?;
    Ok(common.model(vec![common.rope()?], blocks))
}
