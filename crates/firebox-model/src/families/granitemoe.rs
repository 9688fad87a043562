//! `granitemoe` and `granitemoehybrid`: granite with mixtures of experts, in the latter beside a network that works on
//! every token, and with layers of Mamba-2 between those of attention. The store gives experts their usual names.

use super::common::{Common, Defaults, LayerKind};
use super::granite::read_factors;
use super::mamba::{MambaDefaults, bounded, mamba};
use super::mixture::Mixture;
use crate::ModelError;
use crate::config::{
    BlockConfig, DecoderConfig, ExpertsConfig, FeedForwardConfig, GatedConfig, MixerConfig, RoutingConfig,
    SharedExpertConfig, TensorNames,
};
use crate::fields::Fields;

pub(super) fn config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let common = Common::read(fields, "granitemoe", Defaults::USUAL)?;
    let experts = fields.count("num_local_experts")?.unwrap_or(8);
    let mixture = FeedForwardConfig::MixtureOfExperts(mixture(&common, experts)?);
    let block = common.block(common.attention_with_configured_bias()?, mixture);
    let mut model = common.model(vec![common.rope()?], vec![block; common.layers]);
    read_factors(&common, &mut model)?;
    Ok(model)
}

/// The weights of the chosen experts are the softmax of their products alone.
fn mixture(common: &Common<'_>, experts: usize) -> Result<ExpertsConfig, ModelError> {
    let chosen = common.fields.count("num_experts_per_tok")?.unwrap_or(2);
    let mixture = Mixture { experts, chosen, inner_size: common.inner_size, normalised: true };
    mixture.config(common, RoutingConfig::default())
}

/// The network that works on every token: beside experts, and alone.
const RENAMED: &[(&str, &str)] = &[
    ("mlp.shared_mlp.gate_up_proj.", "shared_mlp.input_linear."),
    ("mlp.shared_mlp.down_proj.", "shared_mlp.output_linear."),
    ("mlp.gate_up_proj.", "shared_mlp.input_linear."),
    ("mlp.down_proj.", "shared_mlp.output_linear."),
];

pub(super) fn hybrid_config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let common = Common::read(fields, "granitemoehybrid", Defaults::USUAL)?;
    // GGUF files have them apart.
    let fused = !fields.hint("shared_separate")?;
    let shared = GatedConfig {
        inner_size: fields.count("shared_intermediate_size")?.unwrap_or(1024),
        fused,
        ..common.gated()
    };
    let feed_forward = match fields.whole("num_local_experts")?.unwrap_or(8) {
        0 => FeedForwardConfig::Gated(shared),
        experts => {
            let shared = SharedExpertConfig { prefix: "shared_mlp.".into(), network: shared, gate: None };
            let mixture = ExpertsConfig { shared: Some(shared), ..mixture(&common, experts)? };
            FeedForwardConfig::MixtureOfExperts(mixture)
        }
    };
    let ropes = match fields.text("position_embedding_type")? {
        Some("rope") => vec![common.rope()?],
        None | Some("nope") => Vec::new(),
        Some(other) => {
            let reason = format!("{other:?} is not a kind of positions that is known");
            return Err(fields.error("position_embedding_type", reason));
        }
    };
    let mut attention = common.attention_with_configured_bias()?;
    attention.rope = (!ropes.is_empty()).then_some(0);
    let defaults = MambaDefaults { heads: 128, head_dim: None, groups: 1, states: 256 };
    let mamba = bounded(mamba(&common, fields, defaults, common.activation)?, fields)?;
    let full = common.block(attention, feed_forward);
    let recurrent = BlockConfig { mixer: MixerConfig::Mamba(mamba), ..full.clone() };
    let blocks = common
        .layer_kinds(|_| LayerKind::Recurrent)?
        .into_iter()
        .map(|kind| match kind {
            LayerKind::Full => Ok(full.clone()),
            LayerKind::Recurrent => Ok(recurrent.clone()),
            LayerKind::Sliding => {
                Err(fields.error("layer_types", "granitemoehybrid has no sliding_attention layers"))
            }
        })
        .collect::<Result<_, _>>()?;
    let mut model = common.model(ropes, blocks);
    model.names = TensorNames { renamed: RENAMED, ..TensorNames::default() };
    read_factors(&common, &mut model)?;
    Ok(model)
}
