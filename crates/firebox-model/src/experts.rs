//! Mixtures of experts.

use std::borrow::Cow;
use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::{IndexingUpdateOp, Int, Tensor, TensorData, activation};

use crate::ModelError;
use crate::config::{ExpertsConfig, MixtureNormsConfig, RoutingConfig};
use crate::expert_cache::ExpertCache;
use crate::gated::GatedFeedForward;
use crate::matrix::Matrix;
use crate::norm::RmsNorm;
use crate::weights::Weights;

/// Number of best scores of a group that add up to its strength.
const GROUP_SCORES: usize = 2;

/// Score of experts in groups that are not chosen.
const EXCLUDED_SCORE: f32 = f32::NEG_INFINITY;

/// Several gated networks, a few of which a router chooses for each position.
#[derive(Module, Debug)]
pub struct MixtureOfExperts {
    router: Matrix,
    router_bias: Option<Param<Tensor<1>>>,
    /// Empty where experts come from a cache.
    experts: Vec<GatedFeedForward>,
    #[module(skip)]
    cached: Option<CachedExperts>,
    count: usize,
    chosen: usize,
    normalised: bool,
    shared: Option<SharedExpert>,
    norms: Option<MixtureNorms>,
    /// A factor of each expert's weights.
    scales: Option<Param<Tensor<1>>>,
    /// Added to the shares for choosing.
    #[module(skip)]
    correction: Option<Vec<f32>>,
    #[module(skip)]
    routing: RoutingConfig,
}

/// A network that works on every position, scaled by a gate if there is one.
#[derive(Module, Debug)]
struct SharedExpert {
    network: GatedFeedForward,
    gate: Option<Matrix>,
}

/// Norms of a mixture that is given the residual itself.
#[derive(Module, Debug)]
struct MixtureNorms {
    shared: RmsNorm,
    shared_output: RmsNorm,
    experts: RmsNorm,
    experts_output: RmsNorm,
    router: RmsNorm,
}

impl MixtureNorms {
    fn load(config: &MixtureNormsConfig, weights: &Weights<'_>) -> Result<Self, ModelError> {
        let MixtureNormsConfig { router, .. } = config;
        Ok(Self {
            shared: RmsNorm::load(&config.shared, weights)?,
            shared_output: RmsNorm::load(&config.shared_output, weights)?,
            experts: RmsNorm::load(&config.experts, weights)?,
            experts_output: RmsNorm::load(&config.experts_output, weights)?,
            router: RmsNorm {
                weight: weights.vector(&router.name, router.width)?,
                epsilon: router.epsilon,
                weight_offset: router.weight_offset,
            },
        })
    }

    /// Returns what the shared network, the experts and the router read.
    fn inputs(&self, x: Tensor<2>) -> [Tensor<2>; 3] {
        // The router's products are as large as those of one input.
        let scale = (x.dims()[1] as f64).powf(-0.5);
        let router = self.router.forward(x.clone()).mul_scalar(scale);
        [self.shared.forward(x.clone()), self.experts.forward(x), router]
    }
}

/// The experts of one layer in a cache, which are not part of the module.
#[derive(Debug, Clone)]
pub(crate) struct CachedExperts {
    pub cache: Arc<ExpertCache>,
    pub layer: usize,
}

/// The rows that an expert works on, and the weight of its result for each.
#[derive(Debug, Default, Clone)]
struct Assignment {
    rows: Vec<i32>,
    weights: Vec<f32>,
}

impl MixtureOfExperts {
    /// Builds the module. The experts are those of the cache if there is one, and the checkpoint's otherwise.
    pub(crate) fn load(
        config: &ExpertsConfig,
        weights: &Weights<'_>,
        cached: Option<CachedExperts>,
    ) -> Result<Self, ModelError> {
        let here = if cached.is_some() { 0 } else { config.experts };
        let experts = (0..here)
            .map(|expert| {
                GatedFeedForward::load(&config.expert, &weights.within(&format!("experts.{expert}.")))
            })
            .collect::<Result<_, _>>()?;
        let hidden_size = config.expert.hidden_size;
        let shared = match &config.shared {
            Some(shared) => Some(SharedExpert {
                network: GatedFeedForward::load(&shared.network, &weights.within(&shared.prefix))?,
                gate: match &shared.gate {
                    Some(name) => Some(weights.matrix(name, 1, hidden_size)?),
                    None => None,
                },
            }),
            None => None,
        };
        let correction = match &config.routing.correction {
            Some(name) => Some(read(weights.plain::<1>(name, [config.experts])?)?),
            None => None,
        };
        Ok(Self {
            norms: match &config.norms {
                Some(norms) => Some(MixtureNorms::load(norms, weights)?),
                None => None,
            },
            scales: match &config.routing.expert_scales {
                Some(name) => Some(weights.vector(name, config.experts)?),
                None => None,
            },
            router: weights.matrix("gate.weight", config.experts, hidden_size)?,
            router_bias: match config.router_bias {
                true => Some(weights.vector("gate.bias", config.experts)?),
                false => None,
            },
            experts,
            cached,
            count: config.experts,
            chosen: config.chosen,
            normalised: config.normalised,
            shared,
            correction,
            routing: config.routing.clone(),
        })
    }

