//! Rotation on the CPU.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;

use super::RopeOps;
use crate::flex::{compact, contiguous, dims, elements};
use crate::simd::{Kernel, Lanes, dispatch};
use crate::thread_pool::parallel_for_each;

/// Elements below which a second thread costs more than it gains.
const PIECE_ELEMENTS: usize = 1 << 16;

impl RopeOps for Flex {
    fn rotate(heads: FlexTensor, cos: FlexTensor, sin: FlexTensor, interleaved: bool) -> FlexTensor {
        // Rotated in place if the heads are not shared.
        let (mut heads, cos, sin) = (compact(heads), contiguous(cos), contiguous(sin));
        let [rows, count, head_dim] = dims(&heads);
        let [angled, _, pairs] = dims(&cos);
        assert_eq!(angled, rows, "heads and angles differ in rows");
        let row = count * head_dim;
        if rows * row == 0 || pairs == 0 {
            return heads;
        }
        let (cos, sin): (&[f32], &[f32]) = (elements(&cos), elements(&sin));
        let rows_per_piece = PIECE_ELEMENTS.div_ceil(row);
        let pieces = heads.storage_mut::<f32>().chunks_mut(rows_per_piece * row);
        let angles = cos.chunks(rows_per_piece * pairs).zip(sin.chunks(rows_per_piece * pairs));
        parallel_for_each(pieces.zip(angles), |(heads, (cos, sin))| {
            dispatch(Rotation { heads, count, head_dim, cos, sin, pairs, interleaved });
        });
        heads
    }

    fn rotate_by(keys: FlexTensor, cos: FlexTensor, sin: FlexTensor, interleaved: bool) -> FlexTensor {
        let (mut keys, cos, sin) = (compact(keys), contiguous(cos), contiguous(sin));
        let [_, positions, head_dim] = dims(&keys);
        if positions * head_dim == 0 {
            return keys;
        }
        let (cos, sin): (&[f32], &[f32]) = (elements(&cos), elements(&sin));
        for heads in keys.storage_mut::<f32>().chunks_exact_mut(positions * head_dim) {
            dispatch(Shift { heads, head_dim, cos, sin, interleaved });
        }
        keys
    }
}

/// Rotates keys by the same angles.
struct Shift<'a> {
    heads: &'a mut [f32],
    head_dim: usize,
    cos: &'a [f32],
    sin: &'a [f32],
    interleaved: bool,
}

impl Kernel for Shift<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        for head in self.heads.chunks_exact_mut(self.head_dim) {
            turn(head, self.cos, self.sin, self.interleaved);
        }
    }
}

/// Rotates some rows.
struct Rotation<'a> {
    heads: &'a mut [f32],
    count: usize,
    head_dim: usize,
    cos: &'a [f32],
    sin: &'a [f32],
    pairs: usize,
    interleaved: bool,
}

impl Kernel for Rotation<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { heads, count, head_dim, cos, sin, pairs, interleaved } = self;
        let angles = cos.chunks_exact(pairs).zip(sin.chunks_exact(pairs));
        for (row, (cos, sin)) in heads.chunks_exact_mut(count * head_dim).zip(angles) {
            for head in row.chunks_exact_mut(head_dim) {
                turn(head, cos, sin, interleaved);
            }
        }
    }
}

/// Rotates the pairs of one head.
#[inline(always)]
fn turn(head: &mut [f32], cos: &[f32], sin: &[f32], interleaved: bool) {
    if interleaved {
        for ((pair, cos), sin) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
            *pair = [pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin];
        }
    } else {
        let (first, rest) = head.split_at_mut(cos.len());
        for (((a, b), cos), sin) in first.iter_mut().zip(rest).zip(cos).zip(sin) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}
