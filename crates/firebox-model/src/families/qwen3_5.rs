//! `qwen3_5`, `qwen3_5_text`, `qwen3_5_moe` and `qwen3_5_moe_text`: layers of the gated delta rule with gated
//! attention between them, and mixtures with a shared expert in the latter two. Only the
//! language model of the multimodal wrapper runs.

use super::common::{Common, Defaults, LayerKind};
use super::mixture::{Mixture, gated_shared_expert};
use crate::ModelError;
use crate::config::{
    AttentionConfig, BlockConfig, DecoderConfig, DeltaNetConfig, DeltaNetProjections, ExpertsConfig,
    FeedForwardConfig, MixerConfig, RoutingConfig, TensorNames,
};
use crate::fields::Fields;

/// Reads the wrapper of `qwen3_5`.
pub(super) fn wrapper_config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    wrapped(fields, "qwen3_5", config)
}

/// Reads the wrapper of `qwen3_5_moe`.
pub(super) fn mixture_wrapper_config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    wrapped(fields, "qwen3_5_moe", mixture_config)
}

/// Reads a wrapper: its text configuration is under `text_config`, and its tensor names have one more prefix.
fn wrapped(
    fields: &Fields<'_>,
    family: &'static str,
    read: impl FnOnce(&Fields<'_>) -> Result<DecoderConfig, ModelError>,
) -> Result<DecoderConfig, ModelError> {
    let text = fields.object("text_config")?.ok_or_else(|| fields.error("text_config", "is missing"))?;
    let model = read(&text)?;
    Ok(DecoderConfig {
        family,
        tied_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(model.tied_embeddings),
        names: TensorNames {
            prefix: "model.language_model.".into(),
            foreign: vec!["model.visual.".into(), "mtp.".into()],
            ..TensorNames::default()
        },
        ..model
    })
}

const DEFAULTS: Defaults = Defaults {
    head_dim: Some(256),
    kv_heads: Some(4),
    rotary_fraction: Some(0.25),
    norm_weight_offset: 1.0,
    ..Defaults::USUAL
};

pub(super) fn config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let common = Common::read(fields, "qwen3_5_text", DEFAULTS)?;
    hybrid(&common, FeedForwardConfig::Gated(common.gated()))
}

/// Reads `qwen3_5_moe_text`, every layer of which has a mixture with a shared expert.
pub(super) fn mixture_config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let inner_size = fields.count("moe_intermediate_size")?.unwrap_or(512);
    let defaults = Defaults { kv_heads: Some(2), inner_size: Some(inner_size), ..DEFAULTS };
    let common = Common::read(fields, "qwen3_5_moe_text", defaults)?;
    let mixture = Mixture {
        experts: fields.count("num_experts")?.unwrap_or(256),
        chosen: fields.count("num_experts_per_tok")?.unwrap_or(8),
        inner_size,
        normalised: true,
    };
    let shared = fields.count("shared_expert_intermediate_size")?.unwrap_or(512);
    let mixture = ExpertsConfig {
        shared: Some(gated_shared_expert(&common, shared)),
        ..mixture.config(&common, RoutingConfig::default())?
    };
    hybrid(&common, FeedForwardConfig::MixtureOfExperts(mixture))
}

/// Returns a model of delta rule and gated attention layers that all have one kind of feed-forward network.
pub(super) fn hybrid(
    common: &Common<'_>,
    feed_forward: FeedForwardConfig,
) -> Result<DecoderConfig, ModelError> {
    let fields = &common.fields;
    let interval = fields.count("full_attention_interval")?.unwrap_or(4);
    let kinds = common.layer_kinds(|layer| {
        if (layer + 1) % interval == 0 { LayerKind::Full } else { LayerKind::Recurrent }
    })?;
    let attention = AttentionConfig {
        head_norm: Some(common.norm("", common.head_dim)),
        gated: true,
        ..common.attention_with_configured_bias()?
    };
    let full = common.block(attention, feed_forward);
    let recurrent = BlockConfig { mixer: MixerConfig::GatedDeltaNet(delta_net(common)?), ..full.clone() };
    let blocks = kinds
        .into_iter()
        .map(|kind| match kind {
            LayerKind::Full => Ok(full.clone()),
            LayerKind::Recurrent => Ok(recurrent.clone()),
            LayerKind::Sliding => {
                let reason = format!("{} has no sliding_attention layers", common.family);
                Err(fields.error("layer_types", reason))
            }
        })
        .collect::<Result<_, _>>()?;
    let model = common.model(vec![common.rope()?], blocks);
    Ok(DecoderConfig {
        names: TensorNames { foreign: vec!["mtp.".into()], ..TensorNames::default() },
        ..model
    })
}

fn delta_net(common: &Common<'_>) -> Result<DeltaNetConfig, ModelError> {
    let fields = &common.fields;
    let key_heads = fields.count("linear_num_key_heads")?.unwrap_or(16);
    let value_heads = fields.count("linear_num_value_heads")?.unwrap_or(32);
    if value_heads % key_heads != 0 {
        return Err(fields.error(
            "linear_num_key_heads",
            format!("{key_heads} does not divide linear_num_value_heads {value_heads}"),
        ));
    }
    let value_dim = fields.count("linear_value_head_dim")?.unwrap_or(128);
    Ok(DeltaNetConfig {
        hidden_size: common.hidden_size,
        key_heads,
        value_heads,
        key_dim: fields.count("linear_key_head_dim")?.unwrap_or(128),
        value_dim,
        kernel: fields.count("linear_conv_kernel_dim")?.unwrap_or(4),
        activation: common.activation,
        norm: common.plain_norm("norm", value_dim),
        projections: DeltaNetProjections::Separate,
        decay_stored: fields.hint("a_log_negated_exp")?,
        value_heads_tiled: fields.hint("v_heads_tiled")?,
    })
}
