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
    Gemma3,
    SmolLm3,
    Phi3,
    Bert,
}

impl Family {
    pub(crate) fn of(architecture: &str) -> Result<Self, Fault> {
        Ok(match architecture {
            "llama" => Self::Llama,
            "qwen2" => Self::Qwen2,
            "qwen3" => Self::Qwen3,
            "qwen3moe" => Self::Qwen3Moe,
            "qwen35" => Self::Qwen35,
            "gemma3" => Self::Gemma3,
            "smollm3" => Self::SmolLm3,
            "phi3" => Self::Phi3,
            "bert" => Self::Bert,
            other => {
                return Err(Fault::unsupported(
                    "general.architecture",
                    format!(
                        "{:?}; known are llama, qwen2, qwen3, qwen3moe, qwen35, gemma3, smollm3, phi3, bert",
                        Excerpt(other)
                    ),
                ));
            }
        })
    }
}
