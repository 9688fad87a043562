use burn::module::Module;
use burn::tensor::{IndexingUpdateOp, Int, Tensor, TensorData, activation};

use crate::ModelError;
use crate::config::ExpertsConfig;
use crate::gated::GatedFeedForward;
use crate::matrix::Matrix;
use crate::weights::Weights;

/// Several gated networks, a few of which work on each position.
#[derive(Module, Debug)]
pub struct MixtureOfExperts {
    router: Matrix,
    experts: Vec<GatedFeedForward>,
    chosen: usize,
    normalised: bool,
}

/// The rows one expert works on, and what its answer counts for each.
#[derive(Debug, Default, Clone)]
struct Assignment {
    rows: Vec<i32>,
    weights: Vec<f32>,
}

impl MixtureOfExperts {
    pub(crate) fn load(config: &ExpertsConfig, weights: &Weights<'_>) -> Result<Self, ModelError> {
        let experts = (0..config.experts)
            .map(|expert| {
                GatedFeedForward::load(&config.expert, &weights.within(&format!("experts.{expert}.")))
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            router: weights.matrix("gate.weight", config.experts, config.expert.hidden_size)?,
            experts,
            chosen: config.chosen,
            normalised: config.normalised,
        })
    }

    /// From `[rows, hidden_size]` to the same. Reads the router's choice back from the device, since it
    /// decides which experts run at all.
    pub fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>, ModelError> {
        let device = x.device();
        let shares = activation::softmax(self.router.multiply(x.clone()), 1);
        let shares = shares
            .try_into_vec_as::<f32>()
            .map_err(|error| ModelError::Device { reason: error.to_string() })?;
        let mut sum = x.zeros_like();
        for (expert, assignment) in self.experts.iter().zip(self.assign(&shares)) {
            if assignment.rows.is_empty() {
                continue;
            }
            let count = assignment.rows.len();
            let rows = Tensor::<1, Int>::from_data(TensorData::new(assignment.rows, [count]), &device);
            let weights = Tensor::<2>::from_data(TensorData::new(assignment.weights, [count, 1]), &device);
            let answer = expert.forward(x.clone().select(0, rows.clone())).mul(weights);
            sum = sum.select_assign(0, rows, answer, IndexingUpdateOp::Add);
        }
        Ok(sum)
    }

    fn assign(&self, shares: &[f32]) -> Vec<Assignment> {
        let mut assignments = vec![Assignment::default(); self.experts.len()];
        for (row, shares) in shares.chunks_exact(self.experts.len()).enumerate() {
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
