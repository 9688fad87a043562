//! What versions for Flex have in common.

use burn::backend::flex::FlexTensor;
use burn::backend::{Dispatch, DispatchDevice};
use burn::tensor::{Device, Element, Shape, TensorData};

/// Whether tensors of a device are those of Flex.
pub(crate) fn is_flex(device: &Device) -> bool {
    matches!(device.as_dispatch(), DispatchDevice::Flex(_))
}

/// Whether a device has versions of its own of this crate's operations, beside the references.
pub(crate) fn has_native_ops(device: &Device) -> bool {
    match device.as_dispatch() {
        DispatchDevice::Flex(_) => true,
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        DispatchDevice::Cube(_) => true,
        #[allow(unreachable_patterns)] // There may be no further backends in a build.
        _ => false,
    }
}

/// The CPU device to compute on beside `device`: itself where it is one. Gradients are followed where they were.
pub fn host_device(device: &Device) -> Device {
    match device.clone().without_autodiff().as_dispatch() {
        DispatchDevice::Flex(_) => device.clone(),
        #[cfg(feature = "ndarray")]
        DispatchDevice::NdArray(_) => device.clone(),
        #[allow(unreachable_patterns)] // Flex may be the only backend of a build.
        _ => Device::flex().with_autodiff_context_from(device),
    }
}

/// Where the operations of this crate are looked up by device.
pub(crate) type DispatchBackend = Dispatch;

/// The tensor with its elements in order, wherever they begin: to be read. Takes the tensor, because the layout of another
/// handle is memory of its own.
pub(crate) fn contiguous(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() }
}

/// The same with nothing beside them, so that its storage is what it holds. One that nobody else holds can be written to
/// in place.
pub(crate) fn compact(tensor: FlexTensor) -> FlexTensor {
    let bytes = tensor.layout().num_elements() * tensor.dtype().size();
    let is_whole = tensor.is_contiguous() && tensor.bytes().len() == bytes;
    if is_whole { tensor } else { tensor.to_contiguous() }
}

/// The bytes of a contiguous tensor.
///
/// # Panics
/// If it is not: nothing would be read, and nobody would notice.
pub(crate) fn bytes(tensor: &FlexTensor) -> &[u8] {
    let Some((start, end)) = tensor.layout().contiguous_offsets() else {
        panic!("a tensor of {:?} whose elements are not in order", tensor.layout().shape());
    };
    let size = tensor.dtype().size();
    &tensor.bytes()[start * size..end * size]
}

/// The elements of a contiguous tensor, as whatever is as long as they are.
///
/// # Panics
/// If the tensor's elements are of another length, or do not lie where such elements may.
pub(crate) fn elements<T: bytemuck::Pod>(tensor: &FlexTensor) -> &[T] {
    assert_eq!(size_of::<T>(), tensor.dtype().size(), "a tensor of {:?}", tensor.dtype());
    bytemuck::cast_slice(bytes(tensor))
}

pub(crate) fn dims<const D: usize>(tensor: &FlexTensor) -> [usize; D] {
    tensor.layout().shape().dims()
}

pub(crate) fn tensor<T: Element, const D: usize>(values: Vec<T>, shape: [usize; D]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, Shape::new(shape)))
}
