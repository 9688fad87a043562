//! `nemotron_h`: layers of Mamba-2, attention without positions, a feed-forward network or a mixture of experts, each
//! alone behind a norm. The store gives parts of mixtures their usual names.

use super::common::{Common, Defaults, activation};
use super::mamba::{MambaDefaults, feed_forward_block, mamba, mixer_block};
use super::mamba2::backbone;
use super::mixture::{Mixture, corrected};
use crate::ModelError;
use crate::config::{
    Activation, AttentionConfig, DecoderConfig, ExpertsConfig, FeedForwardConfig, GatedConfig, MambaConfig,
    MixerConfig, PlainConfig, SharedExpertConfig, TensorNames,
};
use crate::fields::{Fields, shown};

const FIELDS: &[(&str, &str)] = &[
    ("hidden_act", "mlp_hidden_act"),
    ("mamba_n_heads", "mamba_num_heads"),
    ("mamba_d_head", "mamba_head_dim"),
    ("mamba_n_groups", "n_groups"),
    ("mamba_d_state", "ssm_state_size"),
    ("mamba_d_conv", "conv_kernel"),
    ("mamba_proj_bias", "use_bias"),
    ("mamba_conv_bias", "use_conv_bias"),
];

/// What a layer is.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Mamba,
    Attention,
    FeedForward,
    Experts,
}

pub(super) fn config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let fields = &fields.with_names(FIELDS);
    let kinds = kinds(fields)?;
    let defaults = Defaults {
        kv_heads: Some(8),
        head_dim: Some(128),
        activation: Activation::ReluSquared,
        norm_epsilon: 1e-5,
        norm_epsilon_field: "layer_norm_epsilon",
        layers: Some(kinds.len()),
        ..Defaults::USUAL
    };
    let common = Common::read(fields, "nemotron_h", defaults)?;
    if common.layers != kinds.len() {
        let reason = format!("is {}, but {} layers are listed", common.layers, kinds.len());
        return Err(fields.error("num_hidden_layers", reason));
    }
    let flag = |name: &str| fields.flag(name).map(|flag| flag.unwrap_or(false));
    let defaults = MambaDefaults { heads: 128, head_dim: Some(64), groups: 8, states: 128 };
    let of_mamba = match fields.text("mamba_hidden_act")? {
        Some(name) => activation(fields, "mamba_hidden_act", name)?,
        None => Activation::Silu,
    };
    let mamba = MambaConfig {
        smallest_step: fields.number("time_step_min")?.unwrap_or(1e-3) as f32,
        ..mamba(&common, fields, defaults, of_mamba)?
    };
    let attention = AttentionConfig { rope: None, ..common.attention() };
    let feed_forward = PlainConfig { bias: flag("mlp_bias")?, ..common.plain() };
    let mixture = match kinds.contains(&Kind::Experts) {
        true => FeedForwardConfig::MixtureOfExperts(mixture(&common, feed_forward.bias)?),
        false => FeedForwardConfig::Absent,
    };
    let blocks = kinds.into_iter().map(|kind| match kind {
        Kind::Mamba => mixer_block(&common, "norm", MixerConfig::Mamba(mamba.clone())),
        Kind::Attention => mixer_block(&common, "norm", MixerConfig::Attention(attention.clone())),
        Kind::FeedForward => {
            feed_forward_block(&common, "norm", FeedForwardConfig::Plain(feed_forward.clone()))
        }
        Kind::Experts => feed_forward_block(&common, "norm", mixture.clone()),
    });
    Ok(DecoderConfig {
        // They are stored apart even where `tie_word_embeddings` is set.
        tied_embeddings: false,
        final_norm: common.norm("norm_f", common.hidden_size),
        names: TensorNames {
            renamed: &[
                ("mamba.", "mixer."),
                ("self_attn.", "mixer."),
                ("mlp.up_proj.", "mixer.up_proj."),
                ("mlp.down_proj.", "mixer.down_proj."),
            ],
            foreign: vec!["mtp.".into()],
            ..backbone()
        },
        ..common.model(Vec::new(), blocks.collect())
    })
}

/// Returns experts without gates, chosen by the sigmoid of each, beside a network that works on every token.
fn mixture(common: &Common<'_>, bias: bool) -> Result<ExpertsConfig, ModelError> {
    let fields = &common.fields;
    if fields.count("moe_latent_size")?.is_some() {
        let reason = "is set; only experts that read the hidden state itself run";
        return Err(fields.error("moe_latent_size", reason));
    }
    let mixture = Mixture {
        experts: fields.count("n_routed_experts")?.unwrap_or(8),
        chosen: fields.count("num_experts_per_tok")?.unwrap_or(2),
        inner_size: fields.count("moe_intermediate_size")?.unwrap_or(7688),
        normalised: fields.flag("norm_topk_prob")?.unwrap_or(true),
    };
    let mixture = mixture.config(common, corrected(fields, [1, 1], 1.0)?)?;
    let expert = GatedConfig { ungated: true, ..mixture.expert };
    let inner_size = fields.count("moe_shared_expert_intermediate_size")?.unwrap_or(7688);
    let shared = SharedExpertConfig {
        prefix: "shared_experts.".into(),
        network: GatedConfig { inner_size, bias, ..expert.clone() },
        gate: None,
    };
    Ok(ExpertsConfig { expert, shared: Some(shared), ..mixture })
}

/// Returns what every layer is: from a list, or from a word with a letter for each.
fn kinds(fields: &Fields<'_>) -> Result<Vec<Kind>, ModelError> {
    let field = if fields.get("layers_block_type").is_some() { "layers_block_type" } else { "layer_types" };
    if let Some(listed) = fields.list(field)? {
        let kind = |value: &serde_json::Value| match value.as_str() {
            Some("linear_attention" | "mamba") => Ok(Kind::Mamba),
            Some("full_attention" | "attention") => Ok(Kind::Attention),
            Some("mlp") => Ok(Kind::FeedForward),
            Some("moe") => Ok(Kind::Experts),
            _ => Err(unknown(fields, field, shown(value))),
        };
        return listed.iter().map(kind).collect();
    }
    const PATTERN: &str = "hybrid_override_pattern";
    let pattern = fields.text(PATTERN)?.ok_or_else(|| fields.error("layers_block_type", "is missing"))?;
    let kind = |letter| match letter {
        'M' => Ok(Kind::Mamba),
        '*' => Ok(Kind::Attention),
        '-' => Ok(Kind::FeedForward),
        'E' => Ok(Kind::Experts),
        _ => Err(unknown(fields, PATTERN, format!("{letter:?}"))),
    };
    pattern.chars().map(kind).collect()
}

fn unknown(fields: &Fields<'_>, field: &str, kind: String) -> ModelError {
    fields.error(field, format!("{kind} is not a kind of layer that nemotron_h runs with"))
}
