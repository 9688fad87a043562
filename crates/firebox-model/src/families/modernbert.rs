//! `modernbert`: an encoder of local and global layers with a position scheme each, norms before mixer and
//! feed-forward, and gated feed-forwards.

use super::common::{Common, Defaults, LayerKind};
use super::rope;
use crate::ModelError;
use crate::config::{
    Activation, AttentionConfig, AttentionProjections, BlockConfig, FeedForwardConfig, GatedConfig, NormKind,
    TensorNames,
};
use crate::encoder_config::{ClassifierConfig, EncoderConfig};
use crate::fields::Fields;
use crate::pooling::Pooling;

const RENAMED: [(&str, &str); 4] = [
    ("self_attn.qkv_proj", "attn.Wqkv"),
    ("self_attn.o_proj", "attn.Wo"),
    ("mlp.gate_up_proj", "mlp.Wi"),
    ("mlp.down_proj", "mlp.Wo"),
];

pub(super) fn config(fields: &Fields<'_>) -> Result<EncoderConfig, ModelError> {
    let flag = |name| fields.flag(name).map(|flag| flag.unwrap_or(false));
    let defaults = Defaults {
        activation: Activation::Gelu,
        norm_epsilon: 1e-5,
        norm_epsilon_field: "norm_eps",
        norm_kind: NormKind::Layer { bias: flag("norm_bias")? },
        ..Defaults::default()
    };
    let common = Common::read(fields, "modernbert", defaults)?;
    let every = fields.count("global_attn_every_n_layers")?.unwrap_or(3);
    let kinds =
        common.layer_kinds(|layer| if layer % every == 0 { LayerKind::Full } else { LayerKind::Sliding })?;
    // The field counts the tokens on both sides.
    let window = fields.count("local_attention")?.unwrap_or(128) / 2 + 1;
    let (attention_bias, bias) = (flag("attention_bias")?, flag("mlp_bias")?);
    let gated = FeedForwardConfig::Gated(GatedConfig { bias, fused: true, ..common.gated() });
    let norm = |name| common.norm(name, common.hidden_size);
    let block = |(layer, kind)| {
        let (window, rope) = match kind {
            LayerKind::Full => (None, 0),
            LayerKind::Sliding => (Some(window), 1),
            LayerKind::Recurrent => return Err(fields.error("layer_types", "has linear_attention layers")),
        };
        let attention = AttentionConfig {
            window,
            rope: Some(rope),
            projections: AttentionProjections::Fused,
            input_bias: attention_bias,
            output_bias: attention_bias,
            ..common.attention()
        };
        Ok(BlockConfig {
            // The embeddings are normalised already.
            mixer_norm: if layer == 0 { common.no_norm() } else { norm("attn_norm") },
            feed_forward_norm: norm("mlp_norm"),
            ..common.block(attention, gated.clone())
        })
    };
    let blocks = kinds.into_iter().enumerate().map(block).collect::<Result<_, _>>()?;
    let classifier = match common.classifies()? {
        true => Some(ClassifierConfig {
            pooling: match fields.text("classifier_pooling")? {
                None | Some("cls") => Pooling::First,
                Some("mean") => Pooling::Mean,
                Some(other) => {
                    return Err(
                        fields.error("classifier_pooling", format!("{other:?} is neither cls nor mean"))
                    );
                }
            },
            dense: "head.dense",
            bias: flag("classifier_bias")?,
            activation: match fields.text("classifier_activation")? {
                Some(name) => super::common::activation(fields, "classifier_activation", name)?,
                None => Activation::Gelu,
            },
            norm: Some(norm("head.norm")),
            repeats_separator: false,
            scores: "classifier",
        }),
        false => None,
    };
    Ok(EncoderConfig {
        embedding_norm: Some(norm("embeddings.norm")),
        final_norm: Some(norm("final_norm")),
        classifier,
        names: TensorNames {
            embedding: "embeddings.tok_embeddings".into(),
            renamed: &RENAMED,
            ..TensorNames::default()
        },
        ..common.encoder(ropes(&common)?, blocks)
    })
}

/// Returns the global position scheme and the local one. Newer configurations list both under `rope_parameters`; older
/// ones have a base for each.
fn ropes(common: &Common<'_>) -> Result<Vec<crate::config::RopeConfig>, ModelError> {
    let fields = &common.fields;
    let both = fields.object("rope_parameters")?;
    let scheme = |kind: &str, base: &str, usual: f64| {
        let scheme = match &both {
            Some(both) => both.object(kind)?,
            None => fields.object("rope_scaling")?,
        };
        let theta = fields.positive(base)?.unwrap_or(usual);
        rope::read_scheme(fields, scheme.as_ref(), common.rope_head(), theta)
    };
    Ok(vec![
        scheme("full_attention", "global_rope_theta", 160_000.0)?,
        scheme("sliding_attention", "local_rope_theta", 10_000.0)?,
    ])
}
