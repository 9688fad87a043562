//! Products of many rows of activations with panels of a weight.
//!
//! The product of an activation row and a weight row is one lane of an accumulator, summed over the inputs in
//! a fixed order: integers in sequence, floats in the sixteen chains of a [`FloatPanel`], block by block. The
//! number of rows, the number of threads and the other outputs of a panel change the speed, never the result.

use super::activations::{Activations, IntegerWidth, Quantized};
use super::arithmetic::Arithmetic;
use super::gemv;
use super::integer_tile::IntegerTile;
use super::multiplicand::{Input, Multiplicand, Part};
use super::panel::{
    BLOCK, BLOCK_CHUNKS, BLOCK_STEPS, FloatPanel, FloatRows, Floats, IntegerPanel, IntegerRows, OUTPUTS,
    TILE_OUTPUTS, UnpackPanel,
};
use super::place::Place;
use super::q6k;
#[cfg(feature = "autodiff")]
use super::unpack::{Unpack, UnpackIntegers};
use crate::simd::{Kernel, LANES, Lanes, dispatch};

/// A weight that is multiplied as floats.
pub(super) struct FloatWeight<W>(pub W);

/// A weight that is multiplied as integers.
pub(super) struct IntegerWeight<W>(pub W);

impl<W: FloatRows> Multiplicand for FloatWeight<W> {
    fn integer_width(&self) -> Option<IntegerWidth> {
        None
    }

    fn multiply(&self, x: &Input<'_>, part: Part<'_>) {
        dispatch(FloatProduct { x: x.numbers, weight: &self.0, part });
    }

    #[cfg(feature = "autodiff")]
    fn unpack(&self, place: Place, inputs: usize, values: &mut [f32]) {
        dispatch(Unpack { weight: &self.0, place, inputs, values });
    }
}

impl<W: IntegerRows> Multiplicand for IntegerWeight<W> {
    fn integer_width(&self) -> Option<IntegerWidth> {
        Some(IntegerWidth::for_weight::<W>())
    }

    fn multiply(&self, x: &Input<'_>, part: Part<'_>) {
        if let Some(integers) = if W::Arithmetic::I8_ACTIVATIONS { &x.as_i8 } else { &x.as_i16 } {
            dispatch(IntegerProduct { x: integers, weight: &self.0, part });
        }
    }

    #[cfg(feature = "autodiff")]
    fn unpack(&self, place: Place, inputs: usize, values: &mut [f32]) {
        dispatch(UnpackIntegers(Unpack { weight: &self.0, place, inputs, values }));
    }
}

/// Sums of one row with two panels. They are kept together until a row is complete, because rows of results
/// can be so far apart that they share a few cache sets.
type Sums = [Floats; 2];

/// One block of two panels.
trait Tile {
    /// Adds the products of `ROWS` rows from `row` on to their sums.
    fn multiply<L: Lanes, const ROWS: usize>(&self, row: usize, sums: &mut [Sums]);

    /// Multiplies all rows, as many at a time as fit the registers.
    #[inline(always)]
    fn multiply_all<L: Lanes>(&self, sums: &mut [Sums]) {
        let mut row = 0;
        while row < sums.len() {
            let some = &mut sums[row..];
            // The last rows are split evenly: a single row would wait for its own additions.
            row += match some.len() {
                rest if L::TILE_ROWS >= 6 && (rest == 6 || rest > 8) => {
                    self.multiply::<L, 6>(row, &mut some[..6]);
                    6
                }
                4 | 7.. if L::TILE_ROWS >= 4 => {
                    self.multiply::<L, 4>(row, &mut some[..4]);
                    4
                }
                3 | 5 | 6 if L::TILE_ROWS >= 3 => {
                    self.multiply::<L, 3>(row, &mut some[..3]);
                    3
                }
                2.. if L::TILE_ROWS >= 2 => {
                    self.multiply::<L, 2>(row, &mut some[..2]);
                    2
                }
                _ => {
                    self.multiply::<L, 1>(row, &mut some[..1]);
                    1
                }
            };
        }
    }
}

/// Products of all rows with a tile. They do not know the format, so that all formats share the code.
struct TileProducts<'a, T> {
    tile: T,
    sums: &'a mut [Sums],
}

impl<T: Tile> Kernel for TileProducts<'_, T> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        self.tile.multiply_all::<L>(self.sums);
    }
}

#[inline(always)]
fn add<L: Lanes, const ROWS: usize>(sums: &mut [Sums], first: [L; ROWS], second: [L; ROWS]) {
    for ([sum0, sum1], (first, second)) in sums.iter_mut().zip(first.into_iter().zip(second)) {
        *sum0 = Floats::from_lanes(sum0.lanes::<L>().add(first));
        *sum1 = Floats::from_lanes(sum1.lanes::<L>().add(second));
    }
}

