//! Sixteen consecutive chunks of one row, whose integers follow each other in the memory.
//!
//! Memory that is read from one end to the other arrives faster than rows that are read side by side, even where all of
//! it was asked for before. So a few rows of activations meet the weights row by row: the lanes of a product are
//! inputs, which are added up within every chunk before scales come into it. Sums of integers are exact in any order.

use super::activations::Quantized;
use super::panel::{CHUNK, Floats, HALF_QUADS, IntegerRows, QUADS, Words};
use crate::simd::{LANES, Lanes};

/// Chunks of a line: what fills a vector with one product each.
pub(super) const LINE_CHUNKS: usize = LANES;

/// Bytes of a vector.
const VECTOR: usize = 4 * LANES;

/// Vectors of activations that meet a line.
const INPUTS: usize = LINE_CHUNKS * QUADS / LANES;

const BYTE_LINE: usize = LINE_CHUNKS * CHUNK;
const NIBBLE_LINE: usize = BYTE_LINE / 2;

/// Bytes between what is read and what is asked for: about what arrives while the memory answers.
const BYTES_AHEAD: usize = 4096;

/// How the integers of a line are packed.
#[derive(Clone, Copy)]
pub(super) enum Line {
    /// One to a byte.
    Bytes,
    /// Two to a byte: the first half of a chunk is low, the second high.
    Nibbles,
}

/// The activations of a line.
#[derive(Clone, Copy)]
pub(super) struct LineInput {
    /// Vectors of four integers to a word, as two bytes each.
    integers: [[Words; 2]; INPUTS],
    /// What the zero of the weight's bytes takes away from the product of every chunk, in the order of [`Line::lane`].
    offsets: Words,
    /// The scales of the chunks in that order.
    scales: Floats,
}

impl Line {
    /// The activations of rows as lines of the weight meet them, zero beyond the last chunk of a row.
    pub fn inputs<W: IntegerRows>(self, x: &Quantized) -> Vec<LineInput> {
        let chunks = x.chunks.max(1);
        let nothing = LineInput {
            integers: [[Words::default(); 2]; INPUTS],
            offsets: Words::default(),
            scales: Floats::default(),
        };
        let mut inputs = vec![nothing; x.integers.len() / chunks * chunks.div_ceil(LINE_CHUNKS)];
        let rows = x.integers.chunks(chunks).flat_map(|row| row.chunks(LINE_CHUNKS));
        let scales = x.scales.chunks(chunks).flat_map(|row| row.chunks(LINE_CHUNKS));
        for ((chunks, scales), input) in rows.zip(scales).zip(&mut inputs) {
            for (chunk, (integers, scale)) in chunks.iter().zip(scales).enumerate() {
                let lane = self.lane(chunk);
                (input.offsets.0[lane], input.scales.0[lane]) = (integers.offset::<W>(0), *scale);
                let (halves, _) = integers.quads.as_chunks();
                for (half, quads) in halves.iter().enumerate() {
                    let (vector, quarter) = match self {
                        Self::Bytes => (chunk / 2, chunk % 2 * 2 + half),
                        Self::Nibbles => (chunk / 4 * 2 + half, chunk % 4),
                    };
                    input.set(vector, quarter, quads);
                }
            }
        }
        inputs
    }

    /// Where the product of a chunk is.
    #[inline(always)]
    pub fn lane(self, chunk: usize) -> usize {
        match self {
            Self::Bytes => 4 * (chunk / 8 * 2 + chunk % 2) + chunk / 2 % 4,
            Self::Nibbles => 4 * (chunk % 4) + chunk / 4,
        }
    }
}

impl LineInput {
    /// The numbers that integer products of every chunk stand for, before the scales of the weight.
    #[inline(always)]
    pub fn scaled<L: Lanes>(&self, dots: L::Words) -> L {
        L::to_floats(L::add_words(self.offsets.words::<L>(), dots)).mul(self.scales.lanes::<L>())
    }

    fn set(&mut self, vector: usize, quarter: usize, quads: &[[u32; 2]; HALF_QUADS]) {
        for (part, words) in self.integers[vector].iter_mut().enumerate() {
            words.0.as_chunks_mut().0[quarter] = quads.map(|quad| quad[part]);
        }
    }
}

