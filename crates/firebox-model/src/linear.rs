use burn::module::{Module, Param};
use burn::tensor::Tensor;
use firebox_kernels::linear::multiply_each;

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
        self.biased(self.weight.multiply(x))
    }

    /// Several of them on the same input, which costs less than one after the other.
    pub fn forward_each<const N: usize>(linears: [&Self; N], x: Tensor<2>) -> [Tensor<2>; N] {
        let weights = linears.iter().map(|linear| linear.weight.weight()).collect();
        let mut products = multiply_each(x, weights).into_iter();
        linears.map(|linear| match products.next() {
            Some(product) => linear.biased(product),
            None => unreachable!("every weight has a product"),
        })
    }

    fn biased(&self, product: Tensor<2>) -> Tensor<2> {
        match &self.bias {
            Some(bias) => product.add(bias.val().unsqueeze()),
            None => product,
        }
    }
}
