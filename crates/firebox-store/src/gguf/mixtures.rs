//! The configurations of mixtures of experts.

use serde_json::{Map, Value, json};

use super::dense;
use super::keys::Keys;
use super::object::set;
use super::tensor_summary::TensorSummary;
use super::windows;
use crate::error::Fault;

/// How the scores of experts become probabilities, by GGUF's numbers.
const SOFTMAX: u64 = 1;
const SIGMOID: u64 = 2;
/// The softmax of the chosen experts alone.
const SOFTMAX_OF_CHOSEN: u64 = 3;

/// Refuses another gating function. Files without the key have the architecture's.
fn require_gating(keys: &Keys<'_>, own: u64) -> Result<(), Fault> {
    let name = "expert_gating_func";
    match keys.number(name)? {
        Some(found) if found != 0 && found != own => {
            Err(Fault::unsupported(keys.key(name), format!("{found}; this architecture has {own}")))
        }
        _ => Ok(()),
    }
}

/// The factor of what experts yield, if it is not 1. Zero stands for a factor that is not used.
fn scale(keys: &Keys<'_>) -> Result<Option<f64>, Fault> {
    Ok(keys.float("expert_weights_scale")?.filter(|scale| ![0.0, 1.0].contains(scale)))
}

fn require_no_scale(keys: &Keys<'_>) -> Result<(), Fault> {
    match scale(keys)? {
        None => Ok(()),
        Some(scale) => {
            Err(Fault::unsupported(keys.key("expert_weights_scale"), format!("{scale}; expected 1")))
        }
    }
}

/// Adds the entries of experts that are chosen by the sigmoid of each, corrected and in groups. `normalised` is what files without the
/// key mean.
fn corrected(keys: &Keys<'_>, normalised: bool, config: &mut Map<String, Value>) -> Result<(), Fault> {
    let group_count = |name: &str| keys.number(name).map(|count| count.filter(|count| *count > 0));
    set(
        config,
        json!({
            "n_routed_experts": keys.dimension("expert_count")?,
            "num_experts_per_tok": keys.dimension("expert_used_count")?,
            "moe_intermediate_size": keys.dimension("expert_feed_forward_length")?,
            "n_shared_experts": keys.number("expert_shared_count")?.unwrap_or(0),
            "first_k_dense_replace": keys.number("leading_dense_block_count")?.unwrap_or(0),
            "n_group": group_count("expert_group_count")?.unwrap_or(1),
            "topk_group": group_count("expert_group_used_count")?.unwrap_or(1),
            "routed_scaling_factor": scale(keys)?.unwrap_or(1.0),
            "norm_topk_prob": self::normalised(keys)?.unwrap_or(normalised),
        }),
    );
    Ok(())
}

fn normalised(keys: &Keys<'_>) -> Result<Option<bool>, Fault> {
    keys.metadata.flag(&keys.key("expert_weights_norm"))
}

/// Adds the entries of Qwen's mixtures.
pub(super) fn qwen(keys: &Keys<'_>, config: &mut Map<String, Value>) -> Result<(), Fault> {
    require_gating(keys, SOFTMAX)?;
    require_no_scale(keys)?;
    let experts = keys.dimension("expert_count")?;
    set(
        config,
        json!({
            // Transformers 5 uses the first name for some families, earlier versions the second.
            "num_local_experts": experts,
            "num_experts": experts,
            "num_experts_per_tok": keys.dimension("expert_used_count")?,
            "moe_intermediate_size": keys.dimension("expert_feed_forward_length")?,
            "norm_topk_prob": normalised(keys)?.unwrap_or(true),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }),
    );
    Ok(())
}

/// Adds the entry of the shared expert of Qwen's mixtures.
pub(super) fn qwen_shared_expert(keys: &Keys<'_>, config: &mut Map<String, Value>) -> Result<(), Fault> {
    let name = "expert_shared_feed_forward_length";
    let name = if keys.number(name)?.is_some() { name } else { "feed_forward_length" };
    config.insert("shared_expert_intermediate_size".into(), json!(keys.dimension(name)?));
    Ok(())
}

pub(super) fn qwen3_moe(keys: &Keys<'_>, config: &mut Map<String, Value>) -> Result<(), Fault> {
    keys.require_rms_norm()?;
    qwen(keys, config)?;
    set(config, json!({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}));
    set(config, windows::qwen3_moe(keys)?);
    Ok(())
}

pub(super) fn glm4_moe(
    keys: &Keys<'_>,
    seen: &TensorSummary,
    config: &mut Map<String, Value>,
) -> Result<(), Fault> {
    keys.require_rms_norm()?;
    require_gating(keys, SIGMOID)?;
    corrected(keys, false, config)?;
    set(
        config,
        json!({
            "model_type": "glm4_moe",
            "architectures": ["Glm4MoeForCausalLM"],
            "use_qk_norm": seen.has_query_norm,
            "num_nextn_predict_layers": keys.number("nextn_predict_layers")?.unwrap_or(0),
        }),
    );
    Ok(())
}

pub(super) fn gpt_oss(
    keys: &Keys<'_>,
    config: &mut Map<String, Value>,
    notes: &mut Map<String, Value>,
) -> Result<(), Fault> {
    keys.require_rms_norm()?;
    require_gating(keys, SOFTMAX_OF_CHOSEN)?;
    require_no_scale(keys)?;
    set(
        config,
        json!({
            "model_type": "gpt_oss",
            "architectures": ["GptOssForCausalLM"],
            "num_local_experts": keys.dimension("expert_count")?,
            "num_experts_per_tok": keys.dimension("expert_used_count")?,
            "intermediate_size": keys.dimension("expert_feed_forward_length")?,
        }),
    );
    set(config, windows::alternating(keys, 2)?);
    notes.insert("experts_separate".into(), true.into());
    Ok(())
}

