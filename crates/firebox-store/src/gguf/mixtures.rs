//! The configurations of mixtures of experts.

use serde_json::{Map, Value, json};

use super::keys::Keys;
use super::object::set;
use super::tensor_summary::TensorSummary;
use super::windows;
use crate::error::Fault;

/// How the scores of experts become probabilities, by GGUF's numbers.
const SOFTMAX: u64 = 1;
const SIGMOID: u64 = 2;

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

fn normalised(keys: &Keys<'_>) -> Result<Option<bool>, Fault> {
    keys.metadata.flag(&keys.key("expert_weights_norm"))
}

/// Adds the entries of Qwen's mixtures.
pub(super) fn qwen(keys: &Keys<'_>, config: &mut Map<String, Value>) -> Result<(), Fault> {
    require_gating(keys, SOFTMAX)?;
    if let Some(scale) = scale(keys)? {
        return Err(Fault::unsupported(keys.key("expert_weights_scale"), format!("{scale}; expected 1")));
    }
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
    let group_count = |name: &str| keys.number(name).map(|count| count.filter(|count| *count > 0));
    set(
        config,
        json!({
            "model_type": "glm4_moe",
            "architectures": ["Glm4MoeForCausalLM"],
            "n_routed_experts": keys.dimension("expert_count")?,
            "num_experts_per_tok": keys.dimension("expert_used_count")?,
            "moe_intermediate_size": keys.dimension("expert_feed_forward_length")?,
            "n_shared_experts": keys.number("expert_shared_count")?.unwrap_or(0),
            "first_k_dense_replace": keys.number("leading_dense_block_count")?.unwrap_or(0),
            "n_group": group_count("expert_group_count")?.unwrap_or(1),
            "topk_group": group_count("expert_group_used_count")?.unwrap_or(1),
            "routed_scaling_factor": scale(keys)?.unwrap_or(1.0),
            "norm_topk_prob": normalised(keys)?.unwrap_or(false),
            "use_qk_norm": seen.has_query_norm,
            "num_nextn_predict_layers": keys.number("nextn_predict_layers")?.unwrap_or(0),
        }),
    );
    Ok(())
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
