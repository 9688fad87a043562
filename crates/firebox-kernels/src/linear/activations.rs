//! Activations as floats and as integers.

use std::sync::OnceLock;

use super::activation_block::{ActivationBlock, activation_blocks};
use super::arithmetic::Arithmetic;
use super::panel::{CHUNK, IntegerRows, QUADS};
use super::row_group::{QuantizedChunk, RowGroup, row_groups};
use crate::simd::{Kernel, LANES, Lanes, dispatch};
use crate::thread_pool::parallel_for_each;

/// Width of the integers that activations are rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IntegerWidth {
    /// Error of at most 1/65,000 of the largest activation of a chunk, far below that of 8-bit weights.
    I16,
    /// Error of at most 1/254 of the largest activation of a chunk. 4-bit weights have errors of up to 1/16:
    /// this adds 1/250 to their variance and halves the multiplications.
    I8,
}

impl IntegerWidth {
    pub fn for_weight<W: IntegerRows>() -> Self {
        if W::Arithmetic::I8_ACTIVATIONS { Self::I8 } else { Self::I16 }
    }

    /// Largest integer of an activation; each of its bytes fits a signed byte.
    fn max_value(self) -> f32 {
        match self {
            Self::I16 => 32_512.0,
            Self::I8 => 127.0,
        }
    }
}

/// Elements from which a second thread is worth waking.
const SINGLE_THREAD_ELEMENTS: usize = 1 << 15;

/// Chunks of a row that a thread rounds at a time.
const PIECE_CHUNKS: usize = 32;

/// Activations `[rows, inputs]`, padded with zeros to whole chunks.
pub(super) struct Activations<'a> {
    pub rows: usize,
    /// Length of a row with its padding.
    pub padded: usize,
    pub values: &'a [f32],
}

/// Activations rounded to integers with one scale per chunk, in groups of rows. Integer sums of a chunk
/// cannot overflow.
pub(super) struct Quantized {
    pub rows: usize,
    /// Chunks of a row.
    pub chunks: usize,
    integers: Vec<QuantizedChunk>,
    /// The layout for weights in [row blocks](Arithmetic::ROW_BLOCKS), computed on first use. Only one
    /// format has it.
    row_blocks: OnceLock<Vec<ActivationBlock>>,
}

impl Quantized {
    pub fn row_groups(&self) -> impl Iterator<Item = RowGroup<'_>> {
        row_groups(self.rows).map(|(first, rows)| {
            let integers = &self.integers[first * self.chunks..][..rows * self.chunks];
            RowGroup { first, rows, integers }
        })
    }

    /// Returns the layout for weights in row blocks: the first block of every row, then the second ones.
    /// Needs a single row group.
    pub fn row_blocks<L: Lanes, W: IntegerRows>(&self) -> &[ActivationBlock] {
        self.row_blocks
            .get_or_init(|| self.row_groups().next().map(activation_blocks::<L, W>).unwrap_or_default())
    }
}

impl Activations<'_> {
    pub fn quantize(&self, width: IntegerWidth) -> Quantized {
        self.quantize_by(width, |pieces| {
            if self.values.len() < SINGLE_THREAD_ELEMENTS {
                pieces.into_iter().for_each(dispatch);
            } else {
                parallel_for_each(pieces, dispatch);
            }
        })
    }

    fn quantize_by(&self, width: IntegerWidth, work: impl FnOnce(Vec<Piece<'_>>)) -> Quantized {
        let chunks = self.padded / CHUNK;
        let mut integers = vec![QuantizedChunk::default(); self.rows * chunks];
        let mut pieces = Vec::new();
        let mut rest = &mut integers[..];
        for (first, rows) in row_groups(self.rows) {
            let (few, others) = rest.split_at_mut(rows * chunks);
            rest = others;
            for (at, integers) in few.chunks_mut(PIECE_CHUNKS * rows).enumerate() {
                let from = at * PIECE_CHUNKS * CHUNK;
                let values =
                    (first..first + rows).map(|row| &self.values[row * self.padded + from..]).collect();
                pieces.push(Piece { values, width, integers });
            }
        }
        work(pieces);
        Quantized { rows: self.rows, chunks, integers, row_blocks: OnceLock::new() }
    }
}

