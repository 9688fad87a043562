//! Rows of activations times panels of a weight.
//!
//! The product of an activation row and a weight row is one lane of an accumulator, taken over the inputs in one order:
//! integers as they come, numbers in the sixteen chains of a [`FloatPanel`], block by block. How many rows are computed
//! together, by how many threads, and which other outputs are in the panel changes the speed and never the result.

use std::marker::PhantomData;

use super::activations::{Activations, IntegerWidth, Quantized, QuantizedChunk, RowGroup};
use super::gemv;
use super::panel::{
    BLOCK, BLOCK_CHUNKS, BLOCK_STEPS, CHUNK, FloatPanel, FloatRows, Floats, HALF_QUADS, IntegerPanel,
    IntegerRows, OUTPUTS, QUADS, TILE_OUTPUTS,
};
use super::q6k;
#[cfg(feature = "autodiff")]
use super::unpack::{Unpack, UnpackIntegers};
use crate::simd::{self, Kernel, LANES, Lanes, dispatch};
use crate::thread_pool::parallel_for_each;

/// Multiplications below which a second thread costs more than it gains.
const SINGLE_THREAD_WORK: usize = 1 << 17;

/// Multiplications below which a piece costs more to take than there is to wait for whoever took the last one.
const SMALLEST_PIECE: usize = 1 << 16;

/// A weight that can be multiplied with.
pub(super) trait Multiplicand: Sync {
    /// How it meets activations: as integers, or as numbers.
    fn integer_width(&self) -> Option<IntegerWidth>;

    /// The rows it has in the memory, at minimum those of one panel, where so many are wanted.
    fn padded_rows(&self, outputs: usize) -> usize {
        outputs.max(OUTPUTS)
    }

    /// Multiplies all rows with consecutive outputs.
    fn multiply(&self, x: &Input<'_>, part: Part<'_>);

    /// The numbers of up to sixteen whole rows of so many inputs.
    #[cfg(feature = "autodiff")]
    fn unpack(&self, place: Place, inputs: usize, values: &mut [f32]);
}

/// The activations in every form that a weight asks for.
pub(super) struct Input<'a> {
    pub numbers: &'a Activations<'a>,
    pub as_i16: Option<Quantized>,
    pub as_i8: Option<Quantized>,
}

/// Some consecutive outputs.
pub(super) struct Part<'a> {
    /// The first of them.
    pub first: usize,
    /// Rows of the weight, as [`Multiplicand::padded_rows`] has them.
    pub weight_rows: usize,
    /// For every row the results of these outputs, zero before.
    pub results: Vec<&'a mut [f32]>,
}

/// A weight of numbers.
pub(super) struct FloatWeight<W>(pub W);

/// A weight of integers.
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
        if let Some(integers) = if W::I8_ACTIVATIONS { &x.as_i8 } else { &x.as_i16 } {
            dispatch(IntegerProduct { x: integers, weight: &self.0, part });
        }
    }

    #[cfg(feature = "autodiff")]
    fn unpack(&self, place: Place, inputs: usize, values: &mut [f32]) {
        dispatch(UnpackIntegers(Unpack { weight: &self.0, place, inputs, values }));
    }
}

/// `x · weightᵀ` for several weights of so many outputs: `[rows, outputs]` each. The weights are worked on together;
/// each has at minimum the rows of one panel, wanted or not.
pub(super) fn multiply(x: &Activations<'_>, weights: &[(&dyn Multiplicand, usize)]) -> Vec<Vec<f32>> {
    let mut results: Vec<Vec<f32>> = weights.iter().map(|(_, outputs)| vec![0.0; x.rows * outputs]).collect();
    let total: usize = weights.iter().map(|(_, outputs)| outputs).sum();
    if x.rows == 0 || x.padded == 0 || total == 0 {
        return results;
    }
    let rounded = |width| {
        let wanted = weights.iter().any(|(weight, _)| weight.integer_width() == Some(width));
        wanted.then(|| x.quantize(width))
    };
    let input = Input { numbers: x, as_i16: rounded(IntegerWidth::I16), as_i8: rounded(IntegerWidth::I8) };
    let single = x.rows * x.padded * total < SINGLE_THREAD_WORK;
    let threads = if single { 1 } else { rayon::current_num_threads() };
    let smallest = (SMALLEST_PIECE / (x.rows * x.padded)).next_multiple_of(TILE_OUTPUTS);
    let mut parts = Vec::new();
    let mut left = total;
    for (&(weight, outputs), result) in weights.iter().zip(&mut results) {
        let mut rows: Vec<&mut [f32]> = result.chunks_mut(outputs.max(1)).collect();
        let mut first = 0;
        while first < outputs {
            let piece = piece(left, threads, smallest).min(outputs - first);
            let results = rows.iter_mut().map(|row| row.split_off_mut(..piece).unwrap_or_default()).collect();
            parts.push((weight, Part { first, weight_rows: weight.padded_rows(outputs), results }));
            first += piece;
            left -= piece;
        }
    }
    if single {
        for (weight, part) in parts {
            weight.multiply(&input, part);
        }
    } else {
        parallel_for_each(parts, |(weight, part)| weight.multiply(&input, part));
    }
    results
}

