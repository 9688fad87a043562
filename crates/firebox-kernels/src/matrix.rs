//! Matrix products in f32.

use rayon::prelude::*;

use crate::simd::{Kernel, LANES, Lanes, dispatch};

/// Terms of a sum that are added in registers: a strip of the right operand stays in the L1 cache for all
/// rows.
const BLOCK_TERMS: usize = 192;

/// Most vectors of columns that are computed together.
const MAX_VECTORS: usize = 3;

/// Multiplications below which a second thread costs more than it gains.
const SINGLE_THREAD_WORK: usize = 1 << 17;

/// Pieces per thread, so that an interrupted thread does not delay the others.
const PIECES_PER_THREAD: usize = 2;

/// Least rows of a piece: every piece loads the whole right operand.
const PIECE_ROWS: usize = 48;

/// The left operand.
#[derive(Clone, Copy)]
pub(crate) struct Left<'a> {
    values: &'a [f32],
    stride: usize,
    /// Whether `values` holds the transpose.
    transposed: bool,
}

impl<'a> Left<'a> {
    /// A matrix whose rows start `stride` elements apart.
    pub fn new(values: &'a [f32], stride: usize) -> Self {
        Self { values, stride, transposed: false }
    }

    /// The transpose of such a matrix.
    pub fn transposed(values: &'a [f32], stride: usize) -> Self {
        Self { values, stride, transposed: true }
    }

    /// Returns the matrix without its first rows.
    fn after(self, rows: usize) -> Self {
        let start = if self.transposed { rows } else { rows * self.stride };
        Self { values: &self.values[start.min(self.values.len())..], ..self }
    }
}

/// The right operand.
pub(crate) trait Right: Sync {
    /// Loads sixteen elements of a row from `column` on, padded with zeros.
    fn sixteen<L: Lanes>(&self, row: usize, column: usize) -> L;
}

/// A row-major matrix of f32.
pub(crate) struct RowMajor<'a> {
    pub values: &'a [f32],
    pub stride: usize,
    pub columns: usize,
}

impl Right for RowMajor<'_> {
    #[inline(always)]
    fn sixteen<L: Lanes>(&self, row: usize, column: usize) -> L {
        let row = &self.values[row * self.stride + column..][..LANES.min(self.columns - column)];
        match row.first_chunk() {
            Some(whole) => L::load(whole),
            None => {
                let mut padded = [0.0; LANES];
                padded[..row.len()].copy_from_slice(row);
                L::load(&padded)
            }
        }
    }
}

/// Rows, terms of each sum, and columns of a product.
#[derive(Clone, Copy)]
pub(crate) struct Size {
    pub rows: usize,
    pub terms: usize,
    pub columns: usize,
}

/// Returns `left · right`, `[rows, columns]`, computed by all threads.
pub(crate) fn multiply<R: Right>(left: Left<'_>, right: &R, size: Size) -> Vec<f32> {
    let mut product = vec![0.0; size.rows * size.columns];
    add_product(left, right, size, &mut product);
    product
}

/// Adds `left · right` to `product`, by all threads.
pub(crate) fn add_product<R: Right>(left: Left<'_>, right: &R, size: Size, product: &mut [f32]) {
    let Size { rows, terms, columns } = size;
    if rows * terms * columns == 0 {
        return;
    }
    if rows * terms * columns < SINGLE_THREAD_WORK {
        return dispatch(Piece { left, right, size, product });
    }
    let pieces = PIECES_PER_THREAD * rayon::current_num_threads();
    let piece_rows = rows.div_ceil(pieces).max(PIECE_ROWS);
    product.par_chunks_mut(piece_rows * columns).enumerate().for_each(|(piece, product)| {
        let left = left.after(piece * piece_rows);
        dispatch(Piece { left, right, size: Size { rows: product.len() / columns, ..size }, product });
    });
}

struct Piece<'a, R> {
    left: Left<'a>,
    right: &'a R,
    size: Size,
    product: &'a mut [f32],
}

impl<R: Right> Kernel for Piece<'_, R> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        add::<L, R>(self.left, self.right, self.size, self.product, self.size.columns);
    }
}

#[repr(align(64))]
struct Panel([[[f32; LANES]; MAX_VECTORS]; BLOCK_TERMS]);

/// Adds `left · right` to rows that start `stride` elements apart, on the calling thread.
#[inline(always)]
pub(crate) fn add<L: Lanes, R: Right>(
    left: Left<'_>,
    right: &R,
    size: Size,
    sums: &mut [f32],
    stride: usize,
) {
    let mut panel = Panel([[[0.0; LANES]; MAX_VECTORS]; BLOCK_TERMS]);
    let mut column = 0;
    while column < size.columns {
        // Three vectors where two would leave a single one.
        let vectors = match (size.columns - column).div_ceil(LANES) {
            1 => 1,
            3 => 3,
            _ => 2,
        };
        for first in (0..size.terms).step_by(BLOCK_TERMS) {
            let count = BLOCK_TERMS.min(size.terms - first);
            for (term, panel) in panel.0[..count].iter_mut().enumerate() {
                for (vector, panel) in panel[..vectors].iter_mut().enumerate() {
                    let column = column + vector * LANES;
                    // Beyond the last column only if a row ends within the vectors.
                    *panel = right.sixteen::<L>(first + term, column).store();
                }
            }
            let strip =
                Strip { left, first, panel: &panel.0[..count], column, columns: size.columns, stride };
            match vectors {
                1 => strip.add_all::<L, 1>(size.rows, sums),
                2 => strip.add_all::<L, 2>(size.rows, sums),
                _ => strip.add_all::<L, 3>(size.rows, sums),
            }
        }
        column += vectors * LANES;
    }
}