/// Adds the sums to the results and resets them.
#[inline(always)]
fn hand_over<L: Lanes>(sums: &mut [Sums], places: [Place; 2], results: &mut [&mut [f32]]) {
    for (sums, results) in sums.iter_mut().zip(results) {
        places[0].add(results, sums[0].lanes::<L>());
        places[1].add(results, sums[1].lanes::<L>());
        *sums = Sums::default();
    }
}

struct FloatProduct<'a, W> {
    x: &'a Activations<'a>,
    weight: &'a W,
    part: Part<'a>,
}

impl<W: FloatRows> Kernel for FloatProduct<'_, W> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { x, weight, part: Part { first, weight_rows, mut results } } = self;
        if let [result] = &mut results[..] {
            return gemv::float_row::<L, W>(x.values, weight, first, weight_rows, result);
        }
        let mut panels = [FloatPanel::default(), FloatPanel::default()];
        let mut sums = vec![Sums::default(); x.rows];
        for at in (0..results[0].len()).step_by(TILE_OUTPUTS) {
            let places = [Place::new(first, at, weight_rows), Place::new(first, at + OUTPUTS, weight_rows)];
            for block in 0..x.padded.div_ceil(BLOCK) {
                for (Place { row, .. }, panel) in places.into_iter().zip(&mut panels) {
                    L::call(UnpackPanel { weight, row, block, panel });
                }
                L::call(TileProducts { tile: FloatTile { x, block, panels: &panels }, sums: &mut sums });
            }
            hand_over::<L>(&mut sums, places, &mut results);
        }
    }
}

struct FloatTile<'a> {
    x: &'a Activations<'a>,
    block: usize,
    panels: &'a [FloatPanel; 2],
}

impl Tile for FloatTile<'_> {
    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // An input is of all rows at once.
    fn multiply<L: Lanes, const ROWS: usize>(&self, row: usize, sums: &mut [Sums]) {
        let Self { x, block, panels: [panel0, panel1] } = *self;
        let count = BLOCK_STEPS.min(x.padded / LANES - block * BLOCK_STEPS);
        let mut steps: [&[[f32; LANES]]; ROWS] = [&[]; ROWS];
        for i in 0..ROWS {
            let start = (row + i) * x.padded + block * BLOCK;
            steps[i] = x.values[start..][..count * LANES].as_chunks().0;
        }
        // One array per panel, so that the compiler keeps them in registers.
        let (mut totals0, mut totals1) = ([L::zero(); ROWS], [L::zero(); ROWS]);
        for lane in 0..LANES {
            let (mut sums0, mut sums1) = ([L::zero(); ROWS], [L::zero(); ROWS]);
            for step in 0..count {
                let weight0 = panel0.inputs[lane][step].lanes::<L>();
                let weight1 = panel1.inputs[lane][step].lanes::<L>();
                for i in 0..ROWS {
                    let x = L::splat(steps[i][step][lane]);
                    sums0[i] = sums0[i].mul_add(weight0, x);
                    sums1[i] = sums1[i].mul_add(weight1, x);
                }
            }
            for i in 0..ROWS {
                totals0[i] = totals0[i].add(sums0[i]);
                totals1[i] = totals1[i].add(sums1[i]);
            }
        }
        add::<L, ROWS>(sums, totals0, totals1);
    }
}

/// Products of integer activations with an unpacked weight.
pub(super) struct IntegerProduct<'a, W> {
    pub x: &'a Quantized,
    pub weight: &'a W,
    pub part: Part<'a>,
}

impl<W: IntegerRows> Kernel for IntegerProduct<'_, W> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { x, weight, part: Part { first, weight_rows, mut results } } = self;
        match x.rows {
            2.. if !L::UNPACKS_FOR_ROWS => {}
            1 => return few_rows::<L, W, 1>(x, weight, first, weight_rows, &mut results),
            2 => return few_rows::<L, W, 2>(x, weight, first, weight_rows, &mut results),
            3 => return few_rows::<L, W, 3>(x, weight, first, weight_rows, &mut results),
            4 => return few_rows::<L, W, 4>(x, weight, first, weight_rows, &mut results),
            _ => {}
        }
        let mut panels = [IntegerPanel::default(), IntegerPanel::default()];
        let mut sums = vec![Sums::default(); x.rows];
        for at in (0..results[0].len()).step_by(TILE_OUTPUTS) {
            let places = [Place::new(first, at, weight_rows), Place::new(first, at + OUTPUTS, weight_rows)];
            for block in 0..x.chunks.div_ceil(BLOCK_CHUNKS) {
                for (Place { row, .. }, panel) in places.into_iter().zip(&mut panels) {
                    L::call(UnpackPanel { weight, row, block, panel });
                }
                for few in x.row_groups() {
                    let tile = IntegerTile::<W::Arithmetic>::new(few, block, &panels, W::ZERO);
                    L::call(TileProducts { tile, sums: &mut sums[few.first..][..few.rows] });
                }
            }
            hand_over::<L>(&mut sums, places, &mut results);
        }
    }
}