/// How many of the outputs that are left come next. Ever fewer: threads that take the last pieces end at almost the same time,
/// also where one of them was interrupted.
fn piece(left: usize, threads: usize, smallest: usize) -> usize {
    let share = if threads > 1 { left.div_ceil(2 * threads) } else { left };
    share.next_multiple_of(TILE_OUTPUTS).max(smallest)
}

/// The numbers that the rows of a weight stand for, `[outputs, inputs]`.
pub(super) fn decode<W: IntegerRows>(weight: &W, outputs: usize) -> Vec<f32> {
    let mut values = vec![0.0; outputs * weight.inputs()];
    if values.is_empty() {
        return values;
    }
    dispatch(Decode { weight, outputs, values: &mut values });
    values
}

/// Where a panel's sums go.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// The first row of the weight in the panel.
    pub row: usize,
    /// Lanes before the first that is wanted: the last panel of a weight reaches back over the one before.
    pub skipped: usize,
    /// The first wanted output, within the part.
    at: usize,
}

impl Place {
    #[inline(always)]
    pub fn new(first: usize, at: usize, weight_rows: usize) -> Self {
        let row = (first + at).min(weight_rows - OUTPUTS);
        Self { row, skipped: first + at - row, at }
    }

    /// Adds a panel's sums to a row of results, as far as that goes.
    #[inline(always)]
    pub fn add<L: Lanes>(self, results: &mut [f32], sums: L) {
        let Some(results) = results.get_mut(self.at..) else { return };
        match results.first_chunk_mut() {
            Some(whole) if self.skipped == 0 => *whole = L::load(whole).add(sums).store(),
            _ => {
                let sums = sums.store();
                for (result, sum) in results.iter_mut().zip(sums.iter().skip(self.skipped)) {
                    *result += sum;
                }
            }
        }
    }
}

/// The sums of one row with two panels. They are kept beside each other until they are whole: rows of results can lie so
/// far apart that all of them meet in a few lines of the cache.
type Sums = [Floats; 2];

/// One block of two panels.
trait Tile<L: Lanes> {
    /// Adds the products of `ROWS` rows from `row` on to their sums.
    fn multiply<const ROWS: usize>(&self, row: usize, sums: &mut [Sums]);

    /// All rows, as many at a time as the registers have room for.
    #[inline(always)]
    fn multiply_all(&self, sums: &mut [Sums]) {
        let mut row = 0;
        while row < sums.len() {
            let some = &mut sums[row..];
            // The last ones in pieces that are alike: a single row leaves the multiplication waiting for itself.
            row += match some.len() {
                rest if L::TILE_ROWS >= 6 && (rest == 6 || rest > 8) => {
                    self.multiply::<6>(row, &mut some[..6]);
                    6
                }
                4 | 7.. if L::TILE_ROWS >= 4 => {
                    self.multiply::<4>(row, &mut some[..4]);
                    4
                }
                3 | 5 | 6 if L::TILE_ROWS >= 3 => {
                    self.multiply::<3>(row, &mut some[..3]);
                    3
                }
                2.. if L::TILE_ROWS >= 2 => {
                    self.multiply::<2>(row, &mut some[..2]);
                    2
                }
                _ => {
                    self.multiply::<1>(row, &mut some[..1]);
                    1
                }
            };
        }
    }
}