#[cfg(test)]
impl Activations<'_> {
    /// Quantizes on the given lanes.
    pub fn quantize_on<L: Lanes>(&self, width: IntegerWidth) -> Quantized {
        self.quantize_by(width, |pieces| pieces.into_iter().for_each(L::call))
    }
}

/// Some chunks of a row group.
struct Piece<'a> {
    /// The values of every row, from the first chunk on.
    values: Vec<&'a [f32]>,
    width: IntegerWidth,
    integers: &'a mut [QuantizedChunk],
}

impl Kernel for Piece<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let rows = self.values.len();
        for (row, values) in self.values.iter().enumerate() {
            let integers = self.integers[row..].iter_mut().step_by(rows);
            for (values, integers) in values.as_chunks().0.iter().zip(integers) {
                *integers = quantize_chunk::<L>(values, self.width);
            }
        }
    }
}

#[inline(always)]
fn quantize_chunk<L: Lanes>(values: &[f32; CHUNK], width: IntegerWidth) -> QuantizedChunk {
    let (halves, _) = values.as_chunks::<LANES>();
    let (first, second) = (L::load(&halves[0]), L::load(&halves[1]));
    let peak = L::max_magnitude(first, second);
    // Zero, or NaN if an element is infinite or NaN.
    let poison = peak * 0.0;
    let scale = peak / width.max_value();
    // For smaller scales the inverse would be infinite; values that small do not change a sum.
    let inverse = L::splat(if scale > 1e-36 { 1.0 / scale } else { 0.0 });
    let (first, second) = (first.mul(inverse).round(), second.mul(inverse).round());
    let sums = L::word_sums(first, second);
    let mut chunk = QuantizedChunk { scale: scale + poison, sums, ..QuantizedChunk::default() };
    let (lower, upper) = chunk.quads.split_at_mut(QUADS / 2);
    lower.copy_from_slice(&L::quads(first));
    upper.copy_from_slice(&L::quads(second));
    chunk
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Portable;

    const ROUNDINGS: [(IntegerWidth, f32); 2] = [(IntegerWidth::I16, 65_000.0), (IntegerWidth::I8, 253.0)];

    fn quantized(values: &[f32; CHUNK], width: IntegerWidth) -> ([f32; CHUNK], f32) {
        let chunk = quantize_chunk::<Portable>(values, width);
        let scale = chunk.scale;
        let mut found = [0.0; CHUNK];
        for (quad, [even, odd]) in chunk.quads.iter().enumerate() {
            for (at, integer) in
                [*even as i16, *odd as i16, (even >> 16) as i16, (odd >> 16) as i16].iter().enumerate()
            {
                found[4 * quad + at] = f32::from(*integer) * scale;
            }
        }
        (found, (chunk.sums[0] + chunk.sums[1]) as f32 * scale)
    }

    #[test]
    fn quantization_errors_are_bounded() {
        let values: [f32; CHUNK] = std::array::from_fn(|i| (i as f32 * 1.7).sin() * 3.0 - 0.5);
        let largest = values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        for (width, parts) in ROUNDINGS {
            let (found, sum) = quantized(&values, width);
            for (found, value) in found.iter().zip(values) {
                assert!((found - value).abs() <= largest / parts, "{found} instead of {value}");
            }
            assert!((sum - values.iter().sum::<f32>()).abs() < 32.0 * largest / parts);
        }
    }

    #[test]
    fn extremes_do_not_overflow() {
        for value in [3e38, -3e38, 1e-30, 3e-39, -0.0] {
            for (width, _) in ROUNDINGS {
                let (found, _) = quantized(&[value; CHUNK], width);
                for found in found {
                    assert!(
                        (found - value).abs() <= value.abs() * 1e-4 + 1e-35,
                        "{found} instead of {value}"
                    );
                }
            }
        }
    }

    #[test]
    fn nan_and_infinity_make_the_scale_nan() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = [1.0; CHUNK];
            values[17] = bad;
            for (width, _) in ROUNDINGS {
                assert!(quantize_chunk::<Portable>(&values, width).scale.is_nan(), "{bad}");
            }
        }
    }
}
