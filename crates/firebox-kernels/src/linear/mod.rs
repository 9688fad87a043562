//! Products with weights of `[outputs, inputs]`, as checkpoints store them.

mod activations;
mod blocks;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
mod flex;
mod gather;
mod gemm;
mod gemv;
#[cfg(feature = "autodiff")]
mod gradient;
mod panel;
mod plain;
mod prepared;
mod q6k;
pub mod reference;
mod tiles;
mod uneven;
#[cfg(feature = "autodiff")]
mod unpack;

pub use blocks::BlockFormat;
pub use prepared::PreparedWeight;

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};
use burn::tensor::{DType, Device, Int, Tensor};

use crate::flex::{DispatchBackend, has_native_ops, is_flex};
#[cfg(feature = "autodiff")]
use crate::graph;

/// Inputs whose nibbles are stored together: byte `i` of 16 holds input `i` low and input `i + 16` high.
pub const NIBBLE_CHUNK: usize = 32;

/// Rows of a weight that lie side by side where it is [`tiled`](Grouping::tiled).
pub const TILE_ROWS: usize = 16;

/// How a weight of small integers is laid out: rows of packed integers, viewed as 32-bit words, and a
/// half-precision scale for every group of inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grouping {
    /// Inputs of a row; the last group may be short.
    pub inputs: usize,
    /// Inputs that share a scale. Whole chunks of [`NIBBLE_CHUNK`] where rows are in tiles.
    pub group: usize,
    /// Nibbles offset by eight, in whole chunks of [`NIBBLE_CHUNK`]; otherwise signed bytes.
    pub four_bits: bool,
    /// Whether rows are in tiles of [`TILE_ROWS`]: of each tile the first words of all rows, then the second ones, and
    /// scales likewise. The last tile has as many rows as are left. Otherwise one row comes after the other.
    ///
    /// The CPU multiplies with tiles, and turns anything else for every product. Accelerators want rows: see [`in_rows`].
    pub tiled: bool,
}

impl Grouping {
    /// 32-bit words that a row takes at minimum.
    pub fn row_words(&self) -> usize {
        if self.four_bits {
            self.inputs.div_ceil(NIBBLE_CHUNK) * NIBBLE_CHUNK / 8
        } else {
            self.inputs.div_ceil(4)
        }
    }

    /// Scales of a row.
    pub fn groups(&self) -> usize {
        self.inputs.div_ceil(self.group)
    }
}

/// Where a row is among those that lie beside it, see [`Grouping::tiled`].
#[derive(Clone, Copy)]
struct RowIndices {
    /// The first of them.
    first: usize,
    lane: usize,
    lanes: usize,
}

impl RowIndices {
    fn in_tile(index: usize, rows: usize) -> Self {
        let lane = index % TILE_ROWS;
        let first = index - lane;
        Self { first, lane, lanes: TILE_ROWS.min(rows - first) }
    }

    fn contiguous(index: usize) -> Self {
        Self { first: index, lane: 0, lanes: 1 }
    }

    /// Where the row's elements are, of which every row has `width`.
    fn indices(self, width: usize) -> impl Iterator<Item = usize> {
        (0..width).map(move |at| self.first * width + at * self.lanes + self.lane)
    }
}

/// A weight of `[outputs, inputs]` in one of the forms that can be multiplied with.
#[derive(Debug, Clone)]
pub enum Weight {
    /// f32, f16 or bf16.
    Dense(Tensor<2>),
    /// Small integers with scales.
    Grouped {
        /// `[outputs, words]`
        words: Tensor<2, Int>,
        /// `[outputs, groups]`
        scales: Tensor<2>,
        /// How both are laid out.
        grouping: Grouping,
    },
    /// GGUF blocks.
    Blocks {
        /// `[outputs, bytes of a row]`, 8-bit unsigned integers.
        bytes: Tensor<2, Int>,
        /// What the bytes mean.
        format: BlockFormat,
    },
}

impl Weight {
    /// `x · weightᵀ`, as [`multiply`] has it.
    pub fn multiply(self, x: Tensor<2>) -> Tensor<2> {
        match self {
            Self::Dense(weight) => multiply(x, weight),
            Self::Grouped { words, scales, grouping } => multiply_grouped(x, words, scales, grouping),
            Self::Blocks { bytes, format } => multiply_blocks(x, bytes, format),
        }
    }

    /// The same made ready for products that come again and again, where its device has a use for that.
    pub fn prepare(self) -> Option<PreparedWeight> {
        let device = match &self {
            Self::Dense(weight) => weight.device(),
            Self::Grouped { words, .. } => words.device(),
            Self::Blocks { bytes, .. } => bytes.device(),
        };
        is_flex(&device).then(|| flex::FlexWeight::from(self).into())
    }

    /// Whether gradients of the weight itself may be wanted.
    #[cfg(feature = "autodiff")]
    fn is_recorded(&self) -> bool {
        matches!(self, Self::Dense(weight) if graph::records(&weight.device()))
    }
}

