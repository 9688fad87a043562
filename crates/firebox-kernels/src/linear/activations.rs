//! Rows of activations, as numbers and as integers.

use std::sync::OnceLock;

use super::panel::{CHUNK, IntegerRows, QUADS};
use super::q6k::{ActivationBlock, activation_blocks};
use crate::simd::{Kernel, LANES, Lanes, dispatch};
use crate::thread_pool::parallel_for_each;

/// How exactly activations become integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IntegerWidth {
    /// Off by at most a 65,000th of a chunk's largest, far less than weights of eight bits are by their own width.
    I16,
    /// Off by at most a 254th. Weights of four bits are off by up to a sixteenth: what this adds is a 250th of the
    /// variance of that, and it takes half of the multiplications.
    I8,
}

impl IntegerWidth {
    pub fn for_weight<W: IntegerRows>() -> Self {
        if W::I8_ACTIVATIONS { Self::I8 } else { Self::I16 }
    }

    /// The largest integer an activation becomes: its bytes fit signed ones.
    fn max_value(self) -> f32 {
        match self {
            Self::I16 => 32_512.0,
            Self::I8 => 127.0,
        }
    }
}

/// Elements from which on a second thread is worth waking.
const SINGLE_THREAD_ELEMENTS: usize = 1 << 15;

/// Rows of a [`RowGroup`] that others follow: those that meet two panels at once where there are registers for so many.
const GROUP_ROWS: usize = 6;

/// Rows up to which the last ones, or the only ones, are one [`RowGroup`]: what a tile meets at once.
pub(super) const MAX_GROUP_ROWS: usize = 8;

/// Chunks of a row that a thread rounds at a time.
const PIECE_CHUNKS: usize = 32;

/// `[rows, inputs]`, padded with zeros to whole chunks.
pub(super) struct Activations<'a> {
    pub rows: usize,
    /// Inputs of a row with its padding.
    pub padded: usize,
    pub values: &'a [f32],
}

/// Rows as integers with a scale for every chunk, by row_groups. No integer sum of a chunk can overflow.
pub(super) struct Quantized {
    pub rows: usize,
    /// Of a row.
    pub chunks: usize,
    integers: Vec<QuantizedChunk>,
    /// The same as [long blocks](IntegerRows::ROW_BLOCKS) want it, once one did: there is only one such format.
    row_blocks: OnceLock<Vec<ActivationBlock>>,
}

/// A few rows, chunk by chunk, as they are multiplied: the chunks that meet the same weights lie side by side, because
/// there are too few registers for pointers to every row.
#[derive(Clone, Copy)]
pub(super) struct RowGroup<'a> {
    /// The first row.
    pub first: usize,
    pub rows: usize,
    /// The first chunk of every row, then the second ones.
    pub integers: &'a [QuantizedChunk],
}

/// One chunk of a row.
#[derive(Clone, Copy, Default)]
pub(super) struct QuantizedChunk {
    /// In the form that products take on this processor.
    pub quads: [[u32; 2]; QUADS],
    /// The sums of the first and the second half: what an offset of the weights counts times.
    pub sums: [i32; 2],
    /// No number if an activation is infinite or none.
    pub scale: f32,
}

impl QuantizedChunk {
    /// Of both halves. An activation that is no number makes integers of any size, whose sums may wrap: the scale says
    /// so.
    #[inline(always)]
    pub fn sum(&self) -> i32 {
        self.sums[0].wrapping_add(self.sums[1])
    }

    /// What a weight's zero of so much takes away from a product.
    #[inline(always)]
    pub fn offset(&self, zero: i32) -> u32 {
        self.sum().wrapping_mul(-zero) as u32
    }

    /// The same of half a chunk.
    #[inline(always)]
    pub fn half_offset(&self, zero: i32, half: usize) -> u32 {
        self.sums[half].wrapping_mul(-zero) as u32
    }
}

impl<'a> RowGroup<'a> {
    /// From one chunk on, those of `ROWS` of these rows.
    #[inline(always)]
    pub fn chunks<const ROWS: usize>(
        self,
        row: usize,
        from: usize,
    ) -> impl Iterator<Item = &'a [QuantizedChunk; ROWS]> {
        let chunks = self.integers.get(from * self.rows..).unwrap_or_default();
        chunks.chunks_exact(self.rows).map_while(move |chunk| chunk[row..].first_chunk())
    }
}

/// The row_groups of so many rows, each with its first one.
fn row_groups(rows: usize) -> impl Iterator<Item = (usize, usize)> {
    let whole = rows.saturating_sub(MAX_GROUP_ROWS).div_ceil(GROUP_ROWS);
    let last = rows - whole * GROUP_ROWS;
    (0..whole)
        .map(|few| (few * GROUP_ROWS, GROUP_ROWS))
        .chain((last > 0).then_some((whole * GROUP_ROWS, last)))
}

impl Quantized {
    pub fn row_groups(&self) -> impl Iterator<Item = RowGroup<'_>> {
        row_groups(self.rows).map(|(first, rows)| {
            let integers = &self.integers[first * self.chunks..][..rows * self.chunks];
            RowGroup { first, rows, integers }
        })
    }

    /// Rows for weights in long blocks, the first block of every row first. There is one few of them.
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
    /// As products on these lanes take them.
    pub fn quantize_on<L: Lanes>(&self, width: IntegerWidth) -> Quantized {
        self.quantize_by(width, |pieces| pieces.into_iter().for_each(Kernel::run::<L>))
    }
}

/// Some chunks of a few rows.
struct Piece<'a> {
    /// Of every row, from the first of the chunks on.
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
    // Zero, unless an element is infinite or no number.
    let poison = peak * 0.0;
    let scale = peak / width.max_value();
    // Smaller than this, the inverse of the scale would be infinite; and nothing that small changes a sum.
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
    fn integers_stand_for_their_numbers() {
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
    fn what_is_no_number_spoils_the_scale() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = [1.0; CHUNK];
            values[17] = bad;
            for (width, _) in ROUNDINGS {
                assert!(quantize_chunk::<Portable>(&values, width).scale.is_nan(), "{bad}");
            }
        }
    }
}
