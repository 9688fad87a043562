//! The families of models that GGUF files hold.

use crate::error::Fault;
use crate::excerpt::Excerpt;

/// The supported model families, distinguished by their tensor layouts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    Llama,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    Qwen35,
    Qwen35Moe,
    Qwen3Next,
    DeepSeek2,
    Gemma3,
    Gemma4,
    GemmaEmbedding,
    SmolLm3,
    Phi3,
    Olmo2,
    Granite,
    GraniteMoe,
    GraniteHybrid,
    Mamba2,
    NemotronH,
    Glm4,
    Glm4Moe,
    Lfm2,
    Lfm2Moe,
    SeedOss,
    Ernie45,
    Exaone4,
    HunyuanDense,
    Cohere2,
    Starcoder2,
    Gpt2,
    GptOss,
    Mistral3,
    Bert,
    NomicBert,
    ModernBert,
}

impl Family {
    pub(crate) fn of(architecture: &str) -> Result<Self, Fault> {
        Ok(match architecture {
            "llama" => Self::Llama,
            "qwen2" => Self::Qwen2,
            "qwen3" => Self::Qwen3,
            "qwen3moe" => Self::Qwen3Moe,
            "qwen35" => Self::Qwen35,
            "qwen35moe" => Self::Qwen35Moe,
            "qwen3next" => Self::Qwen3Next,
            "deepseek2" => Self::DeepSeek2,
            "gemma3" => Self::Gemma3,
            "gemma4" => Self::Gemma4,
            "gemma-embedding" => Self::GemmaEmbedding,
            "smollm3" => Self::SmolLm3,
            "phi3" => Self::Phi3,
            "olmo2" => Self::Olmo2,
            "granite" => Self::Granite,
            "granitemoe" => Self::GraniteMoe,
            "granitehybrid" => Self::GraniteHybrid,
            "mamba2" => Self::Mamba2,
            "nemotron_h" | "nemotron_h_moe" => Self::NemotronH,
            "glm4" => Self::Glm4,
            "glm4moe" => Self::Glm4Moe,
            "lfm2" => Self::Lfm2,
            "lfm2moe" => Self::Lfm2Moe,
            "seed_oss" => Self::SeedOss,
            "ernie4_5" => Self::Ernie45,
            "exaone4" => Self::Exaone4,
            "hunyuan-dense" => Self::HunyuanDense,
            "cohere2" => Self::Cohere2,
            "starcoder2" => Self::Starcoder2,
            "gpt2" => Self::Gpt2,
            "gpt-oss" => Self::GptOss,
            "mistral3" => Self::Mistral3,
            "bert" => Self::Bert,
            "nomic-bert" => Self::NomicBert,
            "modern-bert" => Self::ModernBert,
            other => {
                return Err(Fault::unsupported(
                    "general.architecture",
                    format!(
                        "{:?}; if the same model is there as a directory of safetensors, open that: more families are read so",
                        Excerpt(other)
                    ),
                ));
            }
        })
    }

    /// Whether layers are of Mamba-2.
    pub(crate) fn has_mamba(self) -> bool {
        matches!(self, Self::GraniteHybrid | Self::Mamba2 | Self::NemotronH)
    }

    /// Whether layers of the gated delta rule alternate with attention.
    pub(crate) fn has_delta_nets(self) -> bool {
        matches!(self, Self::Qwen35 | Self::Qwen35Moe | Self::Qwen3Next)
    }
}