/// The products of the same activations with several weights, each as [`multiply`] has it.
///
/// On the CPU the weights are worked on together: threads meet once, and activations are made ready once. On accelerators
/// a few rows meet weights of one form in one launch.
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

/// The same for weights that are [ready](Weight::prepare), and activations on a device that [takes](accepts_prepared) those.
///
/// # Panics
/// If the activations are on another device.
pub fn multiply_prepared(x: Tensor<2>, weights: &[&PreparedWeight]) -> Vec<Tensor<2>> {
    flex::multiply_prepared(x, weights)
}

/// Whether activations on a device are multiplied with weights that are ready: on the CPU, unless gradients are followed.
pub fn accepts_prepared(device: &Device) -> bool {
    is_flex(device)
}

/// `x · weightᵀ`, from `[rows, inputs]` to `[rows, outputs]` in f32, for a weight of f32, f16 or bf16.
///
/// On the CPU a row's result does not depend on the rows beside it or on the number of threads. On
/// accelerators few rows and many are added up in different orders.
///
/// # Panics
/// On the CPU, if the weight is of another dtype.
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

/// The same for a weight of small integers: `words` is `[outputs, words]`, `scales` is `[outputs, groups]`.
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
    // Accelerators unpack whole chunks with one scale.
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

/// The same for a weight of GGUF blocks: `bytes` is `[outputs, bytes of a row]`, 8-bit unsigned integers.
///
/// # Panics
/// On devices other than the CPU, which have no version of it; see [`multiplies_blocks`].
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

/// The numbers that rows of GGUF blocks stand for: `[rows, inputs]` in f32. For the same devices.
pub fn dequantize_blocks(bytes: Tensor<2, Int>, format: BlockFormat) -> Tensor<2> {
    #[cfg(feature = "autodiff")]
    if graph::records(&bytes.device()) {
        return gradient::dequantize_blocks(bytes, format);
    }
    Tensor::from_dispatch(<DispatchBackend as BlockOps>::dequantize_blocks(bytes.into_dispatch(), format))
}

/// A weight of small integers with one row after the other, which is how accelerators read it.
pub fn in_rows(
    words: Tensor<2, Int>,
    scales: Tensor<2>,
    grouping: Grouping,
) -> (Tensor<2, Int>, Tensor<2>, Grouping) {
    if !grouping.tiled {
        return (words, scales, grouping);
    }
    (reference::in_rows(words), reference::in_rows(scales), Grouping { tiled: false, ..grouping })
}

/// The numbers that rows of a weight of small integers stand for: `[indices, inputs]` in f32.
pub fn gather_grouped(
    words: Tensor<2, Int>,
    scales: Tensor<2>,
    grouping: Grouping,
    indices: Tensor<1, Int>,
) -> Tensor<2> {
    if is_flex(&words.device()) && is_flex(&scales.device()) && scales.dtype() == DType::F16 {
        return gather::rows(words, scales, grouping, indices);
    }
    let (words, scales) = if grouping.tiled {
        let indices: Vec<usize> = indices.into_data().iter::<i64>().map(|index| index as usize).collect();
        (reference::rows_of_tiles(words, &indices), reference::rows_of_tiles(scales, &indices))
    } else {
        (words.select(0, indices.clone()), scales.select(0, indices))
    };
    reference::dequantize(words, scales, Grouping { tiled: false, ..grouping })
}

/// Whether a device computes with GGUF blocks as they are.
pub fn multiplies_blocks(device: &Device) -> bool {
    is_cpu(device)
}

/// Whether a device multiplies with tiles of rows as they are.
pub fn multiplies_tiles(device: &Device) -> bool {
    is_cpu(device)
}

/// Whether the operations of a device are those for Flex, gradients or not.
fn is_cpu(device: &Device) -> bool {
    #[cfg(feature = "autodiff")]
    if graph::records(device) {
        return true;
    }
    is_flex(device)
}

/// The operations of backends that have versions of their own.
#[backend_extension(Flex, Cube: cfg(any(feature = "wgpu", feature = "cuda")))]
pub(crate) trait LinearOps: Backend {
    fn multiply(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self>;

    fn multiply_grouped(
        x: FloatTensor<Self>,
        words: IntTensor<Self>,
        scales: FloatTensor<Self>,
        grouping: Grouping,
    ) -> FloatTensor<Self>;
}

/// The operations on blocks, which only the CPU has.
#[backend_extension(Flex)]
pub(crate) trait BlockOps: Backend {
    fn multiply_blocks(
        x: FloatTensor<Self>,
        bytes: IntTensor<Self>,
        format: BlockFormat,
    ) -> FloatTensor<Self>;

    fn dequantize_blocks(bytes: IntTensor<Self>, format: BlockFormat) -> FloatTensor<Self>;
}
