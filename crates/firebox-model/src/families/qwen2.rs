//! `qwen2`: biases on queries, keys and values; windows on later layers where configured.

use super::common::{Common, Defaults};
use crate::ModelError;
use crate::config::{AttentionConfig, DecoderConfig, FeedForwardConfig};
use crate::fields::Fields;

pub(super) fn config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let common = Common::read(fields, "qwen2", Defaults::default())?;
    let blocks = common
        .qwen_layer_kinds()?
        .into_iter()
        .map(|kind| {
            let window = common.window_of(kind)?;
            let attention = AttentionConfig { input_bias: true, window, ..common.attention() };
            Ok(common.block(attention, FeedForwardConfig::Gated(common.gated())))
        })
        .collect::<Result<_, ModelError>>()?;
    Ok(common.model(vec![common.rope()?], blocks))
}
