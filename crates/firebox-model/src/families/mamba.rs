//! Configuration fields of Mamba-2 that several families share, and blocks of a mixer or a feed-forward network alone.

use serde_json::Value;

use super::common::Common;
use crate::ModelError;
use crate::config::{
    Activation, BlockConfig, FeedForwardConfig, MambaConfig, MixerConfig, NormConfig, NormKind,
};
use crate::fields::{Fields, shown};

/// What absent fields mean.
pub(super) struct MambaDefaults {
    pub heads: usize,
    /// `None` if it follows from the width of the hidden state.
    pub head_dim: Option<usize>,
    pub groups: usize,
    pub states: usize,
}

/// Reads the mixer from fields that are called as in `granitemoehybrid`, with `fields` saying what the family calls
/// them. Time steps have no bounds.
pub(super) fn mamba(
    common: &Common<'_>,
    fields: &Fields<'_>,
    defaults: MambaDefaults,
    activation: Activation,
) -> Result<MambaConfig, ModelError> {
    let heads = fields.count("mamba_n_heads")?.unwrap_or(defaults.heads);
    let given = match fields.get("mamba_d_head").and_then(Value::as_str) {
        Some("auto") => None,
        _ => fields.count("mamba_d_head")?.or(defaults.head_dim),
    };
    let head_dim = match given {
        Some(head_dim) => head_dim,
        None => {
            let inner = fields.count("mamba_expand")?.unwrap_or(2) * common.hidden_size;
            if !inner.is_multiple_of(heads) {
                let reason = format!("{heads} heads do not divide the {inner} channels of the mixer");
                return Err(fields.error("mamba_n_heads", reason));
            }
            inner / heads
        }
    };
    let groups = fields.count("mamba_n_groups")?.unwrap_or(defaults.groups);
    if heads % groups != 0 {
        return Err(fields.error("mamba_n_groups", format!("{groups} does not divide the {heads} heads")));
    }
    Ok(MambaConfig {
        hidden_size: common.hidden_size,
        heads,
        head_dim,
        groups,
        states: fields.count("mamba_d_state")?.unwrap_or(defaults.states),
        kernel: fields.count("mamba_d_conv")?.unwrap_or(4),
        activation,
        projection_bias: fields.flag("mamba_proj_bias")?.unwrap_or(false),
        convolution_bias: fields.flag("mamba_conv_bias")?.unwrap_or(true),
        decay_stored: fields.hint("a_log_negated_exp")?,
        norm: common.norm("norm", heads * head_dim),
        smallest_step: 0.0,
        largest_step: None,
    })
}

/// Reads the bounds of time steps from `time_step_limit`. Python writes infinity as an object, or as a word that the
/// store reads as null.
pub(super) fn bounded(mamba: MambaConfig, fields: &Fields<'_>) -> Result<MambaConfig, ModelError> {
    let Some(limits) = fields.list("time_step_limit")? else { return Ok(mamba) };
    let infinite =
        |value: &Value| value.is_null() || value.get("__float__").and_then(Value::as_str) == Some("Infinity");
    let bounds = match limits {
        [smallest, largest] if infinite(largest) => smallest.as_f64().map(|smallest| (smallest, None)),
        [smallest, largest] => smallest.as_f64().zip(largest.as_f64().map(Some)),
        _ => None,
    };
    match bounds {
        Some((smallest, largest)) if smallest >= 0.0 && largest.is_none_or(|largest| largest >= smallest) => {
            let largest_step = largest.map(|largest| largest as f32);
            Ok(MambaConfig { smallest_step: smallest as f32, largest_step, ..mamba })
        }
        _ => {
            let found = shown(&Value::from(limits.to_vec()));
            Err(fields.error(
                "time_step_limit",
                format!("should be the smallest and the largest time step, is {found}"),
            ))
        }
    }
}

/// Returns a block of a mixer without a feed-forward network.
pub(super) fn mixer_block(common: &Common<'_>, norm: &str, mixer: MixerConfig) -> BlockConfig {
    let norm = common.norm(norm, common.hidden_size);
    BlockConfig {
        feed_forward_norm: NormConfig { kind: NormKind::Absent, ..norm.clone() },
        mixer_norm: norm,
        mixer,
        mixer_output_norm: None,
        feed_forward: FeedForwardConfig::Absent,
        feed_forward_output_norm: None,
        residual_scale: None,
        parallel: false,
        norms_sums: false,
        layer_input: None,
        output_scale: None,
    }
}

/// Returns a block of a feed-forward network without a mixer.
pub(super) fn feed_forward_block(
    common: &Common<'_>,
    norm: &str,
    feed_forward: FeedForwardConfig,
) -> BlockConfig {
    let block = mixer_block(common, norm, MixerConfig::Absent);
    BlockConfig {
        mixer_norm: block.feed_forward_norm,
        feed_forward_norm: block.mixer_norm,
        feed_forward,
        ..block
    }
}
