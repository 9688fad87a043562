//! Helpers shared by the Flex versions of the operations.

use burn::backend::flex::FlexTensor;
use burn::backend::{Dispatch, DispatchDevice};
use burn::tensor::{Device, Element, Shape, TensorData};

/// Whether a device is Flex without autodiff.
pub(crate) fn is_flex(device: &Device) -> bool {
    matches!(device.as_dispatch(), DispatchDevice::Flex(_))
}

/// Whether a device has native versions of this crate's operations besides the references.
pub(crate) fn has_native_ops(device: &Device) -> bool {
    match device.as_dispatch() {
        DispatchDevice::Flex(_) => true,
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        DispatchDevice::Cube(_) => true,
        #[allow(unreachable_patterns)] // There may be no further backends in a build.
        _ => false,
    }
}

/// Returns the CPU device to use beside `device`: `device` itself if it is a CPU. Keeps autodiff if `device`
/// records gradients.
pub fn host_device(device: &Device) -> Device {
    match device.clone().without_autodiff().as_dispatch() {
        DispatchDevice::Flex(_) => device.clone(),
        #[cfg(feature = "ndarray")]
        DispatchDevice::NdArray(_) => device.clone(),
        #[allow(unreachable_patterns)] // Flex may be the only backend of a build.
        _ => Device::flex().with_autodiff_context_from(device),
    }
}

/// The backend that looks up an operation by the device of its tensors.
pub(crate) type DispatchBackend = Dispatch;

/// Returns the tensor with contiguous elements, starting at any offset, for reading. Takes the tensor by
/// value, because cloning a handle allocates a copy of its layout.
pub(crate) fn contiguous(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() }
}

/// Returns the tensor with contiguous elements and nothing else in its storage. An unshared result can be
/// written in place.
pub(crate) fn compact(tensor: FlexTensor) -> FlexTensor {
    let bytes = tensor.layout().num_elements() * tensor.dtype().size();
    let is_whole = tensor.is_contiguous() && tensor.bytes().len() == bytes;
    if is_whole { tensor } else { tensor.to_contiguous() }
}

/// Returns the bytes of a contiguous tensor.
///
/// # Panics
/// If the tensor is not contiguous.
pub(crate) fn bytes(tensor: &FlexTensor) -> &[u8] {
    let Some((start, end)) = tensor.layout().contiguous_offsets() else {
        panic!("a tensor of {:?} whose elements are not in order", tensor.layout().shape());
    };
    let size = tensor.dtype().size();
    &tensor.bytes()[start * size..end * size]
}

/// Returns the elements of a contiguous tensor as values of type `T`.
///
/// # Panics
/// If the size of `T` differs from the tensor's elements, or its alignment does not fit.
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
