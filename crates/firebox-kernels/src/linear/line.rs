//! Sixteen consecutive chunks of one row, whose integers follow each other in the memory.
//!
//! Memory that is read from one end to the other arrives faster than rows that are read side by side, even where all of
//! it was asked for before. So a single row of activations meets the weights row by row: the lanes of a product are
//! inputs, which are added up within every chunk before scales come into it. Sums of integers are exact in any order.

use super::activations::Integers;
use super::panel::{CHUNK, HALF_QUADS, QUADS, Words};
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

/// The activations of a line: vectors of four integers to a word, as two bytes each.
#[derive(Clone, Copy)]
pub(super) struct LineInput([[Words; 2]; INPUTS]);

impl Line {
    /// The activations of a row as lines of the weight meet them, zero beyond the last.
    pub fn inputs(self, row: &[Integers]) -> Vec<LineInput> {
        let mut inputs = vec![LineInput([[Words::default(); 2]; INPUTS]); row.len().div_ceil(LINE_CHUNKS)];
        for (chunks, input) in row.chunks(LINE_CHUNKS).zip(&mut inputs) {
            for (chunk, integers) in chunks.iter().enumerate() {
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
    pub fn lane(self, chunk: usize) -> usize {
        match self {
            Self::Bytes => 4 * (chunk / 8 * 2 + chunk % 2) + chunk / 2 % 4,
            Self::Nibbles => 4 * (chunk % 4) + chunk / 4,
        }
    }
}

impl LineInput {
    fn set(&mut self, vector: usize, quarter: usize, quads: &[[u32; 2]; HALF_QUADS]) {
        for (part, words) in self.0[vector].iter_mut().enumerate() {
            words.0.as_chunks_mut().0[quarter] = quads.map(|quad| quad[part]);
        }
    }
}

/// The products of a line of signed bytes, made unsigned by adding 128.
#[inline(always)]
pub(super) fn byte_dots<L: Lanes>(row: &[u8], line: usize, x: &LineInput) -> L::Words {
    match row[line * BYTE_LINE..].first_chunk() {
        Some(bytes) => of_bytes::<L>(bytes, x),
        None => of_bytes::<L>(&filled(&row[line * BYTE_LINE..]), x),
    }
}

/// The products of a line of nibbles.
#[inline(always)]
pub(super) fn nibble_dots<L: Lanes>(row: &[u8], line: usize, x: &LineInput) -> L::Words {
    match row[line * NIBBLE_LINE..].first_chunk() {
        Some(bytes) => of_nibbles::<L>(bytes, x),
        None => of_nibbles::<L>(&filled(&row[line * NIBBLE_LINE..]), x),
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
fn of_bytes<L: Lanes>(bytes: &[u8; BYTE_LINE], x: &LineInput) -> L::Words {
    let mut vectors = [L::splat_word(0); INPUTS];
    for ((vector, bytes), [upper, lower]) in vectors.iter_mut().zip(bytes.as_chunks().0).zip(&x.0) {
        let bytes = L::xor(read::<L>(bytes), L::splat_word(0x8080_8080));
        *vector = L::dot(L::dot_words([L::splat_word(0); 2], bytes, [&upper.0, &lower.0]));
    }
    let [a, b, c, d, e, f, g, h] = vectors;
    L::add_quarters(L::sum_quarters([a, b, c, d]), L::sum_quarters([e, f, g, h]))
}

#[inline(always)]
fn of_nibbles<L: Lanes>(bytes: &[u8; NIBBLE_LINE], x: &LineInput) -> L::Words {
    let mask = L::splat_word(0x0F0F_0F0F);
    let mut vectors = [L::splat_word(0); INPUTS / 2];
    for ((vector, bytes), x) in vectors.iter_mut().zip(bytes.as_chunks().0).zip(x.0.as_chunks().0) {
        let [[low_upper, low_lower], [high_upper, high_lower]]: &[[Words; 2]; 2] = x;
        let bytes = read::<L>(bytes);
        let (low, high) = (L::and(bytes, mask), L::and(L::shr::<4>(bytes), mask));
        let sums = L::dot_words([L::splat_word(0); 2], low, [&low_upper.0, &low_lower.0]);
        *vector = L::dot(L::dot_words(sums, high, [&high_upper.0, &high_lower.0]));
    }
    L::sum_quarters(vectors)
}

/// Sixty-four bytes. Asks for those that come as much later.
#[inline(always)]
fn read<L: Lanes>(bytes: &[u8; VECTOR]) -> L::Words {
    L::prefetch(bytes.as_ptr().wrapping_add(BYTES_AHEAD));
    L::load_bytes(bytes)
}
