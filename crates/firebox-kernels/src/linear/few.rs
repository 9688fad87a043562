//! A few rows of activations times a weight whose rows are read from one end to the other, the case of sequences that
//! decode together: the same sums as with many rows, to the last bit, and no panel.

use super::activations::Quantized;
use super::line::{LINE_CHUNKS, Line};
use super::panel::{BLOCK_CHUNKS, Floats, HALF_QUADS, IntegerRows, OUTPUTS, Unpacked};
use super::product::Place;
use crate::simd::Lanes;

/// Rows that meet a line together. With more, it depends on the processor whether turning a weight once costs less than
/// adding up across lanes for every row.
pub(super) const MOST_ROWS: usize = 3;

/// Rows of a weight from `first` on, and what they meet.
pub(super) struct Few<'a, W> {
    pub x: &'a Quantized,
    pub weight: &'a W,
    pub line: Line,
    pub first: usize,
    pub weight_rows: usize,
}

/// The scales of a block.
struct Scales<L>([L; BLOCK_CHUNKS]);

impl<L: Lanes> Unpacked<L> for Scales<L> {
    const ROWS: usize = OUTPUTS;

    #[inline(always)]
    fn bytes(&mut self, _chunk: usize, _half: usize, _quads: [L::Words; HALF_QUADS]) {}

    #[inline(always)]
    fn scale(&mut self, chunk: usize, _half: usize, scale: L) {
        self.0[chunk] = scale;
    }

    #[inline(always)]
    fn least(&mut self, _chunk: usize, _least: L) {}
}

impl<W: IntegerRows> Few<'_, W> {
    /// Adds the products of all rows to their results.
    #[inline(always)]
    pub fn multiply<L: Lanes>(&self, results: &mut [&mut [f32]]) {
        match results.len() {
            1 => self.rows::<L, 1>(results),
            2 => self.rows::<L, 2>(results),
            _ => self.rows::<L, MOST_ROWS>(results),
        }
    }

    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // A line is of all rows at once.
    fn rows<L: Lanes, const ROWS: usize>(&self, results: &mut [&mut [f32]]) {
        let Self { x, weight, line, first, weight_rows } = *self;
        let inputs = x.lines::<W>(line);
        let lines = x.chunks.div_ceil(LINE_CHUNKS);
        // Line by line, and row by row within each.
        let mut products = vec![[Floats::default(); OUTPUTS]; lines * ROWS];
        let mut scales = [Scales([L::zero(); BLOCK_CHUNKS]), Scales([L::zero(); BLOCK_CHUNKS])];
        for at in (0..results[0].len()).step_by(OUTPUTS) {
            let place = Place::new(first, at, weight_rows);
            for output in 0..OUTPUTS {
                for (index, products) in products.as_chunks_mut::<ROWS>().0.iter_mut().enumerate() {
                    let mut of_rows = [&inputs[index]; ROWS];
                    for i in 1..ROWS {
                        of_rows[i] = &inputs[i * lines + index];
                    }
                    let dots = weight.line_dots::<L, ROWS>(place.row + output, index, of_rows);
                    for i in 0..ROWS {
                        products[i][output] = Floats::from_lanes(of_rows[i].scaled::<L>(dots[i]));
                    }
                }
            }
            for (index, products) in products.as_chunks::<ROWS>().0.iter().enumerate() {
                let first = index * LINE_CHUNKS;
                let chunks = LINE_CHUNKS.min(x.chunks - first);
                for (half, scales) in scales.iter_mut().take(chunks.div_ceil(BLOCK_CHUNKS)).enumerate() {
                    weight.line_scales::<L, _>(place.row, first / BLOCK_CHUNKS + half, scales);
                }
                for i in 0..ROWS {
                    let columns = L::wide_columns(bytemuck::cast_slice(&products[i]), size_of::<Floats>());
                    // Loops of a length that is known leave what they add up in registers.
                    if chunks == LINE_CHUNKS {
                        place.add(results[i], scales[0].sum::<W>(&columns, 0, BLOCK_CHUNKS));
                        place.add(results[i], scales[1].sum::<W>(&columns, BLOCK_CHUNKS, BLOCK_CHUNKS));
                        continue;
                    }
                    for (half, from) in (0..chunks).step_by(BLOCK_CHUNKS).enumerate() {
                        let count = BLOCK_CHUNKS.min(chunks - from);
                        place.add(results[i], scales[half].sum::<W>(&columns, from, count));
                    }
                }
            }
        }
    }
}

impl<L: Lanes> Scales<L> {
    /// The products of the chunks of a block, which lie in columns from chunk `from` on, times their scales.
    #[inline(always)]
    fn sum<W: IntegerRows>(&self, columns: &[[L::Words; 4]; 4], from: usize, count: usize) -> L {
        let mut sum = L::zero();
        if let Some(line) = W::LINE {
            for chunk in 0..count {
                let lane = line.lane(from + chunk);
                sum = sum.mul_add(L::as_floats(columns[lane / 4][lane % 4]), self.0[chunk]);
            }
        }
        sum
    }
}
