//! `qwen3_moe`: qwen3 with a mixture of experts on some or all layers.

use super::common::{Common, DEFAULT_WINDOW, Defaults};
use crate::ModelError;
use crate::config::{AttentionConfig, DecoderConfig, ExpertsConfig, FeedForwardConfig, GatedConfig};
use crate::fields::Fields;

/// Upper bound on experts, above every published model.
const MAX_EXPERTS: usize = 1 << 14;

pub(super) fn config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let common = Common::read(fields, "qwen3_moe", Defaults { kv_heads: Some(4), ..Defaults::default() })?;
    let slides = fields.flag("use_sliding_window")?.unwrap_or(false);
    let attention = AttentionConfig {
        head_norm: Some(common.norm("", common.head_dim)),
        window: if slides { fields.count_or("sliding_window", DEFAULT_WINDOW)? } else { None },
        ..common.attention_with_configured_bias()?
    };
    let experts = match fields.whole("num_experts")? {
        Some(experts) => experts,
        None => {
            fields.whole("num_local_experts")?.ok_or_else(|| fields.error("num_experts", "is missing"))?
        }
    };
    let chosen = fields.required_count("num_experts_per_tok")?;
    if experts > MAX_EXPERTS || (experts > 0 && chosen > experts) {
        return Err(
            fields.error("num_experts_per_tok", format!("cannot choose {chosen} of {experts} experts"))
        );
    }
    let mixture = FeedForwardConfig::MixtureOfExperts(ExpertsConfig {
        expert: GatedConfig { inner_size: fields.required_count("moe_intermediate_size")?, ..common.gated() },
        experts,
        chosen,
        normalised: fields.flag("norm_topk_prob")?.unwrap_or(false),
    });
    let dense_layers = fields.list("mlp_only_layers")?.unwrap_or_default();
    let step = fields.count("decoder_sparse_step")?.unwrap_or(1);
    let blocks = (0..common.layers)
        .map(|layer| {
            let listed_dense = dense_layers.iter().any(|dense| dense.as_u64() == Some(layer as u64));
            let sparse = !listed_dense && experts > 0 && (layer + 1) % step == 0;
            let feed_forward =
                if sparse { mixture.clone() } else { FeedForwardConfig::Gated(common.gated()) };
            common.block(attention.clone(), feed_forward)
        })
        .collect();
    Ok(common.model(vec![common.rope()?], blocks))
}
