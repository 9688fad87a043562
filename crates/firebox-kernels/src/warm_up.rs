//! Compiling kernels before they are needed.

use burn::tensor::{DType, Device, Int, Tensor};

use crate::attend::{Attending, Span, Stored, attend};
use crate::linear::{Grouping, NIBBLE_CHUNK, multiply, multiply_grouped};
use crate::{flex, norm, rope};

/// The formats that a model's operations will meet.
#[derive(Debug, Clone, PartialEq)]
pub struct Formats {
    /// Dtypes of weights that are plain numbers.
    pub plain: Vec<DType>,
    /// Layouts of packed weights; any one for those that share a group and a number of bits.
    pub grouped: Vec<Grouping>,
    /// Widths of heads with their caches' dtype.
    pub heads: Vec<(usize, DType)>,
    /// Whether scores of attention are capped.
    pub capped: bool,
    /// Whether rotated pairs are neighbours.
    pub interleaved: bool,
}

/// Launches the kernels that a model of these formats needs on tensors of nothing, so that their compilation can run
/// beside the reading of weights instead of before the first token. Does nothing on devices without a compiler.
///
/// Kernels of Burn's own operations are not among them, nor those for shapes whose rows are no multiple of four, for several
/// weights or spans at once, and for gates, convolutions and what is kept.
pub fn warm_up(device: &Device, formats: &Formats) {
    if !flex::has_own(device) || flex::is_flex(device) {
        return;
    }
    let rows = [1, 32];
    let zeros = |shape: [usize; 2], dtype| Tensor::<2>::zeros(shape, (device, dtype));
    for rows in rows {
        for &dtype in &formats.plain {
            multiply(zeros([rows, 4], DType::F32), zeros([1, 4], dtype));
        }
        for &grouping in &formats.grouped {
            let inputs = grouping.group.next_multiple_of(NIBBLE_CHUNK);
            let grouping = Grouping { inputs, tiled: false, ..grouping };
            let words = Tensor::<2, Int>::zeros([1, grouping.row_words()], (device, DType::I32));
            let scales = if device.supports_dtype(DType::F16) { DType::F16 } else { DType::F32 };
            let scales = zeros([1, grouping.groups()], scales);
            multiply_grouped(zeros([rows, inputs], DType::F32), words, scales, grouping);
        }
    }
    let weight = || Tensor::<1>::zeros([4], (device, DType::F32));
    let row = || zeros([1, 4], DType::F32);
    norm::rms_norm(row(), weight(), 1.0, 0.0);
    norm::add_rms_norm(row(), row(), weight(), 1.0, 0.0);
    for &(head_dim, dtype) in &formats.heads {
        let head = |dtype| Tensor::<3>::zeros([1, 1, head_dim], (device, dtype));
        let angles = || Tensor::<3>::zeros([1, 1, head_dim / 2], (device, DType::F32));
        let query = rope::rotate(head(DType::F32), angles(), angles(), formats.interleaved);
        let stored = || Stored::Float(head(dtype));
        let span = Span { keys: stored(), values: stored(), position: 0, visible: None };
        let attending =
            Attending { position: 0, window: None, scale: 1.0, softcap: formats.capped.then_some(1.0) };
        attend(query, &[span], None, attending);
    }
}
