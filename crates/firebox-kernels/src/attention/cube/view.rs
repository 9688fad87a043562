//! Views of stored positions, and of memory that several tensors share.

use burn::tensor::{DType, Device, Shape, Tensor};
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

/// Allocates zeros for `count` pairs of keys and values of this shape in one memory. Returns `None` if the device cannot bind a buffer from
/// each of them on.
pub(in super::super) fn pairs(
    shape: [usize; 3],
    count: usize,
    device: &Device,
    dtype: DType,
) -> Option<Vec<[Tensor<3>; 2]>> {
    let numbers: usize = shape.iter().product();
    if !is_cube(device) || numbers * count == 0 {
        return None;
    }
    let bytes = (numbers * dtype.size()) as u64;
    let all = primitive(Tensor::<1>::zeros([2 * count * numbers], (device, dtype)));
    if !bytes.is_multiple_of(all.client.properties().memory.alignment) {
        return None;
    }
    let side = |index: usize| {
        let start = index as u64 * bytes;
        let rest = all.handle.size_in_used() - start - bytes;
        let handle = all.handle.clone().offset_start(start).offset_end(rest);
        let (client, device) = (all.client.clone(), all.device.clone());
        let side = CubeTensor::new_contiguous(client, device, Shape::new(shape), handle, dtype);
        Tensor::from_primitive::<CubeBackend>(side)
    };
    Some((0..count).map(|pair| [2 * pair, 2 * pair + 1].map(side)).collect())
}
