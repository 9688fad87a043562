//! Mixtures of experts.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{IndexingUpdateOp, Int, Tensor, TensorData, activation};

use crate::ModelError;
use crate::config::ExpertsConfig;
use crate::expert_cache::ExpertCache;
use crate::gated::GatedFeedForward;
use crate::matrix::Matrix;
use crate::weights::Weights;

/// Several gated networks, a few of which a router chooses for each position.
#[derive(Module, Debug)]
pub struct MixtureOfExperts {
    router: Matrix,
    /// Empty where experts come from a cache.
    experts: Vec<GatedFeedForward>,
    #[module(skip)]
    cached: Option<CachedExperts>,
    count: usize,
    chosen: usize,
    normalised: bool,
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
        Ok(Self {
            router: weights.matrix("gate.weight", config.experts, config.expert.hidden_size)?,
            experts,
            cached,
            count: config.experts,
            chosen: config.chosen,
            normalised: config.normalised,
        })
    }

    /// Maps `[rows, hidden_size]` to the same shape. Reads the router's choice back from the device, because it decides which experts
    /// run.
    pub fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>, ModelError> {
        let device = x.device();
        let shares = activation::softmax(self.router.multiply(x.clone()), 1);
        let recorded = device.is_autodiff().then(|| shares.clone());
        let shares = shares
            .try_into_vec_as::<f32>()
            .map_err(|error| ModelError::Device { reason: error.to_string() })?;
        let assignments = self.assign(&shares);
        let recorded = recorded.map(|shares| self.recorded_weights(shares, &assignments));
        let chosen: Vec<usize> =
            (0..self.count).filter(|expert| !assignments[*expert].rows.is_empty()).collect();
        // Moved out while rows are added, so that they are added in place.
        let mut sum = Some(x.zeros_like());
        self.each(&chosen, |expert, network| {
            let Assignment { rows, weights } = &assignments[expert];
            let count = rows.len();
            let rows = Tensor::<1, Int>::from_data(TensorData::new(rows.clone(), [count]), &device);
            let weights = match &recorded {
                Some(all) => all.clone().narrow(1, expert, 1).select(0, rows.clone()),
                None => Tensor::<2>::from_data(TensorData::new(weights.clone(), [count, 1]), &device),
            };
            let answer = network.forward(x.clone().select(0, rows.clone())).mul(weights);
            sum = sum.take().map(|sum| sum.select_assign(0, rows, answer, IndexingUpdateOp::Add));
        })?;
        Ok(sum.unwrap_or(x))
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
        if self.normalised { chosen.clone().div(chosen.sum_dim(1)) } else { chosen }
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
            let mut order: Vec<usize> = (0..shares.len()).collect();
            order.sort_by(|&a, &b| shares[b].total_cmp(&shares[a]));
            let chosen = &order[..self.chosen];
            let total: f32 =
                if self.normalised { chosen.iter().map(|&expert| shares[expert]).sum() } else { 1.0 };
            for &expert in chosen {
                assignments[expert].rows.push(row as i32);
                assignments[expert].weights.push(shares[expert] / total);
            }
        }
        assignments
    }
}
