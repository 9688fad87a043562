//! Products with weights of `[outputs, inputs]`, in the formats of checkpoints.

mod activation_block;
mod activations;
mod arithmetic;
mod blocks;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
mod decode;
mod flex;
mod flex_weight;
mod fused;
mod gather;
mod gemm;
mod gemv;
#[cfg(feature = "autodiff")]
mod gradient;
mod grouping;
mod integer_tile;
mod low_bit_blocks;
mod multiplicand;
mod multiply;
mod ops;
mod panel;
mod place;
mod plain;
mod prepared;
mod q6k;
pub mod reference;
mod row_block;
mod row_group;
mod row_norm;
mod tiles;
mod uneven;
#[cfg(feature = "autodiff")]
mod unpack;
mod weight;

pub use blocks::BlockFormat;
pub use fused::{fuses_rows, multiply_added, multiply_each_normed, multiply_gated};
pub use grouping::{Grouping, NIBBLE_CHUNK, TILE_ROWS};
pub use prepared::PreparedWeight;
pub use reference::in_rows;
pub use row_norm::RowNorm;
pub use weight::Weight;

use burn::tensor::{DType, Device, Int, Tensor};

use ops::{BlockOps, LinearOps};

use crate::flex::{DispatchBackend, has_native_ops, is_flex};
#[cfg(feature = "autodiff")]
use crate::graph;

impl Weight {
    /// Returns `x · weightᵀ`; see [`multiply`].
    pub fn multiply(self, x: Tensor<2>) -> Tensor<2> {
        match self {
            Self::Dense(weight) => multiply(x, weight),
            Self::Grouped { words, scales, grouping } => multiply_grouped(x, words, scales, grouping),
            Self::Blocks { bytes, format } => multiply_blocks(x, bytes, format),
        }
    }

    /// Returns the device of its tensors.
    pub(crate) fn device(&self) -> Device {
        match self {
            Self::Dense(weight) => weight.device(),
            Self::Grouped { words, .. } => words.device(),
            Self::Blocks { bytes, .. } => bytes.device(),
        }
    }

    /// Prepares the weight for repeated products. Returns `None` on devices that do not benefit.
    pub fn prepare(self) -> Option<PreparedWeight> {
        is_flex(&self.device()).then(|| flex_weight::FlexWeight::from(self).into())
    }

    /// Whether the weight itself may have a gradient.
    #[cfg(feature = "autodiff")]
    fn is_recorded(&self) -> bool {
        matches!(self, Self::Dense(weight) if graph::records(&weight.device()))
    }
}

/// Products of the same activations with several weights, each as [`multiply`] gives it.
///
/// On the CPU all weights are processed together: threads synchronise once, and activations are quantized
/// once. On accelerators a few rows meet weights of one format in one launch.
pub fn multiply_each(x: Tensor<2>, weights: Vec<Weight>) -> Vec<Tensor<2>> {
    #[cfg(feature = "autodiff")]
    if graph::records(&x.device()) || weights.iter().any(Weight::is_recorded) {
        return gradient::multiply_each(x, weights);
    }
    if is_flex(&x.device()) {
        return flex::multiply_each(x, weights);
    }
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if crate::cube::is_cube(&x.device()) {
        return cube::multiply_each(x, weights);
    }
    weights.into_iter().map(|weight| weight.multiply(x.clone())).collect()
}

/// [`multiply_each`] for [prepared](Weight::prepare) weights, on a device that [accepts](accepts_prepared)
/// them.
///
/// # Panics
/// If the activations are on another device.
pub fn multiply_prepared(x: Tensor<2>, weights: &[&PreparedWeight]) -> Vec<Tensor<2>> {
    flex::multiply_prepared(x, weights)
}

/// Products of heads, `[rows, heads, inputs]`, each with a [prepared](Weight::prepare) weight of its own: `[rows, heads, outputs]`. The device
/// [accepts](accepts_prepared) such weights, which all have one shape. Threads synchronise once for all heads.
///
/// # Panics
/// As [`multiply_prepared`] does, and if there are other heads than weights, or weights differ in shape.
pub fn multiply_heads(x: Tensor<3>, weights: &[&PreparedWeight]) -> Tensor<3> {
    flex::multiply_heads(x, weights)
}

/// Whether activations on a device can be multiplied with prepared weights: on the CPU without autodiff.
pub fn accepts_prepared(device: &Device) -> bool {
    is_flex(device)
}

/// Returns `x · weightᵀ`, from `[rows, inputs]` to `[rows, outputs]` in f32, for a weight of f32, f16 or
/// bf16.
///
/// On the CPU a row's result does not depend on the other rows or on the number of threads. Accelerators add
/// in different orders for few rows and for many.
///
/// # Panics
/// On the CPU, if the weight has another dtype.
pub fn multiply(x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    #[cfg(feature = "autodiff")]
    if graph::records(&x.device()) || graph::records(&weight.device()) {
        return gradient::multiply(x, Weight::Dense(weight));
    }
    if !has_native_ops(&x.device()) {
        return reference::multiply(x, weight);
    }
    Tensor::from_dispatch(<DispatchBackend as LinearOps>::multiply(x.into_dispatch(), weight.into_dispatch()))
}

