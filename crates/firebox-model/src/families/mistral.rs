//! `mistral`: llama with a sliding window on every layer.

use super::common::{Common, Defaults};
use crate::ModelError;
use crate::config::{AttentionConfig, DecoderConfig, FeedForwardConfig};
use crate::fields::Fields;

pub(super) fn config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let common = Common::read(fields, "mistral", Defaults::default())?;
    let attention = AttentionConfig { window: fields.count("sliding_window")?, ..common.attention() };
    let block = common.block(attention, FeedForwardConfig::Gated(common.gated()));
    Ok(common.model(vec![common.rope()?], vec![block; common.layers]))
}
