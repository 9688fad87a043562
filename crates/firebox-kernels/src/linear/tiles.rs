//! Weights of signed bytes or nibbles with an f16 scale for every group of inputs, whose tiles of sixteen
//! rows have the layout of a panel in memory and are multiplied as they are read.
//!
//! The sums have the bits of the panels' sums.

use std::borrow::Cow;
use std::marker::PhantomData;

use super::activations::{IntegerWidth, Quantized};
use super::arithmetic::{Arithmetic, Narrow, Wide};
use super::gemm::IntegerProduct;
use super::grouping::{Grouping, TILE_ROWS};
use super::multiplicand::{Input, Multiplicand, Part};
use super::panel::{
    BLOCK_CHUNKS, CHUNK, HALF_QUADS, IntegerRows, OUTPUTS, PREFETCH_DISTANCE, QUADS, UnpackTarget,
};
use super::place::Place;
use super::row_group::{MAX_GROUP_ROWS, QuantizedChunk, RowGroup};
#[cfg(feature = "autodiff")]
use super::unpack::{Unpack, UnpackIntegers};
use crate::simd::{Kernel, LANES, Lanes, dispatch};

const _: () = assert!(TILE_ROWS == OUTPUTS && OUTPUTS == LANES);

/// Width of the integers.
pub(super) trait BitWidth: Sync {
    type Arithmetic: Arithmetic;

    /// The byte that stands for zero.
    const ZERO: i32;
    /// Words of a row in a chunk.
    const WORDS: usize;

    /// Returns the unsigned bytes of the chunk at the start of `words`.
    fn quads<L: Lanes>(words: &[[u32; LANES]]) -> [L::Words; QUADS];
}

/// Signed bytes.
pub(super) struct EightBit;

impl BitWidth for EightBit {
    type Arithmetic = Wide;

    const ZERO: i32 = 128;
    const WORDS: usize = QUADS;

    #[inline(always)]
    fn quads<L: Lanes>(words: &[[u32; LANES]]) -> [L::Words; QUADS] {
        let (mut quads, turn) = ([L::splat_word(0); QUADS], L::splat_word(0x8080_8080));
        // Never taken, here and below: rows are whole chunks.
        let Some(words) = words.first_chunk::<QUADS>() else { return quads };
        for k in 0..QUADS {
            quads[k] = L::xor(L::load_words(&words[k]), turn);
        }
        quads
    }
}

/// Nibbles offset by eight: the first half of a chunk is low, the second high.
pub(super) struct FourBit;

impl BitWidth for FourBit {
    type Arithmetic = Narrow;

    const ZERO: i32 = 8;
    const WORDS: usize = HALF_QUADS;

    #[inline(always)]
    fn quads<L: Lanes>(words: &[[u32; LANES]]) -> [L::Words; QUADS] {
        let (mut quads, mask) = ([L::splat_word(0); QUADS], L::splat_word(0x0F0F_0F0F));
        let Some(words) = words.first_chunk::<HALF_QUADS>() else { return quads };
        for k in 0..HALF_QUADS {
            let bytes = L::load_words(&words[k]);
            quads[k] = L::and(bytes, mask);
            quads[k + HALF_QUADS] = L::and(L::shr::<4>(bytes), mask);
        }
        quads
    }
}

/// Tiles of sixteen rows of packed integers: the first words of all sixteen rows, then the second ones.
pub(super) struct Tiles<'a, B> {
    words: Cow<'a, [u32]>,
    /// Scales by group, in the same order.
    scales: Cow<'a, [u16]>,
    /// Rows in whole tiles.
    whole: usize,
    /// The last tile, padded with zeros to sixteen rows.
    last: (Vec<u32>, Vec<u16>),
    /// Words of a row, in whole chunks.
    row_words: usize,
    groups: usize,
    grouping: Grouping,
    bits: PhantomData<B>,
}

/// Sixteen rows.
#[derive(Clone, Copy)]
struct Tile<'a> {
    /// By words of a row.
    words: &'a [[u32; LANES]],
    /// By groups.
    scales: &'a [[u16; LANES]],
    chunks_per_group: usize,
}