/// Adds the entries of mixtures with attention to latents: of DeepSeek-V3 and its relatives.
pub(super) fn deepseek2(
    keys: &Keys<'_>,
    seen: &TensorSummary,
    config: &mut Map<String, Value>,
    notes: &mut Map<String, Value>,
) -> Result<(), Fault> {
    keys.require_rms_norm()?;
    let gating = "expert_gating_func";
    match keys.number(gating)? {
        Some(SIGMOID) => {}
        // Older files without it are of DeepSeek-V2.
        found => {
            let reason = format!("{}; run are models with {SIGMOID}", found.unwrap_or(SOFTMAX));
            return Err(Fault::unsupported(keys.key(gating), reason));
        }
    }
    // Files in which heads share latents tell the widths of heads apart from those of what is stored.
    let width = |of_heads: &str, name: &str| match keys.number(of_heads)? {
        Some(_) => keys.dimension(of_heads),
        None => keys.dimension(name),
    };
    let key_width = width("attention.key_length_mla", "attention.key_length")?;
    let rotated = keys.dimension("rope.dimension_count")?;
    let plain = key_width.checked_sub(rotated).filter(|plain| *plain > 0).ok_or_else(|| {
        Fault::new(keys.key("rope.dimension_count"), format!("{rotated} of {key_width} dimensions of a key"))
    })?;
    corrected(keys, false, config)?;
    set(
        config,
        json!({
            "model_type": "deepseek_v3",
            "architectures": ["DeepseekV3ForCausalLM"],
            "q_lora_rank": keys.number("attention.q_lora_rank")?,
            "kv_lora_rank": keys.dimension("attention.kv_lora_rank")?,
            "qk_rope_head_dim": rotated,
            "qk_nope_head_dim": plain,
            "v_head_dim": width("attention.value_length_mla", "attention.value_length")?,
        }),
    );
    if !seen.has_joined_factors {
        notes.insert("factors_separate".into(), true.into());
    }
    Ok(())
}

/// Adds the entries of Nemotron's mixtures, and returns whether the file has any.
pub(super) fn nemotron_h(keys: &Keys<'_>, config: &mut Map<String, Value>) -> Result<bool, Fault> {
    if keys.number("expert_count")?.unwrap_or(0) == 0 {
        return Ok(false);
    }
    require_gating(keys, SIGMOID)?;
    let latent = "moe_latent_size";
    if let Some(size) = keys.number(latent)?.filter(|size| *size > 0) {
        let reason = format!("{size}; only experts that read the hidden state itself run");
        return Err(Fault::unsupported(keys.key(latent), reason));
    }
    corrected(keys, true, config)?;
    let shared = keys.dimension("expert_shared_feed_forward_length")?;
    config.insert("moe_shared_expert_intermediate_size".into(), json!(shared));
    Ok(true)
}

/// Adds the experts of Granite's mixtures, if there are any.
pub(super) fn granite(keys: &Keys<'_>, config: &mut Map<String, Value>) -> Result<(), Fault> {
    require_gating(keys, SOFTMAX)?;
    let experts = keys.number("expert_count")?.unwrap_or(0);
    config.insert("num_local_experts".into(), json!(experts));
    if experts > 0 {
        config.insert("num_experts_per_tok".into(), json!(keys.dimension("expert_used_count")?));
    }
    Ok(())
}

pub(super) fn granite_moe(
    keys: &Keys<'_>,
    config: &mut Map<String, Value>,
    notes: &mut Map<String, Value>,
) -> Result<(), Fault> {
    keys.require_rms_norm()?;
    set(config, json!({"model_type": "granitemoe", "architectures": ["GraniteMoeForCausalLM"]}));
    dense::granite(keys, config)?;
    granite(keys, config)?;
    // Converted by the same code as llama.
    notes.insert("rope_interleaved".into(), true.into());
    Ok(())
}

/// The entries of Gemma 4's mixtures, beside each of which a dense network works.
pub(super) fn gemma4(keys: &Keys<'_>) -> Result<Value, Fault> {
    if keys.number("expert_count")?.unwrap_or(0) == 0 {
        return Ok(json!({"enable_moe_block": false}));
    }
    require_gating(keys, SOFTMAX)?;
    Ok(json!({
        "enable_moe_block": true,
        "num_experts": keys.dimension("expert_count")?,
        "top_k_experts": keys.dimension("expert_used_count")?,
        "moe_intermediate_size": keys.dimension("expert_feed_forward_length")?,
    }))
}

/// Adds what the mixtures of LFM2 have beyond its dense models.
pub(super) fn lfm2_moe(
    keys: &Keys<'_>,
    seen: &TensorSummary,
    config: &mut Map<String, Value>,
) -> Result<(), Fault> {
    require_gating(keys, SIGMOID)?;
    set(
        config,
        json!({
            "model_type": "lfm2_moe",
            "architectures": ["Lfm2MoeForCausalLM"],
            "num_experts": keys.dimension("expert_count")?,
            "num_experts_per_tok": keys.dimension("expert_used_count")?,
            "moe_intermediate_size": keys.dimension("expert_feed_forward_length")?,
            "num_dense_layers": keys.number("leading_dense_block_count")?.unwrap_or(0),
            "use_expert_bias": seen.has_expert_bias,
            "routed_scaling_factor": scale(keys)?.unwrap_or(1.0),
            "norm_topk_prob": normalised(keys)?.unwrap_or(true),
        }),
    );
    Ok(())
}
