//! The configurations of families with layers of Mamba-2.

use serde_json::{Map, Value, json};

use super::keys::Keys;
use super::object::set;
use super::tensor_summary::TensorSummary;
use super::{dense, hybrid, mixtures, outside};
use crate::error::Fault;

pub(super) fn granite_hybrid(
    keys: &Keys<'_>,
    seen: &TensorSummary,
    config: &mut Map<String, Value>,
    notes: &mut Map<String, Value>,
) -> Result<(), Fault> {
    keys.require_rms_norm()?;
    let kind = |heads: &u64| if *heads == 0 { "linear_attention" } else { "full_attention" };
    let kinds: Vec<&str> = hybrid::key_heads(keys)?.iter().map(kind).collect();
    let shared = "expert_shared_feed_forward_length";
    let shared = if keys.number(shared)?.is_some() { shared } else { "feed_forward_length" };
    let has_positions = keys.metadata.flag(&keys.key("rope.scaling.finetuned"))?.unwrap_or(false);
    let [heads, head_dim] = heads(keys)?;
    set(
        config,
        json!({
            "model_type": "granitemoehybrid",
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "layer_types": kinds,
            "shared_intermediate_size": keys.dimension(shared)?,
            "position_embedding_type": if has_positions { "rope" } else { "nope" },
            "mamba_n_heads": heads,
            "mamba_d_head": head_dim,
            "mamba_d_state": keys.dimension("ssm.state_size")?,
            "mamba_n_groups": keys.dimension("ssm.group_count")?,
            "mamba_d_conv": keys.dimension("ssm.conv_kernel")?,
            "mamba_proj_bias": false,
            "mamba_conv_bias": seen.has_mixer_convolution_bias,
        }),
    );
    dense::granite(keys, config)?;
    mixtures::granite(keys, config)?;
    set(notes, json!({"rope_interleaved": true, "shared_separate": true, "a_log_negated_exp": true}));
    Ok(())
}

pub(super) fn mamba2(
    keys: &Keys<'_>,
    seen: &TensorSummary,
    config: &mut Map<String, Value>,
    notes: &mut Map<String, Value>,
) -> Result<(), Fault> {
    let [heads, head_dim] = heads(keys)?;
    outside_layers(keys, seen, config)?;
    set(
        config,
        json!({
            "model_type": "mamba2",
            "architectures": ["Mamba2ForCausalLM"],
            "hidden_act": "silu",
            "num_heads": heads,
            "head_dim": head_dim,
            "state_size": keys.dimension("ssm.state_size")?,
            "n_groups": keys.number("ssm.group_count")?.unwrap_or(1),
            "conv_kernel": keys.dimension("ssm.conv_kernel")?,
            "use_bias": false,
            "use_conv_bias": seen.has_mixer_convolution_bias,
        }),
    );
    notes.insert("a_log_negated_exp".into(), true.into());
    Ok(())
}

pub(super) fn nemotron_h(
    keys: &Keys<'_>,
    seen: &TensorSummary,
    config: &mut Map<String, Value>,
    notes: &mut Map<String, Value>,
) -> Result<(), Fault> {
    let key_heads = keys.each_layer("attention.head_count_kv")?;
    let inner = keys.each_layer("feed_forward_length")?;
    let of_networks = if mixtures::nemotron_h(keys, config)? { "moe" } else { "mlp" };
    let kinds = key_heads.iter().zip(&inner).map(|(heads, inner)| match (heads, inner) {
        (0, 0) => "linear_attention",
        (0, _) => of_networks,
        _ => "full_attention",
    });
    let largest = |numbers: &[u64]| numbers.iter().copied().max().filter(|largest| *largest > 0);
    let [heads, head_dim] = heads(keys)?;
    outside_layers(keys, seen, config)?;
    set(
        config,
        json!({
            "model_type": "nemotron_h",
            "architectures": ["NemotronHForCausalLM"],
            "layers_block_type": kinds.collect::<Vec<_>>(),
            "num_attention_heads": keys.dimension("attention.head_count")?,
            "num_key_value_heads": largest(&key_heads).unwrap_or(1),
            "head_dim": keys.head_dim()?,
            "intermediate_size": largest(&inner).unwrap_or(1),
            "max_position_embeddings": keys.dimension("context_length")?,
            "mlp_hidden_act": "relu2",
            "mamba_num_heads": heads,
            "mamba_head_dim": head_dim,
            "ssm_state_size": keys.dimension("ssm.state_size")?,
            "n_groups": keys.dimension("ssm.group_count")?,
            "conv_kernel": keys.dimension("ssm.conv_kernel")?,
            "use_bias": false,
            "use_conv_bias": seen.has_mixer_convolution_bias,
        }),
    );
    notes.insert("a_log_negated_exp".into(), true.into());
    Ok(())
}

/// Adds what does not belong to layers, and the epsilon of all norms.
fn outside_layers(
    keys: &Keys<'_>,
    seen: &TensorSummary,
    config: &mut Map<String, Value>,
) -> Result<(), Fault> {
    outside::outside_layers(keys, seen, config)?;
    // The converter takes Nemotron's for that of another norm.
    let epsilon = match keys.float("attention.layer_norm_rms_epsilon")? {
        Some(epsilon) => epsilon,
        None => keys.layer_norm_epsilon()?,
    };
    config.insert("layer_norm_epsilon".into(), json!(epsilon));
    Ok(())
}

/// Returns the number of heads of the mixer and their width.
fn heads(keys: &Keys<'_>) -> Result<[u64; 2], Fault> {
    let (heads, inner) = (keys.dimension("ssm.time_step_rank")?, keys.dimension("ssm.inner_size")?);
    if !inner.is_multiple_of(heads) {
        return Err(Fault::new(
            keys.key("ssm.time_step_rank"),
            format!("{heads} heads do not divide {inner} channels"),
        ));
    }
    Ok([heads, inner / heads])
}
