//! Reads a `config.json` into a [`DecoderConfig`] or an [`EncoderConfig`]: one file per `model_type`.

mod bert;
mod cohere2;
mod common;
mod deepseek_v3;
mod dense;
mod ernie4_5;
mod exaone4;
mod gemma3_text;
mod gemma4;
mod glm4;
mod glm4_moe;
mod gpt2;
mod gpt_oss;
mod granite;
mod granitemoe;
mod hunyuan_v1_dense;
mod lfm2;
mod llama;
mod mamba;
mod mamba2;
mod ministral3;
mod mistral;
mod mixture;
mod modernbert;
mod nemotron_h;
mod nomic_bert;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_5;
mod qwen3_moe;
mod qwen3_next;
mod rope;
mod seed_oss;
mod smollm3;
mod starcoder2;

use serde_json::Value;

use crate::ModelError;
use crate::config::DecoderConfig;
use crate::encoder_config::EncoderConfig;
use crate::fields::Fields;

type ReadConfig = fn(&Fields<'_>) -> Result<DecoderConfig, ModelError>;

const DECODERS: [(&str, ReadConfig); 38] = [
    ("cohere2", |fields| cohere2::COHERE2.read(fields)),
    ("deepseek_v3", deepseek_v3::config),
    ("ernie4_5", |fields| ernie4_5::ERNIE4_5.read(fields)),
    ("exaone4", |fields| exaone4::EXAONE4.read(fields)),
    ("gemma3_text", gemma3_text::config),
    ("gemma4", gemma4::wrapper_config),
    ("gemma4_text", gemma4::config),
    ("glm4", |fields| glm4::GLM4.read(fields)),
    ("glm4_moe", glm4_moe::config),
    ("glm4_moe_lite", deepseek_v3::lite_config),
    ("gpt2", |fields| gpt2::GPT2.read(fields)),
    ("gpt_oss", gpt_oss::config),
    ("granite", |fields| granite::GRANITE.read(fields)),
    ("granitemoe", granitemoe::config),
    ("granitemoehybrid", granitemoe::hybrid_config),
    ("hunyuan_v1_dense", |fields| hunyuan_v1_dense::HUNYUAN_V1_DENSE.read(fields)),
    ("lfm2", lfm2::config),
    ("lfm2_moe", lfm2::mixture_config),
    ("llama", llama::config),
    ("mamba2", mamba2::config),
    ("ministral3", |fields| ministral3::MINISTRAL3.read(fields)),
    ("mistral", mistral::config),
    ("mistral3", ministral3::wrapper_config),
    ("nemotron_h", nemotron_h::config),
    ("olmo2", |fields| olmo2::OLMO2.read(fields)),
    ("olmo3", |fields| olmo2::OLMO3.read(fields)),
    ("phi3", phi3::config),
    ("qwen2", qwen2::config),
    ("qwen3", qwen3::config),
    ("qwen3_5", qwen3_5::wrapper_config),
    ("qwen3_5_moe", qwen3_5::mixture_wrapper_config),
    ("qwen3_5_moe_text", qwen3_5::mixture_config),
    ("qwen3_5_text", qwen3_5::config),
    ("qwen3_moe", qwen3_moe::config),
    ("qwen3_next", qwen3_next::config),
    ("seed_oss", |fields| seed_oss::SEED_OSS.read(fields)),
    ("smollm3", smollm3::config),
    ("starcoder2", |fields| starcoder2::STARCODER2.read(fields)),
];

type ReadEncoder = fn(&Fields<'_>) -> Result<EncoderConfig, ModelError>;

const ENCODERS: [(&str, ReadEncoder); 5] = [
    ("bert", bert::config),
    ("modernbert", modernbert::config),
    ("nomic_bert", nomic_bert::config),
    ("roberta", bert::roberta),
    ("xlm-roberta", bert::xlm_roberta),
];

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
        if model_type == "gemma3_text" && gemma3_text::sees_both_ways(&fields)? {
            return Ok(Self::Encoder(gemma3_text::encoder_config(&fields)?));
        }
        if let Some((_, read)) = DECODERS.iter().find(|(name, _)| *name == model_type) {
            return Ok(Self::Decoder(read(&fields)?));
        }
        if let Some((_, read)) = ENCODERS.iter().find(|(name, _)| *name == model_type) {
            return Ok(Self::Encoder(read(&fields)?));
        }
        Err(ModelError::UnknownFamily { model_type: model_type.into(), supported: supported_families() })
    }
}

/// Returns every supported `model_type`.
pub fn supported_families() -> Vec<&'static str> {
    let encoders = ENCODERS.iter().map(|(name, _)| *name);
    let mut names: Vec<_> = DECODERS.iter().map(|(name, _)| *name).chain(encoders).collect();
    names.sort_unstable();
    names
}