/// A block of columns and terms.
struct Strip<'a> {
    left: Left<'a>,
    /// The first term.
    first: usize,
    panel: &'a [[[f32; LANES]; MAX_VECTORS]],
    column: usize,
    columns: usize,
    stride: usize,
}

impl Strip<'_> {
    /// Adds the products of all rows, as many at a time as fit the registers.
    #[inline(always)]
    fn add_all<L: Lanes, const VECTORS: usize>(&self, rows: usize, sums: &mut [f32]) {
        let mut row = 0;
        while L::TILE_ROWS >= 6 && row + 6 <= rows {
            self.add::<L, VECTORS, 6>(row, sums);
            row += 6;
        }
        while L::TILE_ROWS >= 2 && row + 2 <= rows {
            self.add::<L, VECTORS, 2>(row, sums);
            row += 2;
        }
        while row < rows {
            self.add::<L, VECTORS, 1>(row, sums);
            row += 1;
        }
    }

    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // A term is of all rows at once.
    fn add<L: Lanes, const VECTORS: usize, const ROWS: usize>(&self, row: usize, sums: &mut [f32]) {
        let Self { left, first, panel, column, columns, stride } = *self;
        // One array per vector, so that the compiler keeps them in registers.
        let (mut sums0, mut sums1, mut sums2) = ([L::zero(); ROWS], [L::zero(); ROWS], [L::zero(); ROWS]);
        let mut straight: [&[f32]; ROWS] = [&[]; ROWS];
        if !left.transposed {
            for i in 0..ROWS {
                straight[i] = &left.values[(row + i) * left.stride + first..][..panel.len()];
            }
        }
        for (term, panel) in panel.iter().enumerate() {
            let mut numbers = [0.0; ROWS];
            if left.transposed {
                numbers.copy_from_slice(&left.values[(first + term) * left.stride + row..][..ROWS]);
            } else {
                for i in 0..ROWS {
                    numbers[i] = straight[i][term];
                }
            }
            let vector0 = L::load(&panel[0]);
            for i in 0..ROWS {
                sums0[i] = sums0[i].mul_add(vector0, L::splat(numbers[i]));
            }
            if VECTORS > 1 {
                let vector1 = L::load(&panel[1]);
                for i in 0..ROWS {
                    sums1[i] = sums1[i].mul_add(vector1, L::splat(numbers[i]));
                }
            }
            if VECTORS > 2 {
                let vector2 = L::load(&panel[2]);
                for i in 0..ROWS {
                    sums2[i] = sums2[i].mul_add(vector2, L::splat(numbers[i]));
                }
            }
        }
        for i in 0..ROWS {
            let sums = &mut sums[(row + i) * stride..][..columns];
            add_to::<L>(&mut sums[column..], sums0[i]);
            if VECTORS > 1 {
                add_to::<L>(&mut sums[column + LANES..], sums1[i]);
            }
            if VECTORS > 2 {
                add_to::<L>(&mut sums[column + 2 * LANES..], sums2[i]);
            }
        }
    }
}

/// Adds to the first elements of `numbers`.
#[inline(always)]
fn add_to<L: Lanes>(numbers: &mut [f32], sums: L) {
    match numbers.first_chunk_mut() {
        Some(whole) => *whole = L::load(whole).add(sums).store(),
        None => {
            for (number, sum) in numbers.iter_mut().zip(sums.store()) {
                *number += sum;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::on_each_instruction_set;

    struct Check(&'static str, Size, bool);

    impl Kernel for Check {
        fn run<L: Lanes>(self) {
            let Self(name, size, transposed) = self;
            let Size { rows, terms, columns } = size;
            let number = |i: usize| (i * 37 % 23) as f32 / 11.0 - 1.0;
            // Rows longer than the part that is used.
            let stride = if transposed { rows + 3 } else { terms + 3 };
            let a: Vec<f32> = (0..stride * rows.max(terms)).map(number).collect();
            let b: Vec<f32> = (0..terms * (columns + 2)).map(|i| number(i * 5)).collect();
            let left = if transposed { Left::transposed(&a, stride) } else { Left::new(&a, stride) };
            let right = RowMajor { values: &b, stride: columns + 2, columns };
            let mut sums = vec![1.0; rows * (columns + 1)];
            add::<L, _>(left, &right, size, &mut sums, columns + 1);
            for row in 0..rows {
                for column in 0..columns {
                    let sum: f64 = (0..terms)
                        .map(|term| {
                            let a = if transposed { a[term * stride + row] } else { a[row * stride + term] };
                            f64::from(a) * f64::from(b[term * (columns + 2) + column])
                        })
                        .sum();
                    let found = f64::from(sums[row * (columns + 1) + column]);
                    assert!(
                        (found - 1.0 - sum).abs() < 1e-4,
                        "{name} {rows} {terms} {columns}: {found}, {sum}"
                    );
                }
                assert_eq!(sums[row * (columns + 1) + columns], 1.0, "{name}: beyond the columns");
            }
        }
    }

    #[test]
    fn every_instruction_set_multiplies_matrices() {
        for (rows, terms, columns) in [(1, 1, 1), (7, 5, 16), (6, 200, 33), (13, 400, 48), (9, 30, 100)] {
            for transposed in [false, true] {
                on_each_instruction_set(|name| Check(name, Size { rows, terms, columns }, transposed));
            }
        }
    }
}
