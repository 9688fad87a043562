//! Views of stored positions.

use burn::tensor::{Shape, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use crate::cube::{dims, is_cube, primitive};

/// Returns a view of some positions that ends where the tensor does, so that a recorded step finds later positions behind
/// those that were in use. Returns `None` if the device cannot bind a buffer from the first position on.
pub(in super::super) fn view(stored: &Tensor<3>, start: usize, count: usize) -> Option<Tensor<3>> {
    if !is_cube(&stored.device()) {
        return None;
    }
    let whole = primitive(stored.clone());
    let [heads, _, width] = dims(&whole);
    let offset = (whole.meta.strides()[1] * start * whole.dtype.size()) as u64;
    if !offset.is_multiple_of(whole.client.properties().memory.alignment) {
        return None;
    }
    let mut meta = whole.meta.clone();
    meta.shape = Shape::new([heads, count, width]);
    let handle = whole.handle.clone().offset_start(offset);
    Some(Tensor::from_primitive::<CubeBackend>(CubeTensor { meta, handle, ..whole }))
}