#[inline(always)]
fn add<L: Lanes, const ROWS: usize>(sums: &mut [Sums], first: [L; ROWS], second: [L; ROWS]) {
    for ([sum0, sum1], (first, second)) in sums.iter_mut().zip(first.into_iter().zip(second)) {
        *sum0 = Floats::from_lanes(sum0.lanes::<L>().add(first));
        *sum1 = Floats::from_lanes(sum1.lanes::<L>().add(second));
    }
}

/// Adds whole sums to the results and begins anew.
#[inline(always)]
fn hand_over<L: Lanes>(sums: &mut [Sums], places: (Place, Place), results: &mut [&mut [f32]]) {
    for (sums, results) in sums.iter_mut().zip(results) {
        places.0.add(results, sums[0].lanes::<L>());
        places.1.add(results, sums[1].lanes::<L>());
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
        let mut panels = (FloatPanel::default(), FloatPanel::default());
        let mut sums = vec![Sums::default(); x.rows];
        for at in (0..results[0].len()).step_by(TILE_OUTPUTS) {
            let places = (Place::new(first, at, weight_rows), Place::new(first, at + OUTPUTS, weight_rows));
            for block in 0..x.padded.div_ceil(BLOCK) {
                weight.unpack::<L>(places.0.row, block, &mut panels.0);
                weight.unpack::<L>(places.1.row, block, &mut panels.1);
                Tile::<L>::multiply_all(&FloatTile { x, block, panels: &panels }, &mut sums);
            }
            hand_over::<L>(&mut sums, places, &mut results);
        }
    }
}

struct FloatTile<'a> {
    x: &'a Activations<'a>,
    block: usize,
    panels: &'a (FloatPanel, FloatPanel),
}

impl<L: Lanes> Tile<L> for FloatTile<'_> {
    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // An input is of all rows at once.
    fn multiply<const ROWS: usize>(&self, row: usize, sums: &mut [Sums]) {
        let Self { x, block, panels: (panel0, panel1) } = *self;
        let count = BLOCK_STEPS.min(x.padded / LANES - block * BLOCK_STEPS);
        let mut steps: [&[[f32; LANES]]; ROWS] = [&[]; ROWS];
        for i in 0..ROWS {
            let start = (row + i) * x.padded + block * BLOCK;
            steps[i] = x.values[start..][..count * LANES].as_chunks().0;
        }
        // Arrays of their own for the two panels: the compiler keeps those in registers.
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

/// Products with a weight that is unpacked.
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
            1 => return few_rows::<L, W, 1>(x, weight, first, weight_rows, &mut results),
            2 => return few_rows::<L, W, 2>(x, weight, first, weight_rows, &mut results),
            3 => return few_rows::<L, W, 3>(x, weight, first, weight_rows, &mut results),
            4 => return few_rows::<L, W, 4>(x, weight, first, weight_rows, &mut results),
            _ => {}
        }
        let mut panels = (IntegerPanel::default(), IntegerPanel::default());
        let mut sums = vec![Sums::default(); x.rows];
        for at in (0..results[0].len()).step_by(TILE_OUTPUTS) {
            let places = (Place::new(first, at, weight_rows), Place::new(first, at + OUTPUTS, weight_rows));
            for block in 0..x.chunks.div_ceil(BLOCK_CHUNKS) {
                weight.unpack::<L, _>(places.0.row, block, &mut panels.0);
                weight.unpack::<L, _>(places.1.row, block, &mut panels.1);
                let (panels, format) = (&panels, PhantomData::<W>);
                for few in x.row_groups() {
                    let sums = &mut sums[few.first..][..few.rows];
                    Tile::<L>::multiply_all(&IntegerTile { few, block, panels, format }, sums);
                }
            }
            hand_over::<L>(&mut sums, places, &mut results);
        }
    }
}

/// The products of a few rows without a panel.
#[inline(always)]
fn few_rows<L: Lanes, W: IntegerRows, const ROWS: usize>(
    x: &Quantized,
    weight: &W,
    first: usize,
    weight_rows: usize,
    results: &mut [&mut [f32]],
) {
    if W::ROW_BLOCKS {
        q6k::rows::<L, W, ROWS>(x.row_blocks::<L, W>(), weight, first, results);
    } else if let Some(x) = x.row_groups().next() {
        gemv::integer_rows::<L, W, ROWS>(x, weight, first, weight_rows, results);
    }
}

