//! `deepseek_v3` and `glm4_moe_lite`: attention to latents, and a mixture of experts chosen by the sigmoid of each, corrected and in
//! groups, beside shared experts; the first layers are dense.

use super::common::{Common, Defaults};
use super::mixture::{CorrectedDefaults, corrected_mixture, without_further_layers};
use super::rope::score_factor;
use crate::ModelError;
use crate::config::{
    BlockConfig, DecoderConfig, FeedForwardConfig, LatentAttentionConfig, MixerConfig, NormConfig, RopeLayout,
};
use crate::fields::{Fields, shown};

/// Epsilon of the norms of latents, whatever that of the other norms is.
const LATENT_EPSILON: f64 = 1e-6;

pub(super) fn config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let absent = CorrectedDefaults {
        experts: 256,
        chosen: 8,
        inner_size: 2048,
        groups: 8,
        chosen_groups: 4,
        scale: 2.5,
    };
    read(fields, "deepseek_v3", 1e-6, 3, absent)
}

pub(super) fn lite_config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let absent = CorrectedDefaults {
        experts: 64,
        chosen: 4,
        inner_size: 1536,
        groups: 1,
        chosen_groups: 1,
        scale: 1.8,
    };
    read(fields, "glm4_moe_lite", 1e-5, 1, absent)
}

/// Reads a model whose first `dense` layers are dense if the configuration does not tell.
fn read(
    fields: &Fields<'_>,
    family: &'static str,
    norm_epsilon: f64,
    dense: usize,
    absent: CorrectedDefaults,
) -> Result<DecoderConfig, ModelError> {
    let rotated_dim = fields.count("qk_rope_head_dim")?.unwrap_or(64);
    let rope_layout = match fields.flag("rope_interleave")? {
        Some(false) => RopeLayout::Half,
        _ => RopeLayout::Interleaved,
    };
    let defaults = Defaults { head_dim: Some(rotated_dim), norm_epsilon, rope_layout, ..Defaults::default() };
    let mut common = Common::read(fields, family, defaults)?;
    // A position scheme rotates the rotated part of a head as if it were a head of its own.
    common.head_dim = rotated_dim;
    if let Some(other) = fields.whole("moe_layer_freq")?.filter(|&every| every != 1) {
        return Err(fields
            .error("moe_layer_freq", format!("is {other}; every layer behind the dense ones is a mixture")));
    }
    let plain_dim = fields.required_count("qk_nope_head_dim")?;
    let query_dim = (plain_dim + rotated_dim) as f64;
    let attention = LatentAttentionConfig {
        hidden_size: common.hidden_size,
        heads: common.heads,
        query_rank: fields.count("q_lora_rank")?,
        rank: fields.required_count("kv_lora_rank")?,
        plain_dim,
        rotated_dim,
        value_dim: fields.required_count("v_head_dim")?,
        scale: (query_dim.powf(-0.5) * score_factor(fields)?) as f32,
        rope: 0,
        latent_norm: NormConfig { epsilon: LATENT_EPSILON, ..common.norm("", 0) },
        bias: fields.flag("attention_bias")?.unwrap_or(false),
        separate_factors: fields.hint("factors_separate")?,
    };
    let mixture = FeedForwardConfig::MixtureOfExperts(corrected_mixture(&common, absent)?);
    let blocks = dense_layers(&common, dense)?
        .into_iter()
        .map(|dense| {
            let feed_forward = if dense { FeedForwardConfig::Gated(common.gated()) } else { mixture.clone() };
            BlockConfig {
                mixer: MixerConfig::LatentAttention(attention.clone()),
                ..common.block(common.attention(), feed_forward)
            }
        })
        .collect();
    without_further_layers(&common, common.model(vec![common.rope()?], blocks))
}

/// Returns of every layer whether its feed-forward is dense.
fn dense_layers(common: &Common<'_>, absent: usize) -> Result<Vec<bool>, ModelError> {
    let fields = &common.fields;
    let Some(listed) = fields.list("mlp_layer_types")? else {
        let dense = fields.whole("first_k_dense_replace")?.unwrap_or(absent);
        return Ok((0..common.layers).map(|layer| layer < dense).collect());
    };
    if listed.len() != common.layers {
        return Err(fields.error(
            "mlp_layer_types",
            format!("lists {} layers, but num_hidden_layers is {}", listed.len(), common.layers),
        ));
    }
    let is_dense = |kind: &serde_json::Value| match kind.as_str() {
        Some("dense") => Ok(true),
        Some("sparse") => Ok(false),
        _ => Err(fields.error("mlp_layer_types", format!("{} is neither dense nor sparse", shown(kind)))),
    };
    listed.iter().map(is_dense).collect()
}
