//! Rows of activations, as numbers and as integers.

use std::sync::OnceLock;

use rayon::prelude::*;

use super::line::{Line, LineInput};
use super::panel::{CHUNK, IntegerRows, QUADS};
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

/// `[rows, inputs]`, padded with zeros to whole chunks.
pub(super) struct Activations<'a> {
    pub rows: usize,
    /// Inputs of a row with its padding.
    pub padded: usize,
    pub values: &'a [f32],
}

/// Rows as integers with a scale for every chunk. No integer sum of a chunk can overflow.
pub(super) struct Quantized {
    pub chunks: usize,
    pub integers: Vec<Integers>,
    pub scales: Vec<f32>,
    /// What [`lines`](Self::lines) has made.
    lines: [OnceLock<Vec<LineInput>>; 2],
}

impl Quantized {
    fn new(chunks: usize, integers: Vec<Integers>, scales: Vec<f32>) -> Self {
        Self { chunks, integers, scales, lines: Default::default() }
    }

    /// The rows as lines of a weight meet them.
    pub fn lines<W: IntegerRows>(&self, line: Line) -> &[LineInput] {
        self.lines[line as usize].get_or_init(|| line.inputs::<W>(self))
    }
}

/// One chunk.
#[derive(Clone, Copy, Default)]
pub(super) struct Integers {
    /// In the form that products take on this processor.
    pub quads: [[u32; 2]; QUADS],
    /// The sums of the first and the second half: what an offset of the weights counts times.
    pub sums: [i32; 2],
}

impl Integers {
    /// Of both halves. An activation that is no number makes integers of any size, whose sums may wrap: the scale says
    /// so.
    #[inline(always)]
    pub fn sum(&self) -> i32 {
        self.sums[0].wrapping_add(self.sums[1])
    }
}

impl Activations<'_> {
    pub fn quantize(&self, rounding: Rounding) -> Quantized {
        let chunks = self.padded / CHUNK;
        let count = self.rows * chunks;
        let mut integers = vec![Integers::default(); count];
        let mut scales = vec![0.0; count];
        let row = chunks.max(1);
        let work = integers
            .par_chunks_mut(row)
            .zip(scales.par_chunks_mut(row))
            .zip(self.values.par_chunks(self.padded.max(1)));
        let one_row = |((integers, scales), values): ((&mut [Integers], &mut [f32]), &[f32])| {
            dispatch(QuantizeRow { values, rounding, integers, scales });
        };
        if self.values.len() < SINGLE_THREAD_ELEMENTS {
            work.with_min_len(usize::MAX).for_each(one_row);
        } else {
            work.for_each(one_row);
        }
        Quantized::new(chunks, integers, scales)
    }
}

#[cfg(test)]
impl Activations<'_> {
    /// As products on these lanes take them.
    pub fn quantize_on<L: Lanes>(&self, rounding: Rounding) -> Quantized {
        let chunks = self.padded / CHUNK;
        let mut integers = vec![Integers::default(); self.rows * chunks];
        let mut scales = vec![0.0; self.rows * chunks];
        let (integers_of, scales_of) = (&mut integers, &mut scales);
        QuantizeRow { values: self.values, rounding, integers: integers_of, scales: scales_of }.run::<L>();
        Quantized::new(chunks, integers, scales)
    }
}

struct QuantizeRow<'a> {
    values: &'a [f32],
    rounding: Rounding,
    integers: &'a mut [Integers],
    scales: &'a mut [f32],
}

impl Kernel for QuantizeRow<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let chunks = self.integers.iter_mut().zip(self.scales);
        for (values, (integers, scale)) in self.values.as_chunks::<CHUNK>().0.iter().zip(chunks) {
            *scale = quantize_chunk::<L>(values, self.rounding, integers);
        }
    }
}

/// Returns the scale. A chunk with an element that is infinite or no number has a scale that is none either.
#[inline(always)]
fn quantize_chunk<L: Lanes>(values: &[f32; CHUNK], rounding: Rounding, chunk: &mut Integers) -> f32 {
    let (halves, _) = values.as_chunks::<LANES>();
    let (first, second) = (L::load(&halves[0]), L::load(&halves[1]));
    let magnitude = magnitude(first).max(magnitude(second)).store();
    let mut peak = 0f32;
    for lane in magnitude {
        peak = if lane > peak { lane } else { peak };
    }
    // Zero, unless an element is infinite or no number.
    let poison = first.mul(L::zero()).add(second.mul(L::zero())).sum();
    let scale = peak / rounding.largest();
    // Smaller than this, the inverse of the scale would be infinite; and nothing that small changes a sum.
    let inverse = L::splat(if scale > 1e-36 { 1.0 / scale } else { 0.0 });
    let (first, second) = (first.mul(inverse).round(), second.mul(inverse).round());
    let mut sums = [0i32; 2];
    for (sum, half) in sums.iter_mut().zip([first, second]) {
        for integer in L::store_words(half) {
            *sum = sum.wrapping_add(integer as i32);
        }
    }
    chunk.sums = sums;
    let (lower, upper) = chunk.quads.split_at_mut(QUADS / 2);
    lower.copy_from_slice(&L::quads(first));
    upper.copy_from_slice(&L::quads(second));
    scale + poison
}

#[inline(always)]
fn magnitude<L: Lanes>(numbers: L) -> L {
    numbers.max(L::zero().sub(numbers))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Portable;

    const ROUNDINGS: [(Rounding, f32); 2] = [(Rounding::Sixteen, 65_000.0), (Rounding::Eight, 253.0)];

    fn quantized(values: &[f32; CHUNK], rounding: Rounding) -> ([f32; CHUNK], f32) {
        let mut chunk = Integers::default();
        let scale = quantize_chunk::<Portable>(values, rounding, &mut chunk);
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
            let mut chunk = Integers::default();
            for (rounding, _) in ROUNDINGS {
                assert!(quantize_chunk::<Portable>(&values, rounding, &mut chunk).is_nan(), "{bad}");
            }
        }
    }
}
