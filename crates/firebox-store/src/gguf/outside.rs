//! The entries of a configuration that do not belong to layers.

use serde_json::{Map, Value, json};

use super::keys::Keys;
use super::object::set;
use super::tensor_summary::TensorSummary;
use crate::error::Fault;

/// Adds them.
pub(super) fn outside_layers(
    keys: &Keys<'_>,
    seen: &TensorSummary,
    config: &mut Map<String, Value>,
) -> Result<(), Fault> {
    let id = |name: &str| keys.metadata.id(&format!("tokenizer.ggml.{name}_token_id"));
    set(
        config,
        json!({
            "hidden_size": keys.dimension("embedding_length")?,
            "num_hidden_layers": keys.layers()?,
            "vocab_size": seen.vocab_size,
            "tie_word_embeddings": !seen.has_output,
            "bos_token_id": id("bos")?,
            "eos_token_id": id("eos")?,
            "pad_token_id": id("padding")?,
        }),
    );
    Ok(())
}