/// The products of a line of signed bytes, made unsigned by adding 128, with some rows of activations.
#[inline(always)]
pub(super) fn byte_dots<L: Lanes, const ROWS: usize>(
    row: &[u8],
    line: usize,
    x: [&LineInput; ROWS],
) -> [L::Words; ROWS] {
    match row[line * BYTE_LINE..].first_chunk() {
        Some(bytes) => of_bytes::<L, ROWS>(bytes, x),
        None => of_bytes::<L, ROWS>(&filled(&row[line * BYTE_LINE..]), x),
    }
}

/// The products of a line of nibbles with some rows of activations.
#[inline(always)]
pub(super) fn nibble_dots<L: Lanes, const ROWS: usize>(
    row: &[u8],
    line: usize,
    x: [&LineInput; ROWS],
) -> [L::Words; ROWS] {
    match row[line * NIBBLE_LINE..].first_chunk() {
        Some(bytes) => of_nibbles::<L, ROWS>(bytes, x),
        None => of_nibbles::<L, ROWS>(&filled(&row[line * NIBBLE_LINE..]), x),
    }
}

/// The last bytes of a row as a line.
#[cold]
fn filled<const BYTES: usize>(rest: &[u8]) -> [u8; BYTES] {
    let mut line = [0; BYTES];
    line[..rest.len()].copy_from_slice(rest);
    line
}

#[inline(always)]
#[allow(clippy::needless_range_loop)] // A vector is of all rows at once.
fn of_bytes<L: Lanes, const ROWS: usize>(bytes: &[u8; BYTE_LINE], x: [&LineInput; ROWS]) -> [L::Words; ROWS] {
    let zero = L::splat_word(0);
    let (mut first, mut second) = ([zero; ROWS], [zero; ROWS]);
    // By halves: the registers have no room for all vectors of several rows.
    for half in 0..2 {
        let mut vectors = [[zero; INPUTS / 2]; ROWS];
        for at in 0..INPUTS / 2 {
            let vector = half * INPUTS / 2 + at;
            let bytes = L::xor(read::<L>(&bytes.as_chunks().0[vector]), L::splat_word(0x8080_8080));
            for i in 0..ROWS {
                let [upper, lower] = &x[i].integers[vector];
                vectors[i][at] =
                    L::dot([L::dot_words(zero, bytes, &upper.0), L::dot_words(zero, bytes, &lower.0)]);
            }
        }
        for i in 0..ROWS {
            let sums = L::sum_quarters(vectors[i]);
            if half == 0 { first[i] = sums } else { second[i] = sums }
        }
    }
    for i in 0..ROWS {
        first[i] = L::add_quarters(first[i], second[i]);
    }
    first
}

#[inline(always)]
#[allow(clippy::needless_range_loop)] // A vector is of all rows at once.
fn of_nibbles<L: Lanes, const ROWS: usize>(
    bytes: &[u8; NIBBLE_LINE],
    x: [&LineInput; ROWS],
) -> [L::Words; ROWS] {
    let (zero, mask) = (L::splat_word(0), L::splat_word(0x0F0F_0F0F));
    let mut vectors = [[zero; INPUTS / 2]; ROWS];
    for vector in 0..INPUTS / 2 {
        let bytes = read::<L>(&bytes.as_chunks().0[vector]);
        let (low, high) = (L::and(bytes, mask), L::and(L::shr::<4>(bytes), mask));
        for i in 0..ROWS {
            // What nibbles meet is small: the upper bytes are zero.
            let [[_, low_x], [_, high_x]] = [&x[i].integers[2 * vector], &x[i].integers[2 * vector + 1]];
            vectors[i][vector] = L::dot_words(L::dot_words(zero, low, &low_x.0), high, &high_x.0);
        }
    }
    let mut dots = [zero; ROWS];
    for i in 0..ROWS {
        dots[i] = L::sum_quarters(vectors[i]);
    }
    dots
}

/// Sixty-four bytes. Asks for those that come as much later.
#[inline(always)]
fn read<L: Lanes>(bytes: &[u8; VECTOR]) -> L::Words {
    L::prefetch(bytes.as_ptr().wrapping_add(BYTES_AHEAD));
    L::load_bytes(bytes)
}
