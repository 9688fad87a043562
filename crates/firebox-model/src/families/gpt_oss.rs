//! `gpt_oss`: attention with sinks, alternately to a window, and a mixture of experts whose gates are clamped.

use super::common::{Common, Defaults, LayerKind};
use super::mixture::Mixture;
use crate::ModelError;
use crate::config::{
    Activation, AttentionConfig, DecoderConfig, ExpertsConfig, FeedForwardConfig, GatedConfig, RoutingConfig,
    TensorNames,
};
use crate::fields::Fields;

/// The factor of the gate within its sigmoid, as [`Activation::GeluQuick`] has it.
const ALPHA: f64 = 1.702;

pub(super) fn config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let defaults = Defaults {
        head_dim: Some(64),
        kv_heads: Some(8),
        inner_size: Some(2880),
        rope_theta: 150_000.0,
        norm_epsilon: 1e-5,
        ..Defaults::default()
    };
    let common = Common::read(fields, "gpt_oss", defaults)?;
    if let Some(alpha) = fields.number("swiglu_alpha")?.filter(|alpha| *alpha != ALPHA) {
        return Err(fields.error("swiglu_alpha", format!("{alpha} is not supported; known is {ALPHA}")));
    }
    if fields.get("rope_parameters").or(fields.get("rope_scaling")).is_none() {
        return Err(fields.error("rope_parameters", "is missing, as is rope_scaling"));
    }
    let bias = fields.flag("attention_bias")?.unwrap_or(true);
    let attention =
        AttentionConfig { input_bias: bias, output_bias: bias, sinks: true, ..common.attention() };
    let mixture = Mixture {
        experts: fields.count("num_local_experts")?.unwrap_or(128),
        chosen: fields.count("num_experts_per_tok")?.unwrap_or(4),
        inner_size: common.inner_size,
        // As if the products of the chosen experts alone went through the softmax.
        normalised: true,
    };
    let mixture = mixture.config(&common, RoutingConfig::default())?;
    // GGUF files have them apart.
    let fused = !fields.hint("experts_separate")?;
    let expert = GatedConfig {
        activation: Activation::GeluQuick,
        bias: true,
        fused,
        interleaved: fused,
        limit: Some(fields.positive("swiglu_limit")?.unwrap_or(7.0) as f32),
        ..mixture.expert
    };
    let feed_forward =
        FeedForwardConfig::MixtureOfExperts(ExpertsConfig { expert, router_bias: true, ..mixture });
    let kinds = common
        .layer_kinds(|layer| if layer.is_multiple_of(2) { LayerKind::Sliding } else { LayerKind::Full })?;
    let blocks = kinds
        .into_iter()
        .map(|kind| {
            let window = match kind {
                LayerKind::Sliding => fields.count_or("sliding_window", Some(128))?,
                _ => None,
            };
            let window = if window.is_some() { window } else { common.window_of(kind)? };
            Ok(common.block(AttentionConfig { window, ..attention.clone() }, feed_forward.clone()))
        })
        .collect::<Result<_, ModelError>>()?;
    let model = common.model(vec![common.rope()?], blocks);
    let names = TensorNames { renamed: &[("mlp.gate.", "mlp.router.")], ..TensorNames::default() };
    Ok(DecoderConfig { names, ..model })
}
