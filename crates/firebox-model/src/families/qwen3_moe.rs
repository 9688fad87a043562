//! `qwen3_moe`: qwen3 with a mixture of experts on some or all layers.

use super::common::{Common, DEFAULT_WINDOW, Defaults};
use super::mixture::Mixture;
use crate::ModelError;
use crate::config::{AttentionConfig, DecoderConfig, FeedForwardConfig, RoutingConfig};
use crate::fields::Fields;

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
    let mixture = Mixture {
        experts,
        chosen: fields.required_count("num_experts_per_tok")?,
        inner_size: fields.required_count("moe_intermediate_size")?,
        normalised: fields.flag("norm_topk_prob")?.unwrap_or(false),
    };
    let mixture = FeedForwardConfig::MixtureOfExperts(mixture.config(&common, RoutingConfig::default())?);
    let sparse = is_sparse(fields, experts)?;
    let blocks = (0..common.layers)
        .map(|layer| {
            let feed_forward =
                if sparse(layer) { mixture.clone() } else { FeedForwardConfig::Gated(common.gated()) };
            common.block(attention.clone(), feed_forward)
        })
        .collect();
    Ok(common.model(vec![common.rope()?], blocks))
}

/// Returns which layers have a mixture: those at whole steps that are not listed as dense.
pub(super) fn is_sparse<'a>(
    fields: &Fields<'a>,
    experts: usize,
) -> Result<impl Fn(usize) -> bool + use<'a>, ModelError> {
    let dense_layers = fields.list("mlp_only_layers")?.unwrap_or_default();
    let step = fields.count("decoder_sparse_step")?.unwrap_or(1);
    Ok(move |layer: usize| {
        let listed_dense = dense_layers.iter().any(|dense| dense.as_u64() == Some(layer as u64));
        !listed_dense && experts > 0 && (layer + 1).is_multiple_of(step)
    })
}
