//! `mamba2`: layers of Mamba-2 alone.

use super::common::{Common, Defaults};
use super::mamba::{MambaDefaults, bounded, mamba, mixer_block};
use crate::ModelError;
use crate::config::{DecoderConfig, MixerConfig, TensorNames};
use crate::fields::Fields;

/// No layer knows positions, so no length is the longest. This one is planned for.
const POSITIONS: usize = 1 << 20;

const FIELDS: &[(&str, &str)] = &[
    // Attention's fields, of which none are used.
    ("num_attention_heads", "num_heads"),
    ("mamba_n_heads", "num_heads"),
    ("mamba_d_head", "head_dim"),
    ("mamba_n_groups", "n_groups"),
    ("mamba_d_state", "state_size"),
    ("mamba_d_conv", "conv_kernel"),
    ("mamba_proj_bias", "use_bias"),
    ("mamba_conv_bias", "use_conv_bias"),
];

pub(super) fn config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let fields = &fields.with_names(FIELDS);
    let defaults = Defaults {
        inner_factor: Some(2),
        norm_epsilon: 1e-5,
        norm_epsilon_field: "layer_norm_epsilon",
        ..Defaults::USUAL
    };
    let common = Common::read(fields, "mamba2", defaults)?;
    let defaults = MambaDefaults { heads: 128, head_dim: Some(64), groups: 8, states: 128 };
    let mamba = bounded(mamba(&common, fields, defaults, common.activation)?, fields)?;
    let block = mixer_block(&common, "norm", MixerConfig::Mamba(mamba));
    Ok(DecoderConfig {
        max_positions: POSITIONS,
        final_norm: common.norm("norm_f", common.hidden_size),
        names: TensorNames { renamed: &[("mamba.", "mixer.")], ..backbone() },
        ..common.model(Vec::new(), vec![block; common.layers])
    })
}

/// Returns the names of tensors outside of layers.
pub(super) fn backbone() -> TensorNames {
    TensorNames { prefix: "backbone.".into(), embedding: "embeddings".into(), ..TensorNames::default() }
}
