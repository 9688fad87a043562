//! Rows of activations, as numbers and as integers.

use std::sync::OnceLock;

use super::long_blocks::{Spread, spread};
use super::panel::{CHUNK, IntegerRows, QUADS};
use crate::crew::share;
use crate::simd::{Kernel, LANES, Lanes, dispatch};

/// How exactly activations become integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rounding {
    /// Off by at most a 65,000th of a chunk's largest, far less than weights of eight bits are by their own rounding.
    Sixteen,
    /// Off by at most a 254th. Weights of four bits are off by up to a sixteenth: what this adds is a 250th of the
    /// variance of that, and it takes half of the multiplications.
    Eight,
}

impl Rounding {
    pub fn of<W: IntegerRows>() -> Self {
        if W::COARSE { Self::Eight } else { Self::Sixteen }
    }

    /// The largest integer an activation becomes: its bytes fit signed ones.
    fn largest(self) -> f32 {
        match self {
            Self::Sixteen => 32_512.0,
            Self::Eight => 127.0,
        }
    }
}

/// Elements from which on a second thread is worth waking.
const SINGLE_THREAD_ELEMENTS: usize = 1 << 15;

/// Rows of a [`Few`] that others follow: those that meet two panels at once where there are registers for so many.
const FEW: usize = 6;

/// Rows up to which the last ones, or the only ones, are one [`Few`]: what a tile meets at once.
pub(super) const LAST_FEW: usize = 8;

/// Chunks of a row that a thread rounds at a time.
const PIECE_CHUNKS: usize = 32;

/// `[rows, inputs]`, padded with zeros to whole chunks.
pub(super) struct Activations<'a> {
    pub rows: usize,
    /// Inputs of a row with its padding.
    pub padded: usize,
    pub values: &'a [f32],
}

/// Rows as integers with a scale for every chunk, by fews. No integer sum of a chunk can overflow.
pub(super) struct Quantized {
    pub rows: usize,
    /// Of a row.
    pub chunks: usize,
    integers: Vec<Integers>,
    /// The same as [long blocks](IntegerRows::LONG) want it, once one did: there is only one such format.
    spread: OnceLock<Vec<Spread>>,
}

/// A few rows, chunk by chunk, as they are multiplied: the chunks that meet the same weights lie side by side, because
/// there are too few registers for pointers to every row.
#[derive(Clone, Copy)]
pub(super) struct Few<'a> {
    /// The first row.
    pub first: usize,
    pub rows: usize,
    /// The first chunk of every row, then the second ones.
    pub integers: &'a [Integers],
}

/// One chunk of a row.
#[derive(Clone, Copy, Default)]
pub(super) struct Integers {
    /// In the form that products take on this processor.
    pub quads: [[u32; 2]; QUADS],
    /// The sums of the first and the second half: what an offset of the weights counts times.
    pub sums: [i32; 2],
    /// No number if an activation is infinite or none.
    pub scale: f32,
}

impl Integers {
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

impl<'a> Few<'a> {
    /// From one chunk on, those of `ROWS` of these rows.
    #[inline(always)]
    pub fn chunks<const ROWS: usize>(
        self,
        row: usize,
        from: usize,
    ) -> impl Iterator<Item = &'a [Integers; ROWS]> {
        let chunks = self.integers.get(from * self.rows..).unwrap_or_default();
        chunks.chunks_exact(self.rows).map_while(move |chunk| chunk[row..].first_chunk())
    }
}

/// The fews of so many rows, each with its first one.
fn fews(rows: usize) -> impl Iterator<Item = (usize, usize)> {
    let whole = rows.saturating_sub(LAST_FEW).div_ceil(FEW);
    let last = rows - whole * FEW;
    (0..whole).map(|few| (few * FEW, FEW)).chain((last > 0).then_some((whole * FEW, last)))
}

impl Quantized {
    pub fn fews(&self) -> impl Iterator<Item = Few<'_>> {
        fews(self.rows).map(|(first, rows)| {
            let integers = &self.integers[first * self.chunks..][..rows * self.chunks];
            Few { first, rows, integers }
        })
    }

    /// Rows for weights in long blocks, the first block of every row first. There is one few of them.
    pub fn spread<L: Lanes, W: IntegerRows>(&self) -> &[Spread] {
        self.spread.get_or_init(|| self.fews().next().map(spread::<L, W>).unwrap_or_default())
    }
}

