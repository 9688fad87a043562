//! `lfm2` and `lfm2_moe`: layers of gated short convolutions with attention between them. The store gives their tensors
//! the usual names.

use super::common::{Common, Defaults};
use super::mixture::Mixture;
use crate::ModelError;
use crate::config::{
    AttentionConfig, BlockConfig, DecoderConfig, FeedForwardConfig, MixerConfig, RoutingConfig,
    ShortConvolutionConfig,
};
use crate::fields::{Fields, shown};

pub(super) fn config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let mut common = common(fields, "lfm2")?;
    // Its name in older configurations.
    common.inner_size = fields.count("block_ff_dim")?.unwrap_or(common.inner_size);
    if fields.flag("block_auto_adjust_ff_dim")?.unwrap_or(true) {
        let factor = fields.positive("block_ffn_dim_multiplier")?.unwrap_or(1.0);
        let multiple = fields.count("block_multiple_of")?.unwrap_or(256);
        let inner_size = (factor * (2 * common.inner_size / 3) as f64) as usize;
        common.inner_size = inner_size.next_multiple_of(multiple);
    }
    let feed_forward = FeedForwardConfig::Gated(common.gated());
    model(&common, |_| feed_forward.clone())
}

/// Reads `lfm2_moe`: mixtures behind some dense layers, chosen by the sigmoid of each expert.
pub(super) fn mixture_config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let common = common(fields, "lfm2_moe")?;
    let mixture = Mixture {
        experts: fields.count("num_experts")?.unwrap_or(32),
        chosen: fields.count("num_experts_per_tok")?.unwrap_or(4),
        inner_size: fields.required_count("moe_intermediate_size")?,
        normalised: fields.flag("norm_topk_prob")?.unwrap_or(true),
    };
    let corrected = fields.flag("use_expert_bias")?.unwrap_or(true);
    let routing = RoutingConfig {
        sigmoid: true,
        correction: corrected.then(|| "expert_bias".into()),
        scale: fields.number("routed_scaling_factor")?.unwrap_or(1.0) as f32,
        ..RoutingConfig::default()
    };
    let dense = fields.whole("num_dense_layers")?.unwrap_or(2);
    let mixture = mixture.config(&common, routing)?;
    model(&common, |layer| {
        if layer < dense {
            FeedForwardConfig::Gated(common.gated())
        } else {
            FeedForwardConfig::MixtureOfExperts(mixture.clone())
        }
    })
}

fn common<'a>(fields: &Fields<'a>, family: &'static str) -> Result<Common<'a>, ModelError> {
    let defaults = Defaults {
        kv_heads: Some(8),
        inner_size: fields.count("block_ff_dim")?,
        tied_embeddings: fields.flag("tie_embedding")?.unwrap_or(true),
        rope_theta: 1_000_000.0,
        norm_epsilon: fields.positive("norm_eps")?.unwrap_or(1e-5),
        ..Defaults::default()
    };
    Common::read(fields, family, defaults)
}

fn model(
    common: &Common<'_>,
    feed_forward: impl Fn(usize) -> FeedForwardConfig,
) -> Result<DecoderConfig, ModelError> {
    let fields = &common.fields;
    let attention =
        AttentionConfig { head_norm: Some(common.norm("", common.head_dim)), ..common.attention() };
    let convolution = ShortConvolutionConfig {
        hidden_size: common.hidden_size,
        kernel: fields.count("conv_L_cache")?.unwrap_or(3),
        bias: fields.flag("conv_bias")?.unwrap_or(false),
    };
    let attends = attention_layers(common)?;
    let blocks = attends
        .into_iter()
        .enumerate()
        .map(|(layer, attends)| {
            let block = common.block(attention.clone(), feed_forward(layer));
            if attends {
                block
            } else {
                BlockConfig { mixer: MixerConfig::ShortConvolution(convolution.clone()), ..block }
            }
        })
        .collect();
    Ok(common.model(vec![common.rope()?], blocks))
}

/// Returns for every layer whether it attends: from `layer_types`, or else from `full_attn_idxs`.
fn attention_layers(common: &Common<'_>) -> Result<Vec<bool>, ModelError> {
    let fields = &common.fields;
    let Some(kinds) = fields.list("layer_types")? else {
        let listed = fields.list("full_attn_idxs")?;
        let attends = |layer: usize| {
            listed.is_none_or(|listed| listed.iter().any(|index| index.as_u64() == Some(layer as u64)))
        };
        return Ok((0..common.layers).map(attends).collect());
    };
    if kinds.len() != common.layers {
        let reason = format!("lists {} layers, but num_hidden_layers is {}", kinds.len(), common.layers);
        return Err(fields.error("layer_types", reason));
    }
    kinds
        .iter()
        .map(|kind| match kind.as_str() {
            Some("full_attention") => Ok(true),
            Some("conv") => Ok(false),
            _ => Err(fields.error("layer_types", format!("{} is not a kind of layer of lfm2", shown(kind)))),
        })
        .collect()
}
