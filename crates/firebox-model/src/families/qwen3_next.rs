//! `qwen3_next`: layers of the gated delta rule with gated attention between them, and mixtures with a shared expert
//! on some or all layers. Projections of the delta rule lie one key head after the other.

use super::common::{Common, Defaults};
use super::mixture::{Mixture, gated_shared_expert};
use super::qwen3_5::hybrid;
use super::qwen3_moe::is_sparse;
use crate::ModelError;
use crate::config::{
    DecoderConfig, DeltaNetProjections, ExpertsConfig, FeedForwardConfig, MixerConfig, RoutingConfig,
};
use crate::fields::Fields;

pub(super) fn config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let defaults = Defaults {
        head_dim: Some(256),
        kv_heads: Some(2),
        inner_size: Some(5632),
        rotary_fraction: Some(0.25),
        norm_weight_offset: 1.0,
        ..Defaults::default()
    };
    let common = Common::read(fields, "qwen3_next", defaults)?;
    let mixture = Mixture {
        experts: fields.whole("num_experts")?.unwrap_or(512),
        chosen: fields.count("num_experts_per_tok")?.unwrap_or(10),
        inner_size: fields.count("moe_intermediate_size")?.unwrap_or(512),
        normalised: fields.flag("norm_topk_prob")?.unwrap_or(true),
    };
    let shared = fields.count("shared_expert_intermediate_size")?.unwrap_or(512);
    let mixture = ExpertsConfig {
        shared: Some(gated_shared_expert(&common, shared)),
        ..mixture.config(&common, RoutingConfig::default())?
    };
    let sparse = is_sparse(fields, mixture.experts)?;
    // Files of llama.cpp have them apart.
    let separate = fields.hint("qkvz_separate")?;
    let projections = if separate { DeltaNetProjections::GroupedSteps } else { DeltaNetProjections::Grouped };
    let mut model = hybrid(&common, FeedForwardConfig::Gated(common.gated()))?;
    for (layer, block) in model.blocks.iter_mut().enumerate() {
        if sparse(layer) {
            block.feed_forward = FeedForwardConfig::MixtureOfExperts(mixture.clone());
        }
        if let MixerConfig::GatedDeltaNet(net) = &mut block.mixer {
            net.projections = projections;
        }
    }
    Ok(model)
}
