use burn::module::{Module, Param};
use burn::tensor::Tensor;

use crate::ModelError;
use crate::matrix::Matrix;
use crate::weights::Weights;

/// `x · weightᵀ + bias`
#[derive(Module, Debug)]
pub struct Linear {
    /// `[outputs, inputs]`
    pub weight: Matrix,
    /// `[outputs]`
    pub bias: Option<Param<Tensor<1>>>,
}

impl Linear {
    pub(crate) fn load(
        weights: &Weights<'_>,
        name: &str,
        inputs: usize,
        outputs: usize,
        bias: bool,
    ) -> Result<Self, ModelError> {
        Ok(Self {
            weight: weights.matrix(&format!("{name}.weight"), outputs, inputs)?,
            bias: if bias { Some(weights.vector(&format!("{name}.bias"), outputs)?) } else { None },
        })
    }

    /// From `[rows, inputs]` to `[rows, outputs]`.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let product = self.weight.multiply(x);
        match &self.bias {
            Some(bias) => product.add(bias.val().unsqueeze()),
            None => product,
        }
    }
}
