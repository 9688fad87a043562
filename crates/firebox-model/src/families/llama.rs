//! `llama`: the plain decoder, with every rope scaling and optional biases.

use super::common::{Common, Defaults};
use crate::ModelError;
use crate::config::{DecoderConfig, FeedForwardConfig, GatedConfig};
use crate::fields::Fields;

pub(super) fn config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let common = Common::read(fields, "llama", Defaults::default())?;
    let attention = common.attention_with_configured_bias()?;
    let gated = GatedConfig { bias: fields.flag("mlp_bias")?.unwrap_or(false), ..common.gated() };
    let block = common.block(attention, FeedForwardConfig::Gated(gated));
    Ok(common.model(vec![common.rope()?], vec![block; common.layers]))
}
