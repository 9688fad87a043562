//! `bert`: the sentence encoder.

use super::common::activation;
use crate::ModelError;
use crate::encoder_config::EncoderConfig;
use crate::fields::Fields;

pub(super) fn config(fields: &Fields<'_>) -> Result<EncoderConfig, ModelError> {
    let hidden_size = fields.required_count("hidden_size")?;
    let heads = fields.required_count("num_attention_heads")?;
    if hidden_size % heads != 0 {
        return Err(fields.error("num_attention_heads", format!("{heads} heads do not divide {hidden_size}")));
    }
    match fields.text("position_embedding_type")? {
        None | Some("absolute") => {}
        Some(other) => {
            return Err(fields.error("position_embedding_type", format!("{other:?} is not supported")));
        }
    }
    Ok(EncoderConfig {
        vocab_size: fields.required_count("vocab_size")?,
        hidden_size,
        inner_size: fields.required_count("intermediate_size")?,
        layers: fields.required_count("num_hidden_layers")?,
        heads,
        max_positions: fields.required_count("max_position_embeddings")?,
        token_types: fields.count("type_vocab_size")?.unwrap_or(2),
        epsilon: fields.positive("layer_norm_eps")?.unwrap_or(1e-12),
        activation: activation(fields, "hidden_act", fields.text("hidden_act")?.unwrap_or("gelu"))?,
    })
}
