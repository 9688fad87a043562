//! `mistral`: llama with a sliding window on every layer.

use super::common::{Common, DEFAULT_WINDOW, Defaults};
use crate::ModelError;
use crate::config::{AttentionConfig, DecoderConfig, FeedForwardConfig};
use crate::fields::Fields;

pub(super) fn config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let common = Common::read(fields, "mistral", Defaults { kv_heads: Some(8), ..Defaults::default() })?;
    let attention =
        AttentionConfig { window: fields.count_or("sliding_window", DEFAULT_WINDOW)?, ..common.attention() };
    let block = common.block(attention, FeedForwardConfig::Gated(common.gated()));
    Ok(common.model(vec![common.rope()?], vec![block; common.layers]))
}
