//! `qwen3_5` and `qwen3_5_text`: layers of the gated delta rule with gated attention between them. Only the
//! language model of the multimodal wrapper runs.

use super::common::{Common, Defaults, LayerKind};
use crate::ModelError;
use crate::config::{
    AttentionConfig, BlockConfig, DecoderConfig, DeltaNetConfig, FeedForwardConfig, MixerConfig, TensorNames,
};
use crate::fields::Fields;

/// Reads the wrapper: its text configuration is under `text_config`, and its tensor names have one more
/// prefix.
pub(super) fn wrapper_config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let text = fields.object("text_config")?.ok_or_else(|| fields.error("text_config", "is missing"))?;
    let model = config(&text)?;
    Ok(DecoderConfig {
        family: "qwen3_5",
        tied_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(model.tied_embeddings),
        names: TensorNames {
            prefix: "model.language_model.".into(),
            foreign: vec!["model.visual.".into(), "mtp.".into()],
            ..TensorNames::default()
        },
        ..model
    })
}

pub(super) fn config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let defaults = Defaults {
        head_dim: Some(256),
        kv_heads: Some(4),
        rotary_fraction: Some(0.25),
        norm_weight_offset: 1.0,
        ..Defaults::default()
    };
    let common = Common::read(fields, "qwen3_5_text", defaults)?;
    let interval = fields.count("full_attention_interval")?.unwrap_or(4);
    let kinds = common.layer_kinds(|layer| {
        if (layer + 1) % interval == 0 { LayerKind::Full } else { LayerKind::Recurrent }
    })?;
    let attention = AttentionConfig {
        head_norm: Some(common.norm("", common.head_dim)),
        gated: true,
        ..common.attention_with_configured_bias()?
    };
    let full = common.block(attention, FeedForwardConfig::Gated(common.gated()));
    let recurrent = BlockConfig { mixer: MixerConfig::GatedDeltaNet(delta_net(&common)?), ..full.clone() };
    let blocks = kinds
        .into_iter()
        .map(|kind| match kind {
            LayerKind::Full => Ok(full.clone()),
            LayerKind::Recurrent => Ok(recurrent.clone()),
            LayerKind::Sliding => Err(fields.error("layer_types", "qwen3_5 has no sliding_attention layers")),
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
    let hints = fields.object("firebox")?;
    let hint = |name: &str| match &hints {
        Some(hints) => hints.flag(name).map(|flag| flag.unwrap_or(false)),
        None => Ok(false),
    };
    Ok(DeltaNetConfig {
        hidden_size: common.hidden_size,
        key_heads,
        value_heads,
        key_dim: fields.count("linear_key_head_dim")?.unwrap_or(128),
        value_dim,
        kernel: fields.count("linear_conv_kernel_dim")?.unwrap_or(4),
        activation: common.activation,
        norm: common.plain_norm("norm", value_dim),
        decay_stored: hint("a_log_negated_exp")?,
        value_heads_tiled: hint("v_heads_tiled")?,
    })
}