impl<'a, B: BitWidth> Tiles<'a, B> {
    /// Takes `rows` rows with an equal share of words and scales, in tiles or contiguous. Contiguous rows,
    /// and rows that end within a chunk, are copied.
    ///
    /// # Panics
    /// If there are too few words or scales.
    pub fn new(words: &'a [u32], scales: &'a [u16], mut rows: usize, grouping: Grouping) -> Self {
        let (mut row_words, groups) = (words.len() / rows.max(1), scales.len() / rows.max(1));
        assert!(words.len() == rows * row_words && scales.len() == rows * groups, "rows of another length");
        assert!(rows == 0 || row_words >= grouping.row_words(), "rows of {row_words} words for {grouping:?}");
        assert!(rows == 0 || groups == grouping.groups(), "{groups} scales of a row for {grouping:?}");
        let (mut words, mut scales) = (Cow::Borrowed(words), Cow::Borrowed(scales));
        if !grouping.tiled {
            (words, scales) =
                (transpose_rows(&words, row_words).into(), transpose_rows(&scales, groups).into());
            rows = rows.next_multiple_of(TILE_ROWS);
        }
        if !row_words.is_multiple_of(B::WORDS) {
            let padded_words = row_words.next_multiple_of(B::WORDS);
            words = pad_rows(&words, row_words, padded_words).into();
            row_words = padded_words;
        }
        let whole = rows - rows % TILE_ROWS;
        let last =
            (pad_tile(&words[whole * row_words..], row_words), pad_tile(&scales[whole * groups..], groups));
        Self { words, scales, whole, last, row_words, groups, grouping, bits: PhantomData }
    }

    /// Returns the tile that starts at `row`, a multiple of sixteen.
    #[inline(always)]
    fn tile(&self, row: usize) -> Tile<'_> {
        let (words, scales) = if row < self.whole {
            (
                &self.words[row * self.row_words..][..TILE_ROWS * self.row_words],
                &self.scales[row * self.groups..][..TILE_ROWS * self.groups],
            )
        } else {
            (&*self.last.0, &*self.last.1)
        };
        Tile {
            words: words.as_chunks().0,
            scales: scales.as_chunks().0,
            chunks_per_group: self.grouping.group / CHUNK,
        }
    }
}

/// Pads the rows of tiles with zeros.
fn pad_rows(tiles: &[u32], width: usize, wanted: usize) -> Vec<u32> {
    let mut pad_rows = Vec::with_capacity(tiles.len() / width * wanted);
    for tile in tiles.chunks(TILE_ROWS * width) {
        pad_rows.extend_from_slice(tile);
        pad_rows.resize(pad_rows.len() + tile.len() / width * (wanted - width), 0);
    }
    pad_rows
}

/// Pads a tile to sixteen rows with zeros.
fn pad_tile<T: Copy + Default>(tile: &[T], width: usize) -> Vec<T> {
    let mut pad_tile = vec![T::default(); if tile.is_empty() { 0 } else { TILE_ROWS * width }];
    let rows = tile.len() / width.max(1);
    for (to, from) in pad_tile.chunks_exact_mut(TILE_ROWS).zip(tile.chunks_exact(rows.max(1))) {
        to[..rows].copy_from_slice(from);
    }
    pad_tile
}

/// Converts contiguous rows to tiles, padded with zeros.
fn transpose_rows<T: Copy + Default>(rows: &[T], width: usize) -> Vec<T> {
    let width = width.max(1);
    let mut tiles = vec![T::default(); (rows.len() / width).next_multiple_of(TILE_ROWS) * width];
    let tiles_of_rows = tiles.chunks_exact_mut(TILE_ROWS * width).zip(rows.chunks(TILE_ROWS * width));
    for (tile, rows) in tiles_of_rows {
        for (lane, row) in rows.chunks_exact(width).enumerate() {
            for (to, from) in tile[lane..].iter_mut().step_by(TILE_ROWS).zip(row) {
                *to = *from;
            }
        }
    }
    tiles
}

/// Returns the unsigned bytes of the chunk at the start of `words`, and prefetches later words.
#[inline(always)]
fn read_chunk<L: Lanes, B: BitWidth>(words: &[[u32; LANES]]) -> [L::Words; QUADS] {
    let ahead = words.as_ptr().cast::<u8>().wrapping_add(PREFETCH_DISTANCE);
    for k in 0..B::WORDS {
        L::prefetch(ahead.wrapping_add(k * size_of::<[u32; LANES]>()));
    }
    B::quads::<L>(words)
}

impl<B: BitWidth> IntegerRows for Tiles<'_, B> {
    type Arithmetic = B::Arithmetic;

    const ZERO: i32 = B::ZERO;

    fn inputs(&self) -> usize {
        self.grouping.inputs
    }

    #[inline(always)]
    fn unpack<L: Lanes, U: UnpackTarget<L>>(&self, row: usize, block: usize, unpacked: &mut U) {
        let tile = self.tile(row);
        let first = block * BLOCK_CHUNKS;
        for chunk in 0..BLOCK_CHUNKS.min(self.inputs().div_ceil(CHUNK) - first) {
            let [a, b, c, d, e, f, g, h] = read_chunk::<L, B>(&tile.words[(first + chunk) * B::WORDS..]);
            unpacked.bytes(chunk, 0, [a, b, c, d]);
            unpacked.bytes(chunk, 1, [e, f, g, h]);
            unpacked.scale(chunk, 0, L::from_f16(&tile.scales[(first + chunk) / tile.chunks_per_group]));
        }
    }
}

