use burn::tensor::{Tensor, activation};

use crate::config::Activation;

impl Activation {
    /// Applies the nonlinearity to every element.
    pub fn forward<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Silu => activation::silu(x),
            Self::Gelu => activation::gelu(x),
            // Burn's own approximation cubes with a float power, which shader languages leave undefined
            // for negative numbers.
            Self::GeluTanh => {
                let cube = x.clone().square().mul(x.clone());
                let inner = cube.mul_scalar(0.044_715).add(x.clone());
                let tanh = inner.mul_scalar((2.0 / std::f64::consts::PI).sqrt()).tanh();
                x.mul(tanh.add_scalar(1.0)).mul_scalar(0.5)
            }
            Self::GeluQuick => activation::sigmoid(x.clone().mul_scalar(1.702)).mul(x),
            Self::Relu => activation::relu(x),
            Self::ReluSquared => activation::relu(x).square(),
            Self::Tanh => x.tanh(),
        }
    }
}