/// Products of a few rows without a panel.
#[inline(always)]
fn few_rows<L: Lanes, W: IntegerRows, const ROWS: usize>(
    x: &Quantized,
    weight: &W,
    first: usize,
    weight_rows: usize,
    results: &mut [&mut [f32]],
) {
    if W::Arithmetic::ROW_BLOCKS {
        q6k::rows::<L, W, ROWS>(x.row_blocks::<L, W>(), weight, first, results);
    } else if let Some(x) = x.row_groups().next() {
        gemv::integer_rows::<L, W, ROWS>(x, weight, first, weight_rows, results);
    }
}

impl<A: Arithmetic> Tile for IntegerTile<'_, A> {
    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // A chunk is of all rows at once.
    fn multiply<L: Lanes, const ROWS: usize>(&self, row: usize, sums: &mut [Sums]) {
        if A::ROW_BLOCKS {
            let [whole0, whole1] = q6k::tile::<L, A, ROWS>(self, row);
            return add::<L, ROWS>(sums, whole0, whole1);
        }
        let Self { few, block, panels: [panel0, panel1], .. } = *self;
        let (mut sums0, mut sums1) = ([L::zero(); ROWS], [L::zero(); ROWS]);
        let chunks = few.chunks::<ROWS>(row, block * BLOCK_CHUNKS).take(BLOCK_CHUNKS);
        for (chunk, x) in chunks.enumerate() {
            for half in 0..if A::HALF_SCALES { 2 } else { 1 } {
                let (dots0, dots1) = self.dots::<L, ROWS>(chunk, half, x);
                let scale0 = panel0.scales[chunk][half].lanes::<L>();
                let scale1 = panel1.scales[chunk][half].lanes::<L>();
                for i in 0..ROWS {
                    let scale = L::splat(x[i].scale);
                    sums0[i] = sums0[i].mul_add(L::to_floats(L::dot(dots0[i])).mul(scale), scale0);
                    sums1[i] = sums1[i].mul_add(L::to_floats(L::dot(dots1[i])).mul(scale), scale1);
                }
            }
            for half in 0..if !A::HAS_MINIMUM {
                0
            } else if A::HALF_SCALES {
                2
            } else {
                1
            } {
                let least0 = panel0.minimum[chunk][half].lanes::<L>();
                let least1 = panel1.minimum[chunk][half].lanes::<L>();
                for i in 0..ROWS {
                    let sum = if A::HALF_SCALES { x[i].sums[half] } else { x[i].sum() };
                    let sum = L::splat(x[i].scale).mul(L::splat(sum as f32));
                    sums0[i] = sums0[i].mul_add(sum, least0);
                    sums1[i] = sums1[i].mul_add(sum, least1);
                }
            }
        }
        add::<L, ROWS>(sums, sums0, sums1);
    }
}

#[cfg(test)]
mod tests {
    use std::ops::RangeInclusive;

    use super::*;
    use crate::linear::blocks::{Block, BlockRows, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
    use crate::linear::decode::decode;
    use crate::linear::low_bit_blocks::{IQ4NL, IQ4XS, MXFP4, Q2K, Q3K};
    use crate::linear::panel::CHUNK;
    use crate::linear::plain::{Bf16, F16, F32, PlainRows};
    use crate::simd::on_each_instruction_set;

    /// Three blocks.
    const INPUTS: usize = 768;
    const OUTPUTS: usize = 41;

    /// All row counts with code of their own, and all that end a tile.
    const ROWS: RangeInclusive<usize> = 1..=14;

    /// Bytes that do not form an infinite f16.
    fn bytes(count: usize) -> Vec<u8> {
        (0..count).map(|i| (i * 37 % 120) as u8).collect()
    }

    fn activations(rows: usize) -> Vec<f32> {
        (0..rows * INPUTS).map(|i| (i * 29 % 61) as f32 / 30.0 - 1.0).collect()
    }

    fn part(rows: usize, results: &mut [f32]) -> Part<'_> {
        let results: Vec<_> = results.chunks_mut(OUTPUTS).collect();
        assert_eq!(results.len(), rows);
        Part { first: 0, weight_rows: OUTPUTS, results }
    }

