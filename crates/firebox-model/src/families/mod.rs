//! Reads a `config.json` into a [`DecoderConfig`] or an [`EncoderConfig`]: one file per `model_type`.

mod bert;
mod common;
mod gemma3_text;
mod llama;
mod mistral;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_5;
mod qwen3_moe;
mod rope;
mod smollm3;

use serde_json::Value;

use crate::ModelError;
use crate::config::DecoderConfig;
use crate::encoder_config::EncoderConfig;
use crate::fields::Fields;

type ReadConfig = fn(&Fields<'_>) -> Result<DecoderConfig, ModelError>;

const DECODERS: [(&str, ReadConfig); 10] = [
    ("gemma3_text", gemma3_text::config),
    ("llama", llama::config),
    ("mistral", mistral::config),
    ("phi3", phi3::config),
    ("qwen2", qwen2::config),
    ("qwen3", qwen3::config),
    ("qwen3_5", qwen3_5::wrapper_config),
    ("qwen3_5_text", qwen3_5::config),
    ("qwen3_moe", qwen3_moe::config),
    ("smollm3", smollm3::config),
];

const ENCODERS: [&str; 1] = ["bert"];

/// A model's configuration.
#[derive(Debug, Clone, PartialEq)]
pub enum Architecture {
    /// A causal language model.
    Decoder(DecoderConfig),
    /// A sentence encoder or classifier.
    Encoder(EncoderConfig),
}

impl Architecture {
    /// Reads a `config.json`.
    pub fn from_json(config: &Value) -> Result<Self, ModelError> {
        let fields = Fields::new(config)?;
        let model_type =
            fields.text("model_type")?.ok_or_else(|| fields.error("model_type", "is missing"))?;
        if let Some((_, read)) = DECODERS.iter().find(|(name, _)| *name == model_type) {
            return Ok(Self::Decoder(read(&fields)?));
        }
        if ENCODERS.contains(&model_type) {
            return Ok(Self::Encoder(bert::config(&fields)?));
        }
        Err(ModelError::UnknownFamily { model_type: model_type.into(), supported: supported_families() })
    }
}

/// Returns every supported `model_type`.
pub fn supported_families() -> Vec<&'static str> {
    let mut names: Vec<_> = DECODERS.iter().map(|(name, _)| *name).chain(ENCODERS).collect();
    names.sort_unstable();
    names
}
