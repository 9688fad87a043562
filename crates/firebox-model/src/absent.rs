//! What stands for a mixer or a feed-forward network that a layer does not have.

use burn::module::Module;
use burn::tensor::Tensor;

/// Adds nothing to the residual.
#[derive(Module, Debug)]
pub struct Absent;

impl Absent {
    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        x.zeros_like()
    }
}
