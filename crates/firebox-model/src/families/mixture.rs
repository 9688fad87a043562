//! Configuration fields of mixtures of experts that several families share.

use super::common::Common;
use crate::ModelError;
use crate::config::{ExpertsConfig, GatedConfig, RoutingConfig, SharedExpertConfig};
use crate::fields::Fields;

/// Upper bound on experts, above every published model.
const MAX_EXPERTS: usize = 1 << 14;

/// A mixture of experts as a family's fields describe it.
pub(super) struct Mixture {
    /// Number of experts.
    pub experts: usize,
    /// Number of experts per token.
    pub chosen: usize,
    /// Inner width of an expert.
    pub inner_size: usize,
    /// Whether the weights of the chosen experts are scaled to sum to one.
    pub normalised: bool,
}

impl Mixture {
    /// Checks the fields and returns a mixture without a shared expert.
    pub fn config(self, common: &Common<'_>, routing: RoutingConfig) -> Result<ExpertsConfig, ModelError> {
        let Self { experts, chosen, inner_size, normalised } = self;
        let fields = &common.fields;
        if experts > MAX_EXPERTS || (experts > 0 && chosen > experts) {
            return Err(
                fields.error("num_experts_per_tok", format!("cannot choose {chosen} of {experts} experts"))
            );
        }
        let RoutingConfig { groups, chosen_groups, .. } = routing;
        if experts % groups != 0 || chosen_groups > groups {
            return Err(fields.error(
                "n_group",
                format!("cannot choose {chosen_groups} of {groups} equal groups of {experts} experts"),
            ));
        }
        if chosen > experts / groups * chosen_groups && experts > 0 {
            return Err(fields.error(
                "topk_group",
                format!("{chosen_groups} of {groups} groups have fewer than {chosen} of {experts} experts"),
            ));
        }
        Ok(ExpertsConfig {
            expert: GatedConfig { inner_size, ..common.gated() },
            experts,
            chosen,
            normalised,
            router_bias: false,
            routing,
            shared: None,
            norms: None,
        })
    }
}

/// Returns the routing by sigmoids, with a correction that only chooses, and by groups where there are several.
pub(super) fn corrected(fields: &Fields<'_>) -> Result<RoutingConfig, ModelError> {
    Ok(RoutingConfig {
        sigmoid: true,
        correction: Some("gate.e_score_correction_bias".into()),
        groups: fields.count("n_group")?.unwrap_or(1),
        chosen_groups: fields.count("topk_group")?.unwrap_or(1),
        scale: fields.number("routed_scaling_factor")?.unwrap_or(1.0) as f32,
        ..RoutingConfig::default()
    })
}

/// Returns the shared expert of the qwen families, which a sigmoid gate scales.
pub(super) fn gated_shared_expert(common: &Common<'_>, inner_size: usize) -> SharedExpertConfig {
    SharedExpertConfig {
        prefix: "shared_expert.".into(),
        network: GatedConfig { inner_size, ..common.gated() },
        gate: Some("shared_expert_gate.weight".into()),
    }
}
