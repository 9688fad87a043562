//! The `config.json` that a model had before its conversion to GGUF, reconstructed from the metadata.

use serde_json::{Map, Value, json};

use super::dense::{dense, mistral3_rope};
use super::family::Family;
use super::gemma4;
use super::hybrid;
use super::keys::{Keys, MAX_DIMENSION};
use super::metadata::Metadata;
use super::mixtures;
use super::object::set;
use super::outside::outside_layers;
use super::rope::{original_context, rope};
use super::state_space;
use super::tensor_summary::TensorSummary;
use super::windows::{self, sliding_window};
use crate::error::Fault;

/// Builds the configuration.
pub(crate) fn config(
    metadata: &Metadata,
    architecture: &str,
    family: Family,
    seen: &TensorSummary,
) -> Result<Value, Fault> {
    let keys = Keys { metadata, architecture };
    let mut config = Map::new();
    let mut notes = Map::new();
    if !matches!(family, Family::Mamba2 | Family::NemotronH) {
        common(&keys, family, seen, &mut config)?;
    }
    match family {
        Family::Llama => llama(&keys, seen, &mut config, &mut notes)?,
        Family::SmolLm3 => smollm3(&keys, seen, &mut config, &mut notes)?,
        Family::Qwen2 => qwen(&keys, "qwen2", "Qwen2ForCausalLM", &mut config)?,
        Family::Qwen3 => qwen(&keys, "qwen3", "Qwen3ForCausalLM", &mut config)?,
        Family::Qwen3Moe => mixtures::qwen3_moe(&keys, &mut config)?,
        Family::Qwen35 | Family::Qwen35Moe | Family::Qwen3Next => {
            hybrid::delta_nets(&keys, family, seen, &mut config, &mut notes)?;
        }
        Family::Glm4Moe => mixtures::glm4_moe(&keys, seen, &mut config)?,
        Family::DeepSeek2 => mixtures::deepseek2(&keys, seen, &mut config, &mut notes)?,
        Family::GraniteMoe => mixtures::granite_moe(&keys, &mut config, &mut notes)?,
        Family::GraniteHybrid => state_space::granite_hybrid(&keys, seen, &mut config, &mut notes)?,
        Family::NemotronH => state_space::nemotron_h(&keys, seen, &mut config, &mut notes)?,
        Family::Mamba2 => state_space::mamba2(&keys, seen, &mut config, &mut notes)?,
        Family::GptOss => mixtures::gpt_oss(&keys, &mut config, &mut notes)?,
        Family::Lfm2 | Family::Lfm2Moe => hybrid::lfm2(&keys, family, seen, &mut config)?,
        Family::Gemma3 => gemma3(&keys, &mut config, &mut notes)?,
        Family::Gemma4 => gemma4::config(&keys, seen, &mut config)?,
        Family::GemmaEmbedding => gemma_embedding(&keys, &mut config, &mut notes)?,
        Family::Phi3 => phi3(&keys, &mut config)?,
        Family::Olmo2
        | Family::Granite
        | Family::Glm4
        | Family::SeedOss
        | Family::Ernie45
        | Family::Exaone4
        | Family::HunyuanDense
        | Family::Cohere2
        | Family::Starcoder2
        | Family::Gpt2
        | Family::Mistral3 => dense(&keys, family, seen, &mut config, &mut notes)?,
        Family::Bert => bert(&keys, seen, &mut config, &mut notes)?,
        Family::NomicBert => nomic_bert(&keys, seen, &mut config, &mut notes)?,
        Family::ModernBert => modern_bert(&keys, &mut config, &mut notes)?,
    }
    if !matches!(family, Family::Bert | Family::Gpt2 | Family::Gemma4 | Family::Mamba2 | Family::NemotronH) {
        rope(&keys, family, seen, &mut config)?;
    }
    if family == Family::Mistral3 {
        mistral3_rope(&keys, &mut config)?;
    }
    let pooling = match keys.number("pooling_type")? {
        Some(1) => Some("mean"),
        Some(2) => Some("first"),
        Some(3) => Some("last"),
        _ => None,
    };
    notes.extend(pooling.map(|pooling| ("pooling".into(), pooling.into())));
    notes.insert("source".into(), "gguf".into());
    config.insert("firebox".into(), Value::Object(notes));
    Ok(Value::Object(config))
}

