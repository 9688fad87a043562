//! What versions for accelerators have in common.
//!
//! They are written in CubeCL, which makes WGSL, SPIR-V, CUDA or Metal of them. Lengths are arguments of a
//! kernel and only formats are built into it, so a process compiles each at most a few times however long
//! its sequences are.

use burn::backend::DispatchDevice;
use burn::tensor::{DType, Device, Int, Shape, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::features::Plane;
use burn_cubecl::cubecl::ir::{ElemType, FloatKind};
use burn_cubecl::cubecl::{self, client::Client, prelude::*};
use burn_cubecl::kernel::{cast, into_contiguous};
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, zeros};
use burn_cubecl::tensor::CubeTensor;

/// Cubes in one direction that every device allows.
pub(crate) const MOST_CUBES: u32 = 65_535;
/// What [`magnitude`] says of infinity.
pub(crate) const INFINITE: u32 = f32::INFINITY.to_bits();

/// Whether tensors of a device are those of CubeCL.
pub(crate) fn is_cube(device: &Device) -> bool {
    matches!(device.as_dispatch(), DispatchDevice::Cube(_))
}

const ON_CUBE: &str = "all tensors of an operation are on one device";

/// # Panics
/// If the tensor is not on an accelerator, as operations of Burn do for tensors of different devices.
pub(crate) fn primitive<const D: usize>(tensor: Tensor<D>) -> CubeTensor {
    tensor.try_into_primitive::<CubeBackend>().expect(ON_CUBE)
}

/// The same of integers.
pub(crate) fn integers<const D: usize>(tensor: Tensor<D, Int>) -> CubeTensor {
    tensor.try_into_primitive::<CubeBackend>().expect(ON_CUBE)
}

/// The tensor in f32 with its elements in order.
pub(crate) fn floats(tensor: CubeTensor) -> CubeTensor {
    into_contiguous(cast(tensor, DType::F32))
}

pub(crate) fn dims<const D: usize>(tensor: &CubeTensor) -> [usize; D] {
    tensor.meta.shape().dims()
}

/// Room for a result in f32 beside `like`, not yet written.
pub(crate) fn room<const D: usize>(like: &CubeTensor, shape: [usize; D]) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), Shape::new(shape), DType::F32)
}

pub(crate) fn zeroed<const D: usize>(like: &CubeTensor, shape: [usize; D]) -> CubeTensor {
    zeros(like.device.clone(), Shape::new(shape), DType::F32)
}

/// What a kernel reads a float tensor's elements as.
///
/// # Panics
/// If they are no floats of 64 bits or less.
pub(crate) fn element(tensor: &CubeTensor) -> ElemType {
    let kind = match tensor.dtype {
        DType::F64 => FloatKind::F64,
        DType::F32 | DType::Flex32 => FloatKind::F32,
        DType::F16 => FloatKind::F16,
        DType::BF16 => FloatKind::BF16,
        dtype => panic!("{dtype:?} is no float that kernels read"),
    };
    ElemType::Float(kind)
}

/// At least `count` cubes. A kernel that is launched on them finds its number in `CUBE_POS` and has to leave
/// the ones beyond `count` alone.
pub(crate) fn cubes(count: usize) -> CubeCount {
    let across = count.min(MOST_CUBES as usize).max(1);
    CubeCount::Static(across as u32, count.div_ceil(across).max(1) as u32, 1)
}

/// The most elements up to four that every load of a row can take at once.
pub(crate) fn vector_size(row: usize) -> VectorSize {
    match row % 4 {
        0 => 4,
        2 => 2,
        _ => 1,
    }
}

/// The size of the device's planes (subgroups), or 1 where it has none or does not keep to one size: which
/// units share a plane can only be relied on when all planes are full.
pub(crate) fn plane_size(client: &Client) -> u32 {
    let properties = client.properties();
    let (least, most) = (properties.hardware.plane_size_min, properties.hardware.plane_size_max);
    if properties.features.plane.contains(Plane::Ops) && least == most { least } else { 1 }
}

/// The sum over the `lanes` units of a line (those with the same `UNIT_POS_Y`), known to all of them.
///
/// `scratch` has room for `lanes` times lines. All units of the cube have to come here together. Planes add
/// what their units hold and lines what their planes hold; without planes (`plane` is 1) the halves of a line
/// are added to each other until one number is left. Either way the order is the same at every call.
#[cube]
pub(crate) fn sum_line<N: Size>(
    value: Vector<f32, N>,
    scratch: &mut Shared<[Vector<f32, N>]>,
    #[comptime] lanes: u32,
    #[comptime] plane: u32,
) -> Vector<f32, N> {
    let lane = UNIT_POS_X;
    let line = UNIT_POS_Y * lanes;
    if comptime!(plane > 1 && lanes.is_multiple_of(plane)) {
        let part = plane_sum(value);
        if comptime!(plane == lanes) {
            part
        } else {
            if lane.is_multiple_of(plane) {
                scratch[(line + lane / plane) as usize] = part;
            }
            sync_cube();
            let mut sum = scratch[line as usize];
            for index in 1..comptime!(lanes / plane) {
                sum += scratch[(line + index) as usize];
            }
            sync_cube();
            sum
        }
    } else {
        scratch[(line + lane) as usize] = value;
        sync_cube();
        let mut half = comptime!(lanes / 2).runtime();
        while half > 0 {
            if lane < half {
                let other = scratch[(line + lane + half) as usize];
                scratch[(line + lane) as usize] += other;
            }
            sync_cube();
            half /= 2;
        }
        let sum = scratch[line as usize];
        sync_cube();
        sum
    }
}

/// The bits of a number without its sign, which compare as magnitudes do; larger than those of infinity for what is
/// no number.
///
/// Comparisons of floats, the larger of two and rounding may take what is no number for anything: shader languages
/// allow that, and `!=` is false of it where WGSL becomes SPIR-V. Whatever has to tell it looks at bits.
#[cube]
pub(crate) fn magnitude(number: f32) -> u32 {
    u32::reinterpret(number) & 0x7FFF_FFFFu32
}

/// `tanh`, which some devices compute from exponentials that overflow and others by limiting what it is of: what is no
/// number stays as it is.
#[cube]
pub(crate) fn tanh(x: f32) -> f32 {
    let mut share = x;
    if magnitude(x) <= INFINITE {
        if x > 15.0f32 {
            share = 1.0f32;
        } else if x < -15.0f32 {
            share = -1.0f32;
        } else {
            share = x.tanh();
        }
    }
    share
}

/// By an exponential that cannot overflow, which devices may take for anything.
#[cube]
pub(crate) fn sigmoid(x: f32) -> f32 {
    let faded = (-x.abs()).exp();
    let mut share = 1.0f32 / (1.0f32 + faded);
    if x < 0.0f32 {
        share *= faded;
    }
    share
}

/// The sum of a vector's elements.
#[cube]
pub(crate) fn sum_vector<N: Size>(value: Vector<f32, N>) -> f32 {
    let mut sum = value.extract(0usize);
    #[unroll]
    for index in 1..N::value() {
        sum += value.extract(index);
    }
    sum
}

/// The signed bytes of a word.
#[cube]
pub(crate) fn signed_bytes(word: u32) -> Vector<f32, Const<4>> {
    let mut numbers = Vector::<f32, Const<4>>::new(0.0f32);
    #[unroll]
    for byte in 0..4usize {
        let offset = ((word >> (8 * byte as u32)) & 255) ^ 128;
        numbers.insert(byte, f32::cast_from(offset) - 128.0f32);
    }
    numbers
}