impl Activations<'_> {
    pub fn quantize(&self, rounding: Rounding) -> Quantized {
        self.quantize_by(rounding, |pieces| {
            if self.values.len() < SINGLE_THREAD_ELEMENTS {
                pieces.into_iter().for_each(dispatch);
            } else {
                share(pieces, dispatch);
            }
        })
    }

    fn quantize_by(&self, rounding: Rounding, work: impl FnOnce(Vec<Piece<'_>>)) -> Quantized {
        let chunks = self.padded / CHUNK;
        let mut integers = vec![Integers::default(); self.rows * chunks];
        let mut pieces = Vec::new();
        let mut rest = &mut integers[..];
        for (first, rows) in fews(self.rows) {
            let (few, others) = rest.split_at_mut(rows * chunks);
            rest = others;
            for (at, integers) in few.chunks_mut(PIECE_CHUNKS * rows).enumerate() {
                let from = at * PIECE_CHUNKS * CHUNK;
                let values =
                    (first..first + rows).map(|row| &self.values[row * self.padded + from..]).collect();
                pieces.push(Piece { values, rounding, integers });
            }
        }
        work(pieces);
        Quantized { rows: self.rows, chunks, integers, spread: OnceLock::new() }
    }
}

#[cfg(test)]
impl Activations<'_> {
    /// As products on these lanes take them.
    pub fn quantize_on<L: Lanes>(&self, rounding: Rounding) -> Quantized {
        self.quantize_by(rounding, |pieces| pieces.into_iter().for_each(Kernel::run::<L>))
    }
}

/// Some chunks of a few rows.
struct Piece<'a> {
    /// Of every row, from the first of the chunks on.
    values: Vec<&'a [f32]>,
    rounding: Rounding,
    integers: &'a mut [Integers],
}

impl Kernel for Piece<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let rows = self.values.len();
        for (row, values) in self.values.iter().enumerate() {
            let integers = self.integers[row..].iter_mut().step_by(rows);
            for (values, integers) in values.as_chunks().0.iter().zip(integers) {
                *integers = quantize_chunk::<L>(values, self.rounding);
            }
        }
    }
}

#[inline(always)]
fn quantize_chunk<L: Lanes>(values: &[f32; CHUNK], rounding: Rounding) -> Integers {
    let (halves, _) = values.as_chunks::<LANES>();
    let (first, second) = (L::load(&halves[0]), L::load(&halves[1]));
    let peak = L::peak(first, second);
    // Zero, unless an element is infinite or no number.
    let poison = peak * 0.0;
    let scale = peak / rounding.largest();
    // Smaller than this, the inverse of the scale would be infinite; and nothing that small changes a sum.
    let inverse = L::splat(if scale > 1e-36 { 1.0 / scale } else { 0.0 });
    let (first, second) = (first.mul(inverse).round(), second.mul(inverse).round());
    let sums = L::word_sums(first, second);
    let mut chunk = Integers { scale: scale + poison, sums, ..Integers::default() };
    let (lower, upper) = chunk.quads.split_at_mut(QUADS / 2);
    lower.copy_from_slice(&L::quads(first));
    upper.copy_from_slice(&L::quads(second));
    chunk
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Portable;

    const ROUNDINGS: [(Rounding, f32); 2] = [(Rounding::Sixteen, 65_000.0), (Rounding::Eight, 253.0)];

    fn quantized(values: &[f32; CHUNK], rounding: Rounding) -> ([f32; CHUNK], f32) {
        let chunk = quantize_chunk::<Portable>(values, rounding);
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
        for (rounding, parts) in ROUNDINGS {
            let (found, sum) = quantized(&values, rounding);
            for (found, value) in found.iter().zip(values) {
                assert!((found - value).abs() <= largest / parts, "{found} instead of {value}");
            }
            assert!((sum - values.iter().sum::<f32>()).abs() < 32.0 * largest / parts);
        }
    }

    #[test]
    fn extremes_do_not_overflow() {
        for value in [3e38, -3e38, 1e-30, 3e-39, -0.0] {
            for (rounding, _) in ROUNDINGS {
                let (found, _) = quantized(&[value; CHUNK], rounding);
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
            for (rounding, _) in ROUNDINGS {
                assert!(quantize_chunk::<Portable>(&values, rounding).scale.is_nan(), "{bad}");
            }
        }
    }
}