fn common(
    keys: &Keys<'_>,
    family: Family,
    seen: &TensorSummary,
    config: &mut Map<String, Value>,
) -> Result<(), Fault> {
    let heads = keys.dimension("attention.head_count")?;
    let key_heads = match family {
        Family::Lfm2 | Family::Lfm2Moe | Family::GraniteHybrid => hybrid::key_heads(keys)?.into_iter().max(),
        // Each layer of the one has its own; that of the other is not a head of the checkpoint's.
        Family::Gemma4 | Family::DeepSeek2 => None,
        _ => keys.number("attention.head_count_kv")?,
    };
    let key_heads = key_heads.unwrap_or(heads);
    if key_heads == 0 || !heads.is_multiple_of(key_heads) {
        return Err(Fault::new(
            keys.key("attention.head_count_kv"),
            format!("{key_heads} heads of keys do not divide {heads} heads"),
        ));
    }
    outside_layers(keys, seen, config)?;
    set(
        config,
        json!({
            "num_attention_heads": heads,
            "num_key_value_heads": key_heads,
            "max_position_embeddings": keys.dimension("context_length")?,
            "attention_bias": seen.has_attention_bias,
            "hidden_act": "silu",
        }),
    );
    // A mixture without dense layers need not have it, and Gemma 4 has one for each layer.
    let is_there = family != Family::Gemma4
        && (keys.number("feed_forward_length")?.is_some()
            || keys.number("expert_feed_forward_length")?.is_none());
    if is_there {
        config.insert("intermediate_size".into(), json!(keys.dimension("feed_forward_length")?));
    }
    if let Some(epsilon) = keys.float("attention.layer_norm_rms_epsilon")? {
        config.insert("rms_norm_eps".into(), json!(epsilon));
    }
    // Keys of latent attention are wider than values.
    if family != Family::DeepSeek2 {
        config.insert("head_dim".into(), json!(keys.head_dim()?));
    }
    Ok(())
}

