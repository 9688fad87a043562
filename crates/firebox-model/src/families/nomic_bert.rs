//! `nomic_bert`: an encoder with rotary positions, a gated feed-forward, and norms of sums.
//!
//! Published configurations name fields as GPT-2 does, newer ones as BERT does, and some do both.

use super::common::{Common, Defaults};
use super::rope;
use crate::ModelError;
use crate::config::{
    Activation, AttentionConfig, AttentionProjections, FeedForwardConfig, GatedConfig, NormKind, RopeLayout,
    TensorNames,
};
use crate::encoder_config::{ClassifierConfig, EncoderConfig};
use crate::fields::Fields;
use crate::pooling::Pooling;

const OWN_FIELDS: [(&str, &str); 5] = [
    ("hidden_size", "n_embd"),
    ("intermediate_size", "n_inner"),
    ("num_hidden_layers", "n_layer"),
    ("num_attention_heads", "n_head"),
    ("layer_norm_eps", "layer_norm_epsilon"),
];

const RENAMED: [(&str, &str); 5] = [
    ("self_attn.qkv_proj", "attn.Wqkv"),
    ("self_attn.o_proj", "attn.out_proj"),
    ("mlp.up_proj", "mlp.fc11"),
    ("mlp.gate_proj", "mlp.fc12"),
    ("mlp.down_proj", "mlp.fc2"),
];

pub(super) fn config(fields: &Fields<'_>) -> Result<EncoderConfig, ModelError> {
    let is_own = fields.get("hidden_size").is_none();
    let fields = &if is_own { fields.with_names(&OWN_FIELDS) } else { fields.clone() };
    refuse_other_layers(fields)?;
    let flag = |name, absent| fields.flag(name).map(|flag| flag.unwrap_or(absent));
    let interleaved = flag("rotary_emb_interleaved", false)?;
    let defaults = Defaults {
        norm_epsilon: 1e-12,
        norm_epsilon_field: "layer_norm_eps",
        norm_kind: NormKind::Layer { bias: true },
        rope_layout: if interleaved { RopeLayout::Interleaved } else { RopeLayout::Half },
        ..Defaults::default()
    };
    let mut common = Common::read(fields, "nomic_bert", defaults)?;
    match fields.text("activation_function")? {
        None => {}
        Some("swiglu") => common.activation = Activation::Silu,
        Some("geglu") => common.activation = Activation::Gelu,
        Some(other) => {
            return Err(fields.error("activation_function", format!("{other:?} is neither swiglu nor geglu")));
        }
    }
    let lengths = ["max_position_embeddings", "n_positions", "max_trained_positions"];
    let lengths = lengths.map(|name| fields.count(name)).into_iter().collect::<Result<Vec<_>, _>>()?;
    let attention_bias = flag("qkv_proj_bias", is_own)?;
    let bias = flag("mlp_fc1_bias", is_own)?;
    if flag("mlp_fc2_bias", is_own)? != bias {
        return Err(fields.error("mlp_fc2_bias", "differs from mlp_fc1_bias; both have biases, or none has"));
    }
    let attention = AttentionConfig {
        projections: AttentionProjections::Fused,
        input_bias: attention_bias,
        output_bias: attention_bias,
        ..common.attention()
    };
    let feed_forward = FeedForwardConfig::Gated(GatedConfig { bias, ..common.gated() });
    let block = common.block_with_norms_of_sums(attention, feed_forward, ["norm1", "norm2"]);
    let usual_theta = if is_own { 10_000.0 } else { 1_000.0 };
    let theta = fields.positive("rotary_emb_base")?.unwrap_or(usual_theta);
    Ok(EncoderConfig {
        max_positions: lengths.into_iter().flatten().min().unwrap_or(2048),
        token_types: fields.whole("type_vocab_size")?.unwrap_or(2),
        embedding_norm: Some(common.norm("emb_ln", common.hidden_size)),
        classifier: common.classifies()?.then_some(ClassifierConfig {
            pooling: Pooling::First,
            dense: "pooler.dense",
            bias: true,
            activation: Activation::Tanh,
            norm: None,
            repeats_separator: false,
            scores: "classifier",
        }),
        names: TensorNames {
            prefix: "nomic_bert.".into(),
            embedding: "embeddings.word_embeddings".into(),
            layers: "encoder.layers".into(),
            renamed: &RENAMED,
            ..TensorNames::default()
        },
        ..common.encoder(vec![rope::read(fields, common.rope_head(), theta)?], vec![block; common.layers])
    })
}

/// Refuses fields whose values ask for layers that are built otherwise.
fn refuse_other_layers(fields: &Fields<'_>) -> Result<(), ModelError> {
    for name in ["prenorm", "parallel_block", "causal", "use_rms_norm"] {
        if fields.flag(name)?.unwrap_or(false) {
            return Err(fields.error(name, "is set; supported are encoders of layer norms behind each sum"));
        }
    }
    for name in ["rotary_emb_scale_base", "rotary_scaling_factor"] {
        if let Some(value) = fields.number(name)? {
            return Err(fields.error(name, format!("is {value}; supported are unscaled rotary positions")));
        }
    }
    if let Some(experts) = fields.whole("moe_every_n_layers")?.filter(|every| *every > 0) {
        return Err(
            fields.error("moe_every_n_layers", format!("is {experts}; experts are not supported here"))
        );
    }
    match fields.number("rotary_emb_fraction")?.filter(|fraction| *fraction != 1.0) {
        None => Ok(()),
        Some(fraction) => {
            Err(fields.error("rotary_emb_fraction", format!("is {fraction}; whole heads are rotated, 1.0")))
        }
    }
}
