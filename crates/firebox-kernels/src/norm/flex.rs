//! RMS normalisation on the CPU.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;

use super::NormOps;
use crate::flex::{compact, contiguous, dims, elements, tensor};
use crate::simd::{Kernel, LANES, Lanes, dispatch};
use crate::thread_pool::parallel_for_each;

/// Elements below which a second thread costs more than it gains.
pub(super) const PIECE_ELEMENTS: usize = 1 << 16;

impl NormOps for Flex {
    fn rms_norm(x: FlexTensor, weight: FlexTensor, epsilon: f64, offset: f32) -> FlexTensor {
        // Written over `x` if it is not shared.
        let (mut x, weight) = (compact(x), contiguous(weight));
        let width = x.layout().shape().last().copied();
        let weight: &[f32] = elements(&weight);
        assert_eq!(Some(weight.len()), width, "the weight is not as wide as a row");
        if !weight.is_empty() {
            let piece = PIECE_ELEMENTS.div_ceil(weight.len()) * weight.len();
            let pieces = x.storage_mut::<f32>().chunks_mut(piece);
            parallel_for_each(pieces, |rows| dispatch(Norm { rows, weight, epsilon, offset }));
        }
        x
    }

    fn add_rms_norm(
        x: FlexTensor,
        residual: FlexTensor,
        weight: FlexTensor,
        epsilon: f64,
        offset: f32,
    ) -> (FlexTensor, FlexTensor) {
        assert_eq!(dims::<2>(&x), dims::<2>(&residual), "the sum and the residual differ in shape");
        // The sum is written over `x` if it is not shared.
        let (mut sum, residual, weight) = (compact(x), contiguous(residual), contiguous(weight));
        let [rows, width] = dims(&sum);
        let (residual, weight): (&[f32], &[f32]) = (elements(&residual), elements(&weight));
        assert_eq!(weight.len(), width, "the weight is not as wide as a row");
        let mut normed = vec![0.0; rows * width];
        if width > 0 {
            let piece = PIECE_ELEMENTS.div_ceil(width) * width;
            let sums = sum.storage_mut::<f32>().chunks_mut(piece);
            let pieces = sums.zip(residual.chunks(piece)).zip(normed.chunks_mut(piece));
            parallel_for_each(pieces, |((sum, residual), normed)| {
                dispatch(AddNorm { sum, residual, normed, weight, epsilon, offset });
            });
        }
        (sum, tensor(normed, [rows, width]))
    }
}

/// Normalises some rows.
struct Norm<'a> {
    rows: &'a mut [f32],
    weight: &'a [f32],
    epsilon: f64,
    offset: f32,
}

impl Kernel for Norm<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { rows, weight, epsilon, offset } = self;
        let width = weight.len();
        for row in rows.chunks_exact_mut(width) {
            let mean_square = sum_of_squares::<L>(row) / width as f32;
            let scale = 1.0 / (mean_square + epsilon as f32).sqrt();
            for (x, weight) in row.iter_mut().zip(weight) {
                *x = *x * scale * (weight + offset);
            }
        }
    }
}

/// Adds and normalises some rows.
struct AddNorm<'a> {
    sum: &'a mut [f32],
    residual: &'a [f32],
    normed: &'a mut [f32],
    weight: &'a [f32],
    epsilon: f64,
    offset: f32,
}

impl Kernel for AddNorm<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { sum, residual, normed, weight, epsilon, offset } = self;
        let width = weight.len();
        let rows = sum.chunks_exact_mut(width).zip(residual.chunks_exact(width));
        // Row by row, so that the sum is still in the cache when it is read again.
        for ((sum, residual), normed) in rows.zip(normed.chunks_exact_mut(width)) {
            for (sum, residual) in sum.iter_mut().zip(residual) {
                *sum += residual;
            }
            normed.copy_from_slice(sum);
            Norm { rows: normed, weight, epsilon, offset }.run::<L>();
        }
    }
}

/// Returns the sum of squares, in four vectors to shorten the chains of additions.
#[inline(always)]
pub(super) fn sum_of_squares<L: Lanes>(row: &[f32]) -> f32 {
    let (vectors, rest) = row.as_chunks::<LANES>();
    let (fours, vectors) = vectors.as_chunks::<4>();
    let (mut a, mut b, mut c, mut d) = (L::zero(), L::zero(), L::zero(), L::zero());
    for [first, second, third, fourth] in fours {
        a = a.mul_add(L::load(first), L::load(first));
        b = b.mul_add(L::load(second), L::load(second));
        c = c.mul_add(L::load(third), L::load(third));
        d = d.mul_add(L::load(fourth), L::load(fourth));
    }
    for vector in vectors {
        a = a.mul_add(L::load(vector), L::load(vector));
    }
    let one = L::splat(1.0);
    let mut sum = a.mul_add(b, one).mul_add(c.mul_add(d, one), one).sum();
    for value in rest {
        sum += value * value;
    }
    sum
}