fn llama(
    keys: &Keys<'_>,
    seen: &TensorSummary,
    config: &mut Map<String, Value>,
    notes: &mut Map<String, Value>,
) -> Result<(), Fault> {
    keys.require_rms_norm()?;
    keys.no_experts()?;
    // Mistral models are stored as llama; only a sliding window distinguishes them.
    match sliding_window(keys)? {
        Some(window) => set(
            config,
            json!({"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}),
        ),
        None => set(
            config,
            json!({
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "mlp_bias": seen.has_mlp_bias,
            }),
        ),
    }
    // The converter permutes the rows of q and k for interleaved rotary positions.
    notes.insert("rope_interleaved".into(), true.into());
    Ok(())
}

fn smollm3(
    keys: &Keys<'_>,
    seen: &TensorSummary,
    config: &mut Map<String, Value>,
    notes: &mut Map<String, Value>,
) -> Result<(), Fault> {
    keys.require_rms_norm()?;
    keys.no_experts()?;
    // Every fourth layer has no rotary positions. This follows from the architecture; the metadata has no key for it.
    let layers = keys.layers()?;
    let rotary: Vec<u8> = (1..=layers).map(|layer| u8::from(!layer.is_multiple_of(4))).collect();
    set(
        config,
        json!({
            "model_type": "smollm3",
            "architectures": ["SmolLM3ForCausalLM"],
            "mlp_bias": seen.has_mlp_bias,
            "no_rope_layer_interval": 4,
            "no_rope_layers": rotary,
            "layer_types": vec!["full_attention"; layers],
            "use_sliding_window": false,
            "sliding_window": null,
        }),
    );
    // Converted by the same code as llama.
    notes.insert("rope_interleaved".into(), true.into());
    Ok(())
}

fn qwen(
    keys: &Keys<'_>,
    model_type: &str,
    class: &str,
    config: &mut Map<String, Value>,
) -> Result<(), Fault> {
    keys.require_rms_norm()?;
    keys.no_experts()?;
    set(config, json!({"model_type": model_type, "architectures": [class]}));
    set(config, windows::qwen(keys)?);
    Ok(())
}

/// The number of layers of the only Gemma 3 model whose query scale does not follow from its head dimension.
const GEMMA3_27B_LAYERS: usize = 62;

fn gemma3(
    keys: &Keys<'_>,
    config: &mut Map<String, Value>,
    notes: &mut Map<String, Value>,
) -> Result<(), Fault> {
    keys.require_rms_norm()?;
    let layers = keys.layers()?;
    set(
        config,
        json!({
            "model_type": "gemma3_text",
            "architectures": ["Gemma3ForCausalLM"],
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": gemma3_scalar(keys, layers)?,
            "attn_logit_softcapping": null,
            "final_logit_softcapping": keys.float("final_logit_softcapping")?,
            "use_bidirectional_attention": false,
        }),
    );
    set(config, windows::gemma3(keys)?);
    config.remove("hidden_act");
    // The converter stores 1 + weight.
    notes.insert("norm_weight_offset".into(), json!(0.0));
    Ok(())
}

/// `query_pre_attn_scalar`: the query scale is one over its square root. Most converters omit the scale.
fn gemma3_scalar(keys: &Keys<'_>, layers: usize) -> Result<Value, Fault> {
    let name = "attention.scale";
    let Some(scale) = keys.metadata.float(&keys.key(name))? else {
        return Ok(json!(if layers == GEMMA3_27B_LAYERS {
            keys.dimension("embedding_length")? / keys.dimension("attention.head_count")?
        } else {
            keys.head_dim()?
        }));
    };
    let narrow = scale as f32;
    if !narrow.is_normal() || narrow < 0.0 {
        return Err(Fault::new(keys.key(name), format!("{scale}; expected a number above 0")));
    }
    let scalar = f64::from(narrow).powi(-2);
    // Configurations hold an integer, which the rounded scale does not reproduce exactly. The nearest integer is taken if
    // it gives the same scale; otherwise 64 bits are enough to reproduce the 32 bits of the scale.
    let whole = scalar.round();
    let exact = whole <= MAX_DIMENSION as f64 && whole.powf(-0.5) as f32 == narrow;
    Ok(if exact { json!(whole as u64) } else { json!(scalar) })
}

fn phi3(keys: &Keys<'_>, config: &mut Map<String, Value>) -> Result<(), Fault> {
    keys.require_rms_norm()?;
    keys.no_experts()?;
    set(
        config,
        json!({
            "model_type": "phi3",
            "architectures": ["Phi3ForCausalLM"],
            "sliding_window": sliding_window(keys)?,
            "original_max_position_embeddings": original_context(keys)?,
        }),
    );
    Ok(())
}

fn bert(
    keys: &Keys<'_>,
    seen: &TensorSummary,
    config: &mut Map<String, Value>,
    notes: &mut Map<String, Value>,
) -> Result<(), Fault> {
    set(
        config,
        json!({
            "model_type": "bert",
            "architectures": ["BertModel"],
            "hidden_act": "gelu",
            "layer_norm_eps": keys.layer_norm_epsilon()?,
            "type_vocab_size": seen.token_types.unwrap_or(1),
            "position_embedding_type": "absolute",
            "tie_word_embeddings": true,
            "is_decoder": false,
        }),
    );
    config.remove("head_dim");
    config.remove("num_key_value_heads");
    config.remove("attention_bias");
    pooling_of_encoder(keys, notes)
}

fn nomic_bert(
    keys: &Keys<'_>,
    seen: &TensorSummary,
    config: &mut Map<String, Value>,
    notes: &mut Map<String, Value>,
) -> Result<(), Fault> {
    set(
        config,
        json!({
            "model_type": "nomic_bert",
            "architectures": ["NomicBertModel"],
            "layer_norm_eps": keys.layer_norm_epsilon()?,
            "type_vocab_size": seen.token_types.unwrap_or(0),
        }),
    );
    pooling_of_encoder(keys, notes)
}

fn modern_bert(
    keys: &Keys<'_>,
    config: &mut Map<String, Value>,
    notes: &mut Map<String, Value>,
) -> Result<(), Fault> {
    set(
        config,
        json!({
            "model_type": "modernbert",
            "architectures": ["ModernBertModel"],
            "hidden_activation": "gelu",
            "norm_eps": keys.layer_norm_epsilon()?,
        }),
    );
    set(config, windows::modern_bert(keys)?);
    pooling_of_encoder(keys, notes)
}

fn gemma_embedding(
    keys: &Keys<'_>,
    config: &mut Map<String, Value>,
    notes: &mut Map<String, Value>,
) -> Result<(), Fault> {
    gemma3(keys, config, notes)?;
    set(config, json!({"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": true}));
    pooling_of_encoder(keys, notes)
}

/// Takes the mean where the file names no pooling, and refuses kinds that are not supported.
fn pooling_of_encoder(keys: &Keys<'_>, notes: &mut Map<String, Value>) -> Result<(), Fault> {
    // Files without the key are embedding models too, and those pool by the mean.
    match keys.number("pooling_type")? {
        None | Some(0) => notes.insert("pooling".into(), "mean".into()),
        Some(1..=3) => None,
        Some(kind) => {
            return Err(Fault::unsupported(
                keys.key("pooling_type"),
                format!(
                    "{kind}; use a model that takes the mean of all tokens (1), the first (2) or the last (3)"
                ),
            ));
        }
    };
    Ok(())
}
