//! `phi3`: fused projections, heads rotated in part, longrope.

use super::common::{Common, Defaults};
use crate::ModelError;
use crate::config::{AttentionConfig, AttentionProjections, DecoderConfig, FeedForwardConfig, GatedConfig};
use crate::fields::Fields;

pub(super) fn config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let common = Common::read(
        fields,
        "phi3",
        Defaults { norm_epsilon: 1e-5, rotary_fraction: Some(1.0), ..Defaults::default() },
    )?;
    let attention = AttentionConfig {
        projections: AttentionProjections::Fused,
        window: fields.count("sliding_window")?,
        ..common.attention()
    };
    let gated = GatedConfig { fused: true, ..common.gated() };
    let block = common.block(attention, FeedForwardConfig::Gated(gated));
    Ok(common.model(vec![common.rope()?], vec![block; common.layers]))
}
