//! Copies numbers from a device to the host.

use burn::tensor::Tensor;
use firebox_kernels::transfers;

use crate::RuntimeError;

/// Returns the elements of a tensor as `f32`.
pub fn read_floats<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>, RuntimeError> {
    let read = tensor.try_into_vec_as::<f32>();
    let floats = read.map_err(|error| RuntimeError::Readback { reason: error.to_string() })?;
    transfers::count_read(size_of_val(&floats[..]));
    Ok(floats)
}