    /// Checks that several rows give the bits of each row alone, and returns the products.
    fn alike(rows: usize, name: &str, product: impl Fn(&Activations<'_>, &mut [f32])) -> Vec<f32> {
        let values = activations(rows);
        let of = |values: &[f32]| {
            let rows = values.len() / INPUTS;
            let mut results = vec![0.0; rows * OUTPUTS];
            product(&Activations { rows, padded: INPUTS, values }, &mut results);
            results
        };
        let together = of(&values);
        for (alone, together) in values.chunks(INPUTS).zip(together.chunks(OUTPUTS)) {
            let alone = of(alone);
            let same = alone.iter().zip(together).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{name}, a row among {rows}");
        }
        together
    }

    struct Integer<'a, W> {
        name: &'static str,
        weight: &'a W,
    }

    impl<W: IntegerRows> Kernel for Integer<'_, W> {
        fn run<L: Lanes>(self) {
            let numbers = decode(self.weight, OUTPUTS);
            let largest = numbers.iter().fold(0f32, |largest, number| largest.max(number.abs()));
            for rows in ROWS {
                let found = alike(rows, self.name, |x, results| {
                    let x = x.quantize_on::<L>(IntegerWidth::for_weight::<W>());
                    L::call(IntegerProduct { x: &x, weight: self.weight, part: part(x.rows, results) });
                });
                // The errors of activations add up like a random walk.
                let off = if W::Arithmetic::I8_ACTIVATIONS { 1e-2 } else { 4e-5 };
                check(self.name, &found, &numbers, rows, largest * off * (INPUTS as f32).sqrt());
            }
        }
    }

    struct Float<'a, W> {
        name: &'static str,
        weight: &'a W,
        numbers: &'a [f32],
    }

    impl<W: FloatRows> Kernel for Float<'_, W> {
        fn run<L: Lanes>(self) {
            for rows in ROWS {
                let found = alike(rows, self.name, |x, results| {
                    L::call(FloatProduct { x, weight: self.weight, part: part(x.rows, results) });
                });
                check(self.name, &found, self.numbers, rows, 1e-4);
            }
        }
    }

    fn check(name: &str, found: &[f32], numbers: &[f32], rows: usize, tolerance: f32) {
        let values = activations(rows);
        for (x, found) in values.chunks(INPUTS).zip(found.chunks(OUTPUTS)) {
            for (weight, found) in numbers.chunks(INPUTS).zip(found) {
                let sum: f64 = x.iter().zip(weight).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                assert!(
                    (f64::from(*found) - sum).abs() <= tolerance.into(),
                    "{name}: {found} instead of {sum}"
                );
            }
        }
    }

    /// Test machines use the widest instruction set; the others must be right too.
    #[test]
    fn every_instruction_set_multiplies_integers() {
        check_block_format::<Q8_0>();
        check_block_format::<Q4_0>();
        check_block_format::<Q4_1>();
        check_block_format::<Q5_0>();
        check_block_format::<Q5_1>();
        check_block_format::<Q4K>();
        check_block_format::<Q5K>();
        check_block_format::<Q6K>();
        check_block_format::<MXFP4>();
        check_block_format::<IQ4NL>();
        check_block_format::<IQ4XS>();
        check_block_format::<Q3K>();
        check_block_format::<Q2K>();
    }

    fn check_block_format<B: Block>() {
        let blocks = bytes(OUTPUTS * INPUTS / (B::CHUNKS * CHUNK) * B::BYTES);
        let weight = BlockRows::<B>::new(&blocks, INPUTS);
        on_each_instruction_set(|name| Integer { name, weight: &weight });
    }

    #[test]
    fn every_instruction_set_multiplies_numbers() {
        let numbers: Vec<f32> = (0..OUTPUTS * INPUTS).map(|i| (i * 31 % 64) as f32 / 32.0 - 1.0).collect();
        let single: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let weight = PlainRows::<F32>::new(&single, INPUTS);
        on_each_instruction_set(|name| Float { name, weight: &weight, numbers: &numbers });
        let half: Vec<u8> =
            numbers.iter().flat_map(|number| half::f16::from_f32(*number).to_le_bytes()).collect();
        let weight = PlainRows::<F16>::new(&half, INPUTS);
        on_each_instruction_set(|name| Float { name, weight: &weight, numbers: &numbers });
        let brain: Vec<u8> =
            numbers.iter().flat_map(|number| half::bf16::from_f32(*number).to_le_bytes()).collect();
        let weight = PlainRows::<Bf16>::new(&brain, INPUTS);
        on_each_instruction_set(|name| Float { name, weight: &weight, numbers: &numbers });
    }
}