/// Integer sums of some rows with a panel, as [`QuantizedChunk::dot`](crate::simd::Integers::dot) takes them.
type Dots<L, const ROWS: usize> = [[<L as simd::Integers>::Words; 2]; ROWS];

/// One block of two panels of integers.
pub(super) struct IntegerTile<'a, W> {
    pub few: RowGroup<'a>,
    pub block: usize,
    pub panels: &'a (IntegerPanel, IntegerPanel),
    format: PhantomData<W>,
}

impl<L: Lanes, W: IntegerRows> Tile<L> for IntegerTile<'_, W> {
    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // A chunk is of all rows at once.
    fn multiply<const ROWS: usize>(&self, row: usize, sums: &mut [Sums]) {
        if W::ROW_BLOCKS {
            let [whole0, whole1] = q6k::tile::<L, W, ROWS>(self, row);
            return add::<L, ROWS>(sums, whole0, whole1);
        }
        let Self { few, block, panels: (panel0, panel1), .. } = *self;
        let (mut sums0, mut sums1) = ([L::zero(); ROWS], [L::zero(); ROWS]);
        let chunks = few.chunks::<ROWS>(row, block * BLOCK_CHUNKS).take(BLOCK_CHUNKS);
        for (chunk, x) in chunks.enumerate() {
            for half in 0..if W::HALF_SCALES { 2 } else { 1 } {
                let (dots0, dots1) = self.dots::<L, ROWS>(chunk, half, x);
                let scale0 = panel0.scales[chunk][half].lanes::<L>();
                let scale1 = panel1.scales[chunk][half].lanes::<L>();
                for i in 0..ROWS {
                    let scale = L::splat(x[i].scale);
                    sums0[i] = sums0[i].mul_add(L::to_floats(L::dot(dots0[i])).mul(scale), scale0);
                    sums1[i] = sums1[i].mul_add(L::to_floats(L::dot(dots1[i])).mul(scale), scale1);
                }
            }
            if W::HAS_MINIMUM {
                let (least0, least1) =
                    (panel0.minimum[chunk].lanes::<L>(), panel1.minimum[chunk].lanes::<L>());
                for i in 0..ROWS {
                    let sum = L::splat(x[i].scale).mul(L::splat(x[i].sum() as f32));
                    sums0[i] = sums0[i].mul_add(sum, least0);
                    sums1[i] = sums1[i].mul_add(sum, least1);
                }
            }
        }
        add::<L, ROWS>(sums, sums0, sums1);
    }
}

impl<W: IntegerRows> IntegerTile<'_, W> {
    /// The integers of a chunk times those of both panels, or of one half of it where halves have scales of their own.
    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // A chunk is of all rows at once.
    pub fn dots<L: Lanes, const ROWS: usize>(
        &self,
        chunk: usize,
        half: usize,
        x: &[QuantizedChunk; ROWS],
    ) -> (Dots<L, ROWS>, Dots<L, ROWS>) {
        let (panel0, panel1) = self.panels;
        let zero = L::splat_word(0);
        let (mut dots0, mut dots1) = ([[zero; 2]; ROWS], [[zero; 2]; ROWS]);
        for i in 0..ROWS {
            let offset = if W::HALF_SCALES { x[i].half_offset(W::ZERO, half) } else { x[i].offset(W::ZERO) };
            (dots0[i][1], dots1[i][1]) = (L::splat_word(offset), L::splat_word(offset));
        }
        let quads = if W::HALF_SCALES { HALF_QUADS } else { QUADS };
        for quad in half * quads..(half + 1) * quads {
            let weight0 = panel0.quads[chunk][quad].words::<L>();
            let weight1 = panel1.quads[chunk][quad].words::<L>();
            for i in 0..ROWS {
                let quad = &x[i].quads[quad];
                dots0[i] = L::dot_quads(dots0[i], weight0, quad, W::I8_ACTIVATIONS);
                dots1[i] = L::dot_quads(dots1[i], weight1, quad, W::I8_ACTIVATIONS);
            }
        }
        (dots0, dots1)
    }
}

struct Decode<'a, W> {
    weight: &'a W,
    outputs: usize,
    /// `[outputs, inputs]`
    values: &'a mut [f32],
}

