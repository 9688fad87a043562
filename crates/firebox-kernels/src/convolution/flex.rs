//! The convolution on the CPU.

use std::ops::{Add, Mul};

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Element};
use rayon::prelude::*;

use super::{ConvolutionOps, ConvolutionParams};
use crate::flex::{contiguous, dims, elements, tensor};
use crate::simd::{Kernel, LANES, Lanes, dispatch, f64_math, sigmoid};

/// Channels whose sums are kept in registers together.
const BLOCK: usize = 2 * LANES;

/// Channels times tokens below which a second thread costs more than it gains.
const PIECE_ELEMENTS: usize = 1 << 14;

impl ConvolutionOps for Flex {
    fn convolve(
        x: FlexTensor,
        earlier: FlexTensor,
        taps: FlexTensor,
        params: ConvolutionParams,
    ) -> (FlexTensor, FlexTensor) {
        match (x.dtype(), params.exact) {
            (DType::F32, false) => compute::<f32, f32>(x, earlier, taps, params.silu),
            (DType::F32, true) => compute::<f32, f64>(x, earlier, taps, params.silu),
            _ => compute::<f64, f64>(x, earlier, taps, params.silu),
        }
    }
}

/// Element type of the inputs.
trait Term: Element + bytemuck::Pod + Send + Sync {
    const ZERO: Self;
}

/// Element type of the sums.
trait Sum: Term + Add<Output = Self> + Mul<Output = Self> {
    fn silu<L: Lanes>(sums: &mut [Self; BLOCK]);
}

impl Term for f32 {
    const ZERO: Self = 0.0;
}

impl Term for f64 {
    const ZERO: Self = 0.0;
}

impl Sum for f32 {
    #[inline(always)]
    fn silu<L: Lanes>(sums: &mut [Self; BLOCK]) {
        for vector in sums.as_chunks_mut::<LANES>().0 {
            let x = L::load(vector);
            *vector = x.mul(sigmoid(x)).store();
        }
    }
}

impl Sum for f64 {
    #[inline(always)]
    fn silu<L: Lanes>(sums: &mut [Self; BLOCK]) {
        for sum in sums {
            *sum *= f64_math::sigmoid(*sum);
        }
    }
}

fn compute<T: Term, S: Sum + From<T>>(
    x: FlexTensor,
    earlier: FlexTensor,
    taps: FlexTensor,
    silu: bool,
) -> (FlexTensor, FlexTensor) {
    let (x, earlier, taps) = (contiguous(x), contiguous(earlier), contiguous(taps));
    let [count, channels] = dims(&x);
    let [before, _] = dims(&earlier);
    assert_eq!(dims(&taps), [channels, before + 1], "the taps do not fit channels and kernel");
    assert_eq!(dims(&earlier), [before, channels], "earlier tokens have other channels");
    let rows = Padded::<T> { earlier: elements(&earlier), x: elements(&x), before, channels };
    let taps: &[T] = elements(&taps);
    let mut sums = vec![S::ZERO; count * channels];
    if channels > 0 {
        let tokens = PIECE_ELEMENTS.div_ceil(channels);
        sums.par_chunks_mut(tokens * channels).enumerate().for_each(|(piece, sums)| {
            dispatch(Piece { rows: &rows, taps, first: piece * tokens, sums, silu });
        });
    }
    let mut kept = Vec::with_capacity(before * channels);
    for row in count..count + before {
        kept.extend_from_slice(rows.row(row));
    }
    (tensor(sums, [count, channels]), tensor(kept, [before, channels]))
}

/// The earlier tokens followed by the new ones.
struct Padded<'a, T> {
    earlier: &'a [T],
    x: &'a [T],
    before: usize,
    channels: usize,
}

impl<T> Padded<'_, T> {
    #[inline(always)]
    fn row(&self, row: usize) -> &[T] {
        if row < self.before {
            &self.earlier[row * self.channels..][..self.channels]
        } else {
            &self.x[(row - self.before) * self.channels..][..self.channels]
        }
    }
}

/// Some tokens, from `first` on.
struct Piece<'a, T, S> {
    rows: &'a Padded<'a, T>,
    taps: &'a [T],
    first: usize,
    sums: &'a mut [S],
    silu: bool,
}

impl<T: Term, S: Sum + From<T>> Kernel for Piece<'_, T, S> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { rows, taps, first, sums: results, silu } = self;
        let (kernel, channels) = (rows.before + 1, rows.channels);
        let mut weights = vec![[S::ZERO; BLOCK]; kernel];
        for start in (0..channels).step_by(BLOCK) {
            let width = BLOCK.min(channels - start);
            // Transposes the taps once for all tokens.
            let block_taps = &taps[start * kernel..][..width * kernel];
            if kernel == 4 && width == BLOCK {
                // The usual kernel size: a constant lets the compiler use shuffles.
                spread::<T, S, 4>(block_taps, &mut weights);
            } else {
                for (tap, weights) in weights.iter_mut().enumerate() {
                    for (weight, taps) in weights.iter_mut().zip(block_taps.chunks_exact(kernel)) {
                        *weight = S::from(taps[tap]);
                    }
                }
            }
            for (token, result) in results.chunks_exact_mut(channels).enumerate() {
                let mut sums = [S::ZERO; BLOCK];
                for (tap, weights) in weights.iter().enumerate() {
                    let row = &rows.row(first + token + tap)[start..][..width];
                    if let Some(whole) = row.first_chunk::<BLOCK>() {
                        add_weighted(&mut sums, whole, weights);
                    } else {
                        let mut padded = [T::ZERO; BLOCK];
                        padded[..width].copy_from_slice(row);
                        add_weighted(&mut sums, &padded, weights);
                    }
                }
                if silu {
                    S::silu::<L>(&mut sums);
                }
                let result = &mut result[start..][..width];
                // A constant length avoids a call for every block.
                match result.first_chunk_mut::<BLOCK>() {
                    Some(whole) => *whole = sums,
                    None => result.copy_from_slice(&sums[..width]),
                }
            }
        }
    }
}

#[inline(always)]
fn spread<T: Term, S: Sum + From<T>, const KERNEL: usize>(taps: &[T], weights: &mut [[S; BLOCK]]) {
    let (Some(weights), (taps, _)) = (weights.first_chunk_mut::<KERNEL>(), taps.as_chunks::<KERNEL>()) else {
        return;
    };
    let Some(taps) = taps.first_chunk::<BLOCK>() else { return };
    for (tap, weights) in weights.iter_mut().enumerate() {
        for (weight, taps) in weights.iter_mut().zip(taps) {
            *weight = S::from(taps[tap]);
        }
    }
}

#[inline(always)]
fn add_weighted<T: Term, S: Sum + From<T>>(sums: &mut [S; BLOCK], row: &[T; BLOCK], weights: &[S; BLOCK]) {
    for lane in 0..BLOCK {
        sums[lane] = sums[lane] + S::from(row[lane]) * weights[lane];
    }
}