impl<B: BitWidth> Multiplicand for Tiles<'_, B> {
    fn integer_width(&self) -> Option<IntegerWidth> {
        Some(IntegerWidth::for_weight::<Self>())
    }

    fn padded_rows(&self, outputs: usize) -> usize {
        outputs.next_multiple_of(TILE_ROWS)
    }

    fn multiply(&self, x: &Input<'_>, part: Part<'_>) {
        let Some(x) = (if B::Arithmetic::I8_ACTIVATIONS { &x.as_i8 } else { &x.as_i16 }) else { return };
        // With more rows, filling a panel in the L1 cache pays off.
        if x.rows <= MAX_GROUP_ROWS {
            dispatch(TileProduct { x, weight: self, part });
        } else {
            dispatch(IntegerProduct { x, weight: self, part });
        }
    }

    #[cfg(feature = "autodiff")]
    fn unpack(&self, place: Place, inputs: usize, values: &mut [f32]) {
        dispatch(UnpackIntegers(Unpack { weight: self, place, inputs, values }));
    }
}

/// Products of a few rows with tiles.
struct TileProduct<'a, W> {
    x: &'a Quantized,
    weight: &'a W,
    part: Part<'a>,
}

impl<B: BitWidth> Kernel for TileProduct<'_, Tiles<'_, B>> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { x, weight, part: Part { first, weight_rows, mut results } } = self;
        let Some(x) = x.row_groups().next() else { return };
        for at in (0..results[0].len()).step_by(OUTPUTS) {
            let place = Place::new(first, at, weight_rows);
            let tile = weight.tile(place.row);
            let mut row = 0;
            while let Some(rest @ 1..) = x.rows.checked_sub(row) {
                let some = &mut results[row..];
                row += match rest {
                    5 if L::TILE_ROWS >= 6 => tile.multiply::<L, B, 5>(x, row, place, some),
                    6 if L::TILE_ROWS >= 6 => tile.multiply::<L, B, 6>(x, row, place, some),
                    7 if L::TILE_ROWS >= 6 => tile.multiply::<L, B, 7>(x, row, place, some),
                    8.. if L::TILE_ROWS >= 6 => tile.multiply::<L, B, 8>(x, row, place, some),
                    1 => tile.multiply::<L, B, 1>(x, row, place, some),
                    2 => tile.multiply::<L, B, 2>(x, row, place, some),
                    3 | 5 | 6 => tile.multiply::<L, B, 3>(x, row, place, some),
                    _ => tile.multiply::<L, B, 4>(x, row, place, some),
                };
            }
        }
    }
}

