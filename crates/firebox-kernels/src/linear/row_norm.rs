//! A norm of rows in front of products.

use burn::tensor::Tensor;

use crate::norm::rms_norm;

/// The parameters of [`rms_norm`].
#[derive(Debug, Clone)]
pub struct RowNorm {
    /// `[inputs]`
    pub weight: Tensor<1>,
    /// Added to the mean square.
    pub epsilon: f64,
    /// Added to the weight.
    pub offset: f32,
}

impl RowNorm {
    pub(super) fn apply(self, x: Tensor<2>) -> Tensor<2> {
        rms_norm(x, self.weight, self.epsilon, self.offset)
    }
}
