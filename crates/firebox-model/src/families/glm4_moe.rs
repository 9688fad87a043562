//! `glm4_moe`: a mixture of experts chosen by the sigmoid of each, corrected and in groups, beside a shared expert; the
//! first layers are dense.

use super::common::{Common, Defaults};
use super::mixture::{Mixture, corrected};
use crate::ModelError;
use crate::config::{
    AttentionConfig, DecoderConfig, ExpertsConfig, FeedForwardConfig, GatedConfig, SharedExpertConfig,
    TensorNames,
};
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
    let inner_size = fields.count("moe_intermediate_size")?.unwrap_or(1408);
    let mixture = Mixture {
        experts: fields.count("n_routed_experts")?.unwrap_or(128),
        chosen: fields.count("num_experts_per_tok")?.unwrap_or(8),
        inner_size,
        normalised: fields.flag("norm_topk_prob")?.unwrap_or(true),
    };
    let shared = fields.whole("n_shared_experts")?.unwrap_or(1);
    let shared = (shared > 0).then(|| SharedExpertConfig {
        prefix: "shared_experts.".into(),
        network: GatedConfig { inner_size: inner_size * shared, ..common.gated() },
        gate: None,
    });
    let mixture = ExpertsConfig { shared, ..mixture.config(&common, corrected(fields)?)? };
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
    let model = common.model(vec![common.rope()?], blocks);
    // Layers behind the last one predict further tokens, and are not run.
    let further = fields.whole("num_nextn_predict_layers")?.unwrap_or(0).min(common.layers);
    let foreign = (0..further).map(|layer| format!("model.layers.{}.", common.layers + layer)).collect();
    Ok(DecoderConfig { names: TensorNames { foreign, ..TensorNames::default() }, ..model })
}
