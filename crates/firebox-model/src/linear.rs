//! A linear layer with an optional bias and adapter.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use firebox_kernels::linear::Weight;

use crate::ModelError;
use crate::adapter::Adapter;
use crate::matrix::Matrix;
use crate::weights::Weights;

/// `x · weightᵀ + bias`, and what an adapter adds.
#[derive(Module, Debug)]
pub struct Linear {
    /// `[outputs, inputs]`
    pub weight: Matrix,
    /// `[outputs]`
    pub bias: Option<Param<Tensor<1>>>,
    /// A change of low rank.
    pub adapter: Option<Adapter>,
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
            adapter: Adapter::load(weights, name, inputs, outputs)?,
        })
    }

    /// From `[rows, inputs]` to `[rows, outputs]`.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let change = self.change(&x);
        self.completed(self.weight.multiply(x), change)
    }

    /// Several of them on the same input, which costs less than one after the other.
    pub fn forward_each<const N: usize>(linears: [&Self; N], x: Tensor<2>) -> [Tensor<2>; N] {
        let changes = linears.map(|linear| linear.change(&x));
        let weights = linears.map(|linear| &linear.weight);
        let mut products = Matrix::multiply_each(x, &weights).into_iter().zip(changes);
        linears.map(|linear| match products.next() {
            Some((product, change)) => linear.completed(product, change),
            None => unreachable!("every weight has a product"),
        })
    }

    /// Returns the weight, if it has neither a bias nor an adapter and its inputs are not measured.
    pub(crate) fn plain_weights(&self) -> Option<Weight> {
        let is_plain = self.bias.is_none() && self.adapter.is_none() && !self.weight.is_measured();
        is_plain.then(|| self.weight.weight())
    }

    /// What an adapter adds.
    fn change(&self, x: &Tensor<2>) -> Option<Tensor<2>> {
        self.adapter.as_ref().map(|adapter| adapter.forward(x.clone()))
    }

    fn completed(&self, product: Tensor<2>, change: Option<Tensor<2>>) -> Tensor<2> {
        let product = match change {
            Some(change) => product.add(change),
            None => product,
        };
        match &self.bias {
            Some(bias) => product.add(bias.val().unsqueeze()),
            None => product,
        }
    }
}
