//! Copies numbers from a device to the host.

use burn::tensor::Tensor;

use crate::RuntimeError;

/// Returns the elements of a tensor as `f32`.
pub fn read_floats<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>, RuntimeError> {
    tensor.try_into_vec_as::<f32>().map_err(|error| RuntimeError::Readback { reason: error.to_string() })
}