/// [`multiply`] for a weight of small integers: `words` is `[outputs, words]`, `scales` is `[outputs,
/// groups]`.
pub fn multiply_grouped(
    x: Tensor<2>,
    words: Tensor<2, Int>,
    scales: Tensor<2>,
    grouping: Grouping,
) -> Tensor<2> {
    let device = x.device();
    #[cfg(feature = "autodiff")]
    if graph::records(&device) {
        return gradient::multiply(x, Weight::Grouped { words, scales, grouping });
    }
    // The accelerator kernels unpack whole chunks with one scale.
    if !has_native_ops(&device) || !(is_flex(&device) || grouping.group.is_multiple_of(NIBBLE_CHUNK)) {
        return reference::multiply_grouped(x, words, scales, grouping);
    }
    let (words, scales, grouping) =
        if is_flex(&device) { (words, scales, grouping) } else { in_rows(words, scales, grouping) };
    Tensor::from_dispatch(<DispatchBackend as LinearOps>::multiply_grouped(
        x.into_dispatch(),
        words.into_dispatch(),
        scales.into_dispatch(),
        grouping,
    ))
}

/// [`multiply`] for a weight of GGUF blocks: `bytes` is `[outputs, bytes of a row]`, 8-bit unsigned integers.
///
/// # Panics
/// On devices other than the CPU; see [`multiplies_blocks`].
pub fn multiply_blocks(x: Tensor<2>, bytes: Tensor<2, Int>, format: BlockFormat) -> Tensor<2> {
    #[cfg(feature = "autodiff")]
    if graph::records(&x.device()) {
        return gradient::multiply(x, Weight::Blocks { bytes, format });
    }
    Tensor::from_dispatch(<DispatchBackend as BlockOps>::multiply_blocks(
        x.into_dispatch(),
        bytes.into_dispatch(),
        format,
    ))
}

/// Decodes rows of GGUF blocks to `[rows, inputs]` in f32, on the devices of [`multiply_blocks`].
pub fn dequantize_blocks(bytes: Tensor<2, Int>, format: BlockFormat) -> Tensor<2> {
    #[cfg(feature = "autodiff")]
    if graph::records(&bytes.device()) {
        return gradient::dequantize_blocks(bytes, format);
    }
    Tensor::from_dispatch(<DispatchBackend as BlockOps>::dequantize_blocks(bytes.into_dispatch(), format))
}

/// Multiplies with operands rounded to f16, as accelerators with matrix units do with many rows. For tests.
///
/// Returns `None` where the device lacks f16 or matrix units that are asked for, or has no kernel for the weight.
///
/// # Panics
/// If the tensors are not on one accelerator.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
#[doc(hidden)]
pub fn multiply_in_halves(x: Tensor<2>, weight: Weight, matrix_units: bool) -> Option<Tensor<2>> {
    cube::multiply_in_halves(x, weight, matrix_units)
}

/// Returns whether a device multiplies with weights of a dtype and number of inputs without converting them first. Accelerators
/// without bf16 read two such numbers from a word; no other operation works on such tensors there.
pub fn supports_weight(device: &Device, dtype: DType, inputs: usize) -> bool {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if dtype == DType::BF16 && cube::supports_bf16(device, inputs) {
        return true;
    }
    let _ = inputs;
    device.supports_dtype(dtype)
}

/// Returns rows of a weight of f32, f16 or bf16 as `[indices, inputs]` in f32.
pub fn gather(weight: Tensor<2>, indices: Tensor<1, Int>) -> Tensor<2> {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if crate::cube::is_cube(&weight.device()) {
        return cube::gather(weight, indices);
    }
    weight.select(0, indices).cast(DType::F32)
}

/// Decodes the given rows of a weight of small integers to `[indices, inputs]` in f32.
pub fn gather_grouped(
    words: Tensor<2, Int>,
    scales: Tensor<2>,
    grouping: Grouping,
    indices: Tensor<1, Int>,
) -> Tensor<2> {
    if is_flex(&words.device()) && is_flex(&scales.device()) && scales.dtype() == DType::F16 {
        return gather::rows(words, scales, grouping, indices);
    }
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if !grouping.tiled
        && crate::cube::is_cube(&words.device())
        && [scales.device(), indices.device()].iter().all(|device| *device == words.device())
    {
        return cube::gather_grouped(words, scales, grouping, indices);
    }
    let (words, scales) = if grouping.tiled {
        let indices: Vec<usize> = indices.into_data().iter::<i64>().map(|index| index as usize).collect();
        (reference::rows_of_tiles(words, &indices), reference::rows_of_tiles(scales, &indices))
    } else {
        (words.select(0, indices.clone()), scales.select(0, indices))
    };
    reference::dequantize(words, scales, Grouping { tiled: false, ..grouping })
}

/// Whether a device multiplies with GGUF blocks.
pub fn multiplies_blocks(device: &Device) -> bool {
    is_cpu(device)
}

/// Whether a device multiplies with tiled weights.
pub fn multiplies_tiles(device: &Device) -> bool {
    is_cpu(device)
}

/// Whether a device is Flex, with or without autodiff.
fn is_cpu(device: &Device) -> bool {
    #[cfg(feature = "autodiff")]
    if graph::records(device) {
        return true;
    }
    is_flex(device)
}