    /// Maps `[rows, hidden_size]` to the same shape. Reads the router's choice back from the device, because it decides which experts
    /// run.
    pub fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>, ModelError> {
        let device = x.device();
        let [of_shared, x, of_router] = match &self.norms {
            Some(norms) => norms.inputs(x),
            None => [x.clone(), x.clone(), x],
        };
        let products = self.router.multiply(of_router);
        let products = match &self.router_bias {
            Some(bias) => products.add(bias.val().unsqueeze()),
            None => products,
        };
        let shares = match self.routing.sigmoid {
            true => activation::sigmoid(products),
            false => activation::softmax(products, 1),
        };
        let recorded = device.is_autodiff().then(|| shares.clone());
        let shares = read(shares)?;
        let assignments = self.assign(&shares);
        let recorded = recorded.map(|shares| self.recorded_weights(shares, &assignments));
        let chosen: Vec<usize> =
            (0..self.count).filter(|expert| !assignments[*expert].rows.is_empty()).collect();
        let shared = self.shared.as_ref().map(|shared| shared.forward(of_shared));
        let (begun, apart) = match &self.norms {
            Some(norms) => (None, shared.map(|shared| norms.shared_output.forward(shared))),
            None => (shared, None),
        };
        // Moved out while rows are added, so that they are added in place.
        let mut sum = Some(begun.unwrap_or_else(|| x.zeros_like()));
        self.each(&chosen, |expert, network| {
            let Assignment { rows, weights } = &assignments[expert];
            let count = rows.len();
            let rows = Tensor::<1, Int>::from_data(TensorData::new(rows.clone(), [count]), &device);
            let weights = match &recorded {
                Some(all) => all.clone().narrow(1, expert, 1).select(0, rows.clone()),
                None => Tensor::<2>::from_data(TensorData::new(weights.clone(), [count, 1]), &device),
            };
            let weights = match &self.scales {
                Some(scales) => weights.mul(scales.val().narrow(0, expert, 1).unsqueeze()),
                None => weights,
            };
            let answer = network.forward(x.clone().select(0, rows.clone())).mul(weights);
            sum = sum.take().map(|sum| sum.select_assign(0, rows, answer, IndexingUpdateOp::Add));
        })?;
        let sum = sum.unwrap_or(x);
        let sum = match &self.norms {
            Some(norms) => norms.experts_output.forward(sum),
            None => sum,
        };
        Ok(match apart {
            Some(shared) => shared.add(sum),
            None => sum,
        })
    }

    /// The weight of every expert for every row, `[rows, experts]`, on the autodiff graph, so that the router learns.
    fn recorded_weights(&self, shares: Tensor<2>, assignments: &[Assignment]) -> Tensor<2> {
        let [rows, experts] = shares.dims();
        let mut mask = vec![0f32; rows * experts];
        for (expert, assignment) in assignments.iter().enumerate() {
            assignment.rows.iter().for_each(|&row| mask[row as usize * experts + expert] = 1.0);
        }
        let mask = Tensor::<2>::from_data(TensorData::new(mask, [rows, experts]), &shares.device());
        let chosen = shares.mul(mask);
        let weights = if self.normalised { chosen.clone().div(chosen.sum_dim(1)) } else { chosen };
        weights.mul_scalar(self.routing.scale)
    }

    fn each(
        &self,
        experts: &[usize],
        mut work: impl FnMut(usize, &GatedFeedForward),
    ) -> Result<(), ModelError> {
        match &self.cached {
            Some(CachedExperts { cache, layer }) => cache.each(*layer, experts, work),
            None => {
                for &expert in experts {
                    work(expert, &self.experts[expert]);
                }
                Ok(())
            }
        }
    }

    fn assign(&self, shares: &[f32]) -> Vec<Assignment> {
        let mut assignments = vec![Assignment::default(); self.count];
        for (row, shares) in shares.chunks_exact(self.count).enumerate() {
            let scores = self.scores(shares);
            let mut order: Vec<usize> = (0..shares.len()).collect();
            order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
            let chosen = &order[..self.chosen];
            let total: f32 =
                if self.normalised { chosen.iter().map(|&expert| shares[expert]).sum() } else { 1.0 };
            for &expert in chosen {
                assignments[expert].rows.push(row as i32);
                assignments[expert].weights.push(shares[expert] / total * self.routing.scale);
            }
        }
        assignments
    }

    /// Returns what experts are chosen by: their shares, corrected, and without those of groups that are not chosen.
    fn scores<'s>(&self, shares: &'s [f32]) -> Cow<'s, [f32]> {
        let RoutingConfig { groups, chosen_groups, .. } = self.routing;
        if self.correction.is_none() && chosen_groups >= groups {
            return shares.into();
        }
        let mut scores = shares.to_vec();
        for (score, correction) in scores.iter_mut().zip(self.correction.iter().flatten()) {
            *score += correction;
        }
        if chosen_groups < groups {
            let width = scores.len() / groups;
            let strength = |group: &[f32]| {
                let mut sorted = group.to_vec();
                sorted.sort_by(|a, b| b.total_cmp(a));
                sorted.iter().take(GROUP_SCORES).sum::<f32>()
            };
            let strengths: Vec<f32> = scores.chunks_exact(width).map(strength).collect();
            let mut order: Vec<usize> = (0..groups).collect();
            order.sort_by(|&a, &b| strengths[b].total_cmp(&strengths[a]));
            for &group in &order[chosen_groups..] {
                scores[group * width..][..width].fill(EXCLUDED_SCORE);
            }
        }
        scores.into()
    }
}

impl SharedExpert {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        match &self.gate {
            Some(gate) => {
                let scale = activation::sigmoid(gate.multiply(x.clone()));
                self.network.forward(x).mul(scale)
            }
            None => self.network.forward(x),
        }
    }
}

/// Reads numbers back from the device.
fn read<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>, ModelError> {
    tensor.try_into_vec_as::<f32>().map_err(|error| ModelError::Device { reason: error.to_string() })
}
