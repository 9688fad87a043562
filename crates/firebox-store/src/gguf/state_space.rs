//! The configurations of families with layers of Mamba-2.

use serde_json::{Map, Value, json};

use super::keys::Keys;
use super::object::set;
use super::tensor_summary::TensorSummary;
use super::{dense, hybrid, mixtures};
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
    let epsilon = "attention.layer_norm_rms_epsilon";
    let epsilon = keys.float(epsilon)?.ok_or_else(|| Fault::new(keys.key(epsilon), "missing"))?;
    let id = |name: &str| keys.metadata.id(&format!("tokenizer.ggml.{name}_token_id"));
    set(
        config,
        json!({
            "model_type": "mamba2",
            "architectures": ["Mamba2ForCausalLM"],
            "hidden_size": keys.dimension("embedding_length")?,
            "num_hidden_layers": keys.layers()?,
            "vocab_size": seen.vocab_size,
            "tie_word_embeddings": !seen.has_output,
            "hidden_act": "silu",
            "layer_norm_epsilon": epsilon,
            "num_heads": heads,
            "head_dim": head_dim,
            "state_size": keys.dimension("ssm.state_size")?,
            "n_groups": keys.number("ssm.group_count")?.unwrap_or(1),
            "conv_kernel": keys.dimension("ssm.conv_kernel")?,
            "use_bias": false,
            "use_conv_bias": seen.has_mixer_convolution_bias,
            "bos_token_id": id("bos")?,
            "eos_token_id": id("eos")?,
            "pad_token_id": id("padding")?,
        }),
    );
    notes.insert("a_log_negated_exp".into(), true.into());
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
