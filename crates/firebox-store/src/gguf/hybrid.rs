//! The configurations of families that mix attention with the gated delta rule or with short convolutions.

use serde_json::{Map, Value, json};

use super::family::Family;
use super::keys::Keys;
use super::mixtures;
use super::object::set;
use super::tensor_summary::TensorSummary;
use crate::error::Fault;

/// Adds the entries of Qwen3.5 and Qwen3-Next.
pub(super) fn delta_nets(
    keys: &Keys<'_>,
    family: Family,
    seen: &TensorSummary,
    config: &mut Map<String, Value>,
    notes: &mut Map<String, Value>,
) -> Result<(), Fault> {
    keys.require_rms_norm()?;
    let (model_type, class) = match family {
        Family::Qwen35Moe => ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
        Family::Qwen3Next => ("qwen3_next", "Qwen3NextForCausalLM"),
        _ => ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    };
    if matches!(family, Family::Qwen35Moe | Family::Qwen3Next) {
        mixtures::qwen(keys, config)?;
        mixtures::qwen_shared_expert(keys, config)?;
        if family == Family::Qwen35Moe && config.get("norm_topk_prob") == Some(&false.into()) {
            let key = keys.key("expert_weights_norm");
            return Err(Fault::unsupported(key, "false; weights of this architecture's experts sum to one"));
        }
    } else {
        keys.no_experts()?;
    }
    let layers = keys.layers()?;
    let key_heads = keys.dimension("ssm.group_count")?;
    let value_heads = keys.dimension("ssm.time_step_rank")?;
    let inner = keys.dimension("ssm.inner_size")?;
    if !inner.is_multiple_of(value_heads) || !value_heads.is_multiple_of(key_heads) {
        return Err(Fault::new(
            keys.key("ssm.time_step_rank"),
            format!("{value_heads} value heads for {key_heads} key heads and {inner} values"),
        ));
    }
    set(
        config,
        json!({
            "model_type": model_type,
            "architectures": [class],
            "layer_types": layer_types(keys, layers)?,
            "linear_conv_kernel_dim": keys.dimension("ssm.conv_kernel")?,
            "linear_key_head_dim": keys.dimension("ssm.state_size")?,
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": value_heads,
            "linear_value_head_dim": inner / value_heads,
        }),
    );
    set(
        notes,
        json!({
            // The converter stores 1 + weight for every norm but the gated one, which had no 1 to begin with.
            "norm_weight_offset": 0.0,
            // `A_log` holds -exp(A_log).
            "a_log_negated_exp": true,
            // Value heads are ordered k0v0 k1v0 … k0v1 k1v1 … rather than k0v0 k0v1 … k1v0 k1v1 …: in the value rows of
            // in_proj_qkv and conv1d, the rows of in_proj_z, in_proj_a, in_proj_b, A_log and dt_bias, and the columns of out_proj.
            // With equal numbers of heads the two orders are the same. Those of Qwen3-Next keep theirs.
            "v_heads_tiled": family != Family::Qwen3Next && key_heads != value_heads,
        }),
    );
    if family == Family::Qwen3Next {
        // Earlier converters left the projections as they were.
        notes.insert("qkvz_separate".into(), (!seen.has_grouped_projections).into());
    }
    Ok(())
}

fn layer_types(keys: &Keys<'_>, layers: usize) -> Result<Vec<&'static str>, Fault> {
    let name = |recurrent: bool| if recurrent { "linear_attention" } else { "full_attention" };
    if let Some(recurrent) = keys.metadata.bools(&keys.key("attention.recurrent_layers"))? {
        let Some(recurrent) = recurrent.get(..layers) else {
            return Err(Fault::new(
                keys.key("attention.recurrent_layers"),
                format!("{} entries for {layers} layers", recurrent.len()),
            ));
        };
        return Ok(recurrent.iter().map(|recurrent| name(*recurrent)).collect());
    }
    let interval = keys.number("full_attention_interval")?.unwrap_or(4);
    if interval == 0 {
        return Err(Fault::new(keys.key("full_attention_interval"), "0; expected 1 or more"));
    }
    Ok((1..=layers as u64).map(|layer| name(!layer.is_multiple_of(interval))).collect())
}

const KEY_HEADS: &str = "attention.head_count_kv";

/// The key heads of each layer: none in those without attention.
pub(super) fn key_heads(keys: &Keys<'_>) -> Result<Vec<u64>, Fault> {
    let counts = keys.each_layer(KEY_HEADS)?;
    let most = counts.iter().copied().max().unwrap_or(0);
    if counts.iter().any(|count| ![0, most].contains(count)) {
        return Err(Fault::unsupported(keys.key(KEY_HEADS), "differs between layers with attention"));
    }
    Ok(counts)
}

pub(super) fn lfm2(
    keys: &Keys<'_>,
    family: Family,
    seen: &TensorSummary,
    config: &mut Map<String, Value>,
) -> Result<(), Fault> {
    keys.require_rms_norm()?;
    // The usual name is not this family's.
    let epsilon = config.remove("rms_norm_eps");
    let kind = |count: &u64| if *count == 0 { "conv" } else { "full_attention" };
    set(
        config,
        json!({
            "model_type": "lfm2",
            "architectures": ["Lfm2ForCausalLM"],
            "norm_eps": epsilon,
            "layer_types": key_heads(keys)?.iter().map(kind).collect::<Vec<_>>(),
            "conv_L_cache": keys.dimension("shortconv.l_cache")?,
            "conv_bias": seen.has_convolution_bias,
            // The width in the file has been adjusted already.
            "block_auto_adjust_ff_dim": false,
        }),
    );
    if family == Family::Lfm2Moe { mixtures::lfm2_moe(keys, seen, config) } else { keys.no_experts() }
}
