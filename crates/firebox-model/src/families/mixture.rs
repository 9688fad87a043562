//! Configuration fields of mixtures of experts that several families share.

use super::common::Common;
use crate::ModelError;
use crate::config::{
    DecoderConfig, ExpertsConfig, GatedConfig, RoutingConfig, SharedExpertConfig, TensorNames,
};
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

/// Returns the routing by sigmoids, with a correction that only chooses, and by groups where there are several. `groups`, of which the
/// second number are chosen, and `scale` are those of configurations without them.
pub(super) fn corrected(
    fields: &Fields<'_>,
    groups: [usize; 2],
    scale: f64,
) -> Result<RoutingConfig, ModelError> {
    Ok(RoutingConfig {
        sigmoid: true,
        correction: Some("gate.e_score_correction_bias".into()),
        groups: fields.count("n_group")?.unwrap_or(groups[0]),
        chosen_groups: fields.count("topk_group")?.unwrap_or(groups[1]),
        scale: fields.number("routed_scaling_factor")?.unwrap_or(scale) as f32,
        ..RoutingConfig::default()
    })
}

/// What absent fields of a [`corrected_mixture`] mean.
pub(super) struct CorrectedDefaults {
    pub experts: usize,
    pub chosen: usize,
    pub inner_size: usize,
    pub groups: usize,
    pub chosen_groups: usize,
    pub scale: f64,
}

/// Returns the mixture of the glm and deepseek families: [`corrected`] routing, beside shared experts.
pub(super) fn corrected_mixture(
    common: &Common<'_>,
    absent: CorrectedDefaults,
) -> Result<ExpertsConfig, ModelError> {
    let fields = &common.fields;
    for (field, known) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
        if let Some(other) = fields.text(field)?.filter(|name| *name != known) {
            return Err(fields.error(field, format!("is {other:?}; {} is run with {known:?}", common.family)));
        }
    }
    let inner_size = fields.count("moe_intermediate_size")?.unwrap_or(absent.inner_size);
    let mixture = Mixture {
        experts: fields.count("n_routed_experts")?.unwrap_or(absent.experts),
        chosen: fields.count("num_experts_per_tok")?.unwrap_or(absent.chosen),
        inner_size,
        normalised: fields.flag("norm_topk_prob")?.unwrap_or(true),
    };
    let routing = corrected(fields, [absent.groups, absent.chosen_groups], absent.scale)?;
    let shared = fields.whole("n_shared_experts")?.unwrap_or(1);
    let shared = (shared > 0).then(|| SharedExpertConfig {
        prefix: "shared_experts.".into(),
        network: GatedConfig { inner_size: inner_size * shared, ..common.gated() },
        gate: None,
    });
    Ok(ExpertsConfig { shared, ..mixture.config(common, routing)? })
}

/// Returns a model whose checkpoint has layers behind the last one, which predict further tokens and are not run.
pub(super) fn without_further_layers(
    common: &Common<'_>,
    model: DecoderConfig,
) -> Result<DecoderConfig, ModelError> {
    let further = common.fields.whole("num_nextn_predict_layers")?.unwrap_or(0).min(common.layers);
    let foreign = (0..further).map(|layer| format!("model.layers.{}.", common.layers + layer)).collect();
    Ok(DecoderConfig { names: TensorNames { foreign, ..model.names }, ..model })
}

/// Returns the shared expert of the qwen families, which a sigmoid gate scales.
pub(super) fn gated_shared_expert(common: &Common<'_>, inner_size: usize) -> SharedExpertConfig {
    SharedExpertConfig {
        prefix: "shared_expert.".into(),
        network: GatedConfig { inner_size, ..common.gated() },
        gate: Some("shared_expert_gate.weight".into()),
    }
}