impl Tile<'_> {
    /// Adds the products of `ROWS` rows of activations from `row` on to their results. Returns `ROWS`.
    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // A chunk is of all rows at once.
    fn multiply<L: Lanes, B: BitWidth, const ROWS: usize>(
        &self,
        x: RowGroup<'_>,
        row: usize,
        place: Place,
        results: &mut [&mut [f32]],
    ) -> usize {
        let zero = L::splat_word(0);
        let mut totals = [L::zero(); ROWS];
        let (mut scales, mut scale, mut chunks_of_group) = (self.scales.iter(), L::zero(), 0);
        for (block, words) in self.words.chunks(BLOCK_CHUNKS * B::WORDS).enumerate() {
            let mut sums = [L::zero(); ROWS];
            let chunks = x.chunks::<ROWS>(row, block * BLOCK_CHUNKS).zip(words.chunks_exact(B::WORDS));
            for (x, words) in chunks {
                if chunks_of_group == 0 {
                    // Every group has a scale.
                    scale = scales.next().map_or(L::zero(), L::from_f16);
                    chunks_of_group = self.chunks_per_group;
                }
                chunks_of_group -= 1;
                let quads = read_chunk::<L, B>(words);
                for i in 0..ROWS {
                    let QuantizedChunk { quads: integers, scale: x_scale, .. } = &x[i];
                    // Separate sums for the halves shorten the chains of additions.
                    let (mut first, mut second) = ([zero, L::splat_word(x[i].offset(B::ZERO))], [zero; 2]);
                    for k in 0..HALF_QUADS {
                        first = L::dot_quads(first, quads[k], &integers[k], B::Arithmetic::I8_ACTIVATIONS);
                        let k = k + HALF_QUADS;
                        second = L::dot_quads(second, quads[k], &integers[k], B::Arithmetic::I8_ACTIVATIONS);
                    }
                    let dot = L::add_words(L::dot(first), L::dot(second));
                    sums[i] = sums[i].mul_add(L::to_floats(dot).mul(L::splat(*x_scale)), scale);
                }
            }
            for i in 0..ROWS {
                totals[i] = totals[i].add(sums[i]);
            }
        }
        for i in 0..ROWS {
            place.add(results[i], totals[i]);
        }
        ROWS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linear::activations::Activations;
    use crate::simd::on_each_instruction_set;

    /// Two blocks and a part of a chunk.
    const INPUTS: usize = 2 * 256 + 12;
    /// Two tiles and nine rows.
    const ROWS: usize = 41;

    fn words(count: usize) -> Vec<u32> {
        (0..count as u32).map(|i| i.wrapping_mul(0x9E37_79B9) ^ i.rotate_left(17)).collect()
    }

    /// Scales without infinities.
    fn scales(count: usize) -> Vec<u16> {
        (0..count).map(|i| 0x2800 + (i * 131 % 0x800) as u16).collect()
    }

    fn grouping(group: usize, four_bits: bool, tiled: bool) -> Grouping {
        Grouping { inputs: INPUTS, group, four_bits, tiled }
    }

    struct RowGroup<'a, B>(&'static str, &'a Tiles<'a, B>);

    impl<B: BitWidth> Kernel for RowGroup<'_, B> {
        fn run<L: Lanes>(self) {
            let Self(name, weight) = self;
            let padded = INPUTS.next_multiple_of(CHUNK);
            for rows in 1..=MAX_GROUP_ROWS {
                let number =
                    |i: usize| if i % padded < INPUTS { (i * 29 % 61) as f32 / 30.0 - 1.0 } else { 0.0 };
                let values: Vec<f32> = (0..rows * padded).map(number).collect();
                let x = Activations { rows, padded, values: &values }
                    .quantize_on::<L>(IntegerWidth::for_weight::<Tiles<'_, B>>());
                let results = |product: &dyn Fn(Part<'_>)| {
                    let mut results = vec![0f32; rows * ROWS];
                    let weight_rows = weight.padded_rows(ROWS);
                    product(Part { first: 0, weight_rows, results: results.chunks_mut(ROWS).collect() });
                    results.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                let few = results(&|part| L::call(TileProduct { x: &x, weight, part }));
                let panels = results(&|part| L::call(IntegerProduct { x: &x, weight, part }));
                assert_eq!(few, panels, "{name}, {rows} rows");
                assert!(
                    few.iter().any(|bits| f32::from_bits(*bits) != 0.0),
                    "{name}: nothing was multiplied"
                );
            }
        }
    }

    fn check_few_rows<B: BitWidth>(four_bits: bool) {
        for group in [32, 96] {
            let grouping = grouping(group, four_bits, true);
            let (words, scales) = (words(ROWS * grouping.row_words()), scales(ROWS * grouping.groups()));
            let tiles = Tiles::<B>::new(&words, &scales, ROWS, grouping);
            on_each_instruction_set(|name| RowGroup(name, &tiles));
        }
    }

    #[test]
    fn few_rows_have_the_bits_of_many() {
        check_few_rows::<FourBit>(true);
        check_few_rows::<EightBit>(false);
    }

    #[test]
    fn transposed_rows_equal_tiles() {
        for four_bits in [false, true] {
            let in_rows = grouping(32, four_bits, false);
            let (width, groups) = (in_rows.row_words(), in_rows.groups());
            let (rows, row_scales) = (words(ROWS * width), scales(ROWS * groups));
            let (mut tiles, mut tile_scales) = (Vec::new(), Vec::new());
            for from in (0..ROWS).step_by(TILE_ROWS) {
                let lanes = from..ROWS.min(from + TILE_ROWS);
                for at in 0..width {
                    tiles.extend(lanes.clone().map(|row| rows[row * width + at]));
                }
                for at in 0..groups {
                    tile_scales.extend(lanes.clone().map(|row| row_scales[row * groups + at]));
                }
            }
            let turned = Tiles::<FourBit>::new(&rows, &row_scales, ROWS, in_rows);
            let tiled =
                Tiles::<FourBit>::new(&tiles, &tile_scales, ROWS, Grouping { tiled: true, ..in_rows });
            for row in (0..ROWS).step_by(TILE_ROWS) {
                let (turned, tiled) = (turned.tile(row), tiled.tile(row));
                assert_eq!((turned.words, turned.scales), (tiled.words, tiled.scales));
            }
        }
    }
}
