//! `bert`, `roberta` and `xlm-roberta`: encoders with learned positions, and norms of sums.

use super::common::{Common, Defaults};
use crate::ModelError;
use crate::config::{
    Activation, AttentionConfig, BlockConfig, FeedForwardConfig, NormKind, PlainConfig, TensorNames,
};
use crate::encoder_config::{ClassifierConfig, EncoderConfig};
use crate::fields::Fields;
use crate::pooling::Pooling;

const RENAMED: [(&str, &str); 6] = [
    ("self_attn.q_proj", "attention.self.query"),
    ("self_attn.k_proj", "attention.self.key"),
    ("self_attn.v_proj", "attention.self.value"),
    ("self_attn.o_proj", "attention.output.dense"),
    ("mlp.up_proj", "intermediate.dense"),
    ("mlp.down_proj", "output.dense"),
];

/// Reads a `config.json` of BERT, whose classifier reads the encoder's own pooler.
pub(super) fn config(fields: &Fields<'_>) -> Result<EncoderConfig, ModelError> {
    let names = TensorNames { prefix: "bert.".into(), ..TensorNames::default() };
    read(fields, "bert", names, ("pooler.dense", "classifier"))
}

/// Reads a `config.json` of RoBERTa.
pub(super) fn roberta(fields: &Fields<'_>) -> Result<EncoderConfig, ModelError> {
    after_padding(fields, "roberta")
}

/// Reads a `config.json` of XLM-RoBERTa.
pub(super) fn xlm_roberta(fields: &Fields<'_>) -> Result<EncoderConfig, ModelError> {
    after_padding(fields, "xlm-roberta")
}

/// Reads a `config.json` of a family whose positions begin behind the padding token's index.
fn after_padding(fields: &Fields<'_>, family: &'static str) -> Result<EncoderConfig, ModelError> {
    let names = TensorNames { prefix: "roberta.".into(), ..TensorNames::default() };
    let encoder = read(fields, family, names, ("classifier.dense", "classifier.out_proj"))?;
    let first = fields.whole("pad_token_id")?.unwrap_or(1) + 1;
    match encoder.max_positions.checked_sub(first) {
        Some(max_positions) if max_positions > 0 => {
            Ok(EncoderConfig { first_position: Some(first), max_positions, ..encoder })
        }
        _ => {
            let reason =
                format!("{} leaves no position behind padding token {}", encoder.max_positions, first - 1);
            Err(fields.error("max_position_embeddings", reason))
        }
    }
}

fn read(
    fields: &Fields<'_>,
    family: &'static str,
    names: TensorNames,
    (dense, scores): (&'static str, &'static str),
) -> Result<EncoderConfig, ModelError> {
    match fields.text("position_embedding_type")? {
        None | Some("absolute") => {}
        Some(other) => {
            return Err(fields.error("position_embedding_type", format!("{other:?} is not supported")));
        }
    }
    if fields.flag("is_decoder")?.unwrap_or(false) {
        return Err(fields.error("is_decoder", "is set; only encoders of this family are supported"));
    }
    let defaults = Defaults {
        activation: Activation::Gelu,
        norm_epsilon: 1e-12,
        norm_epsilon_field: "layer_norm_eps",
        norm_kind: NormKind::Layer { bias: true },
        ..Defaults::default()
    };
    let common = Common::read(fields, family, defaults)?;
    let attention = AttentionConfig { rope: None, input_bias: true, output_bias: true, ..common.attention() };
    let feed_forward = FeedForwardConfig::Plain(PlainConfig { bias: true, ..common.plain() });
    let norms = ["attention.output.LayerNorm", "output.LayerNorm"];
    let block = common.block_with_norms_of_sums(attention, feed_forward, norms);
    Ok(EncoderConfig {
        max_positions: fields.required_count("max_position_embeddings")?,
        first_position: Some(0),
        token_types: fields.count("type_vocab_size")?.unwrap_or(2),
        embedding_norm: Some(common.norm("embeddings.LayerNorm", common.hidden_size)),
        classifier: common.classifies()?.then_some(ClassifierConfig {
            pooling: Pooling::First,
            dense,
            bias: true,
            activation: Activation::Tanh,
            norm: None,
            repeats_separator: family != "bert",
            scores,
        }),
        names: TensorNames {
            embedding: "embeddings.word_embeddings".into(),
            layers: "encoder.layer".into(),
            renamed: &RENAMED,
            ..names
        },
        ..common.encoder(Vec::new(), vec![block; common.layers])
    })
}

impl Common<'_> {
    /// Returns a block of two norms, which apply to the sums of mixer and feed-forward with the residual.
    pub fn block_with_norms_of_sums(
        &self,
        attention: AttentionConfig,
        feed_forward: FeedForwardConfig,
        [mixed, fed]: [&str; 2],
    ) -> BlockConfig {
        BlockConfig {
            mixer_norm: self.no_norm(),
            mixer_output_norm: Some(self.norm(mixed, self.hidden_size)),
            feed_forward_norm: self.no_norm(),
            feed_forward_output_norm: Some(self.norm(fed, self.hidden_size)),
            norms_sums: true,
            ..self.block(attention, feed_forward)
        }
    }
}