impl<W: IntegerRows> Kernel for Decode<'_, W> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let inputs = self.weight.inputs();
        let mut panel = IntegerPanel::default();
        for (index, values) in self.values.chunks_mut(OUTPUTS * inputs).enumerate() {
            let place = Place::new(0, index * OUTPUTS, self.outputs.max(OUTPUTS));
            for block in 0..inputs.div_ceil(BLOCK) {
                self.weight.unpack::<L, _>(place.row, block, &mut panel);
                for (lane, values) in values.chunks_exact_mut(inputs).enumerate() {
                    let values = &mut values[block * BLOCK..inputs.min((block + 1) * BLOCK)];
                    for (input, value) in values.iter_mut().enumerate() {
                        *value = number::<W>(&panel, input, place.skipped + lane);
                    }
                }
            }
        }
    }
}

/// What one integer of a panel stands for.
fn number<W: IntegerRows>(panel: &IntegerPanel, input: usize, lane: usize) -> f32 {
    let (chunk, input) = (input / CHUNK, input % CHUNK);
    let byte = panel.quads[chunk][input / 4].0[lane].to_le_bytes()[input % 4];
    let half = if W::HALF_SCALES { input / (CHUNK / 2) } else { 0 };
    let minimum = if W::HAS_MINIMUM { panel.minimum[chunk].0[lane] } else { 0.0 };
    (i32::from(byte) - W::ZERO) as f32 * panel.scales[chunk][half].0[lane] + minimum
}

#[cfg(test)]
mod tests {
    use std::ops::RangeInclusive;

    use super::*;
    use crate::linear::blocks::{Block, BlockRows, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
    use crate::linear::plain::{Bf16, F16, F32, PlainRows};
    use crate::simd::on_each_instruction_set;

    /// Three blocks.
    const INPUTS: usize = 768;
    const OUTPUTS: usize = 41;

    /// Those that are multiplied on their own, and every count that follows others or ends a tile.
    const ROWS: RangeInclusive<usize> = 1..=14;

    /// None of two such bytes is the exponent of an infinity in half precision.
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

    /// Products of several rows on some lanes, which have to be those of each row alone.
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
                    IntegerProduct { x: &x, weight: self.weight, part: part(x.rows, results) }.run::<L>();
                });
                // What activations are off by adds up like a random walk.
                let off = if W::I8_ACTIVATIONS { 1e-2 } else { 4e-5 };
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
                    FloatProduct { x, weight: self.weight, part: part(x.rows, results) }.run::<L>();
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

    #[test]
    fn pieces_become_smaller_and_end_with_small_ones() {
        for (threads, smallest, total) in [(1, 32, 5000), (2, 64, 151_936), (2, 32, 1000), (7, 96, 40_961)] {
            let (mut left, mut pieces) = (total, Vec::new());
            while left > 0 {
                pieces.push(piece(left, threads, smallest).min(left));
                left -= pieces[pieces.len() - 1];
            }
            assert!(pieces.is_sorted_by(|a, b| a >= b), "{pieces:?}");
            assert!(pieces[0] <= total.div_ceil(threads).max(smallest), "{pieces:?}");
            assert!(threads == 1 || pieces[pieces.len() - 1] <= smallest, "{pieces:?}");
            assert!(pieces.len() <= 1 + total / smallest, "{pieces:?}");
        }
    }

    /// The processor of a test machine takes the widest lanes; others have to be right too.
    #[test]
    fn every_kind_of_lanes_multiplies_integers() {
        every_kind_multiplies::<Q8_0>();
        every_kind_multiplies::<Q4_0>();
        every_kind_multiplies::<Q4_1>();
        every_kind_multiplies::<Q5_0>();
        every_kind_multiplies::<Q5_1>();
        every_kind_multiplies::<Q4K>();
        every_kind_multiplies::<Q5K>();
        every_kind_multiplies::<Q6K>();
    }

    fn every_kind_multiplies<B: Block>() {
        let blocks = bytes(OUTPUTS * INPUTS / (B::CHUNKS * CHUNK) * B::BYTES);
        let weight = BlockRows::<B>::new(&blocks, INPUTS);
        on_each_instruction_set(|name| Integer { name, weight: &weight });
    }

    #[test]
    fn every_kind_of_lanes_multiplies_numbers() {
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
