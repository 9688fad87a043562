//! `glm4_moe`: a mixture of experts chosen by the sigmoid of each, corrected and in groups, beside a shared expert; the
//! first layers are dense.

use super::common::{Common, Defaults};
use super::mixture::{CorrectedDefaults, corrected_mixture, without_further_layers};
use crate::ModelError;
use crate::config::{AttentionConfig, DecoderConfig, FeedForwardConfig};
use crate::fields::Fields;

pub(super) fn config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let defaults =
        Defaults { kv_heads: Some(8), rotary_fraction: Some(0.5), norm_epsilon: 1e-5, ..Defaults::default() };
    let common = Common::read(fields, "glm4_moe", defaults)?;
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    let attention = AttentionConfig {
        input_bias: bias,
        head_norm: match fields.flag("use_qk_norm")? {
            Some(true) => Some(common.norm("", common.head_dim)),
            _ => None,
        },
        ..common.attention()
    };
    let absent = CorrectedDefaults {
        experts: 128,
        chosen: 8,
        inner_size: 1408,
        groups: 1,
        chosen_groups: 1,
        scale: 1.0,
    };
    let mixture = corrected_mixture(&common, absent)?;
    let dense = fields.whole("first_k_dense_replace")?.unwrap_or(1);
    let blocks = (0..common.layers)
        .map(|layer| {
            let feed_forward = if layer < dense {
                FeedForwardConfig::Gated(common.gated())
            } else {
                FeedForwardConfig::MixtureOfExperts(mixture.clone())
            };
            common.block(attention.clone(), feed_forward)
        })
        .collect();
    without_further_layers(&common, common.model(vec![common.rope()?], blocks))
}
