//! Rotation of pairs of elements by the angle of their position.

use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Flex, backend_extension};
use burn::tensor::Tensor;
use rayon::prelude::*;

use crate::flex::{Dispatched, dims, elements, is_flex, whole};
use crate::simd::{Kernel, Lanes, dispatch};

/// Elements that one thread rotates before another takes part: some ten microseconds, more than waking a thread
/// costs.
const PIECE: usize = 1 << 16;

/// Rotates the first elements of every head of `[rows, heads, head_dim]`, as many as twice the `pairs` of
/// `cos` and `sin`, which are `[rows, 1, pairs]`. A pair is element `i` with element `i + pairs`, or, if
/// `interleaved`, element `2i` with element `2i + 1`.
pub fn rotate(heads: Tensor<3>, cos: Tensor<3>, sin: Tensor<3>, interleaved: bool) -> Tensor<3> {
    if !is_flex(&heads.device()) {
        return reference(heads, cos, sin, interleaved);
    }
    Tensor::from_dispatch(<Dispatched as RopeOps>::rotate(
        heads.into_dispatch(),
        cos.into_dispatch(),
        sin.into_dispatch(),
        interleaved,
    ))
}

/// The same in Burn's operations.
pub fn reference(heads: Tensor<3>, cos: Tensor<3>, sin: Tensor<3>, interleaved: bool) -> Tensor<3> {
    let [rows, count, head_dim] = heads.dims();
    let pairs = cos.dims()[2];
    let width = 2 * pairs;
    let turn = |first: Tensor<3>, second: Tensor<3>| {
        (
            first.clone().mul(cos.clone()) - second.clone().mul(sin.clone()),
            second.mul(cos.clone()) + first.mul(sin.clone()),
        )
    };
    let part = heads.clone().narrow(2, 0, width);
    let rotated = if interleaved {
        let pairs_last = part.reshape([rows, count, pairs, 2]);
        let element = |index| pairs_last.clone().narrow(3, index, 1).reshape([rows, count, pairs]);
        let (first, second) = turn(element(0), element(1));
        Tensor::stack::<4>(vec![first, second], 3).reshape([rows, count, width])
    } else {
        let (first, second) = turn(part.clone().narrow(2, 0, pairs), part.narrow(2, pairs, pairs));
        Tensor::cat(vec![first, second], 2)
    };
    if width == head_dim {
        rotated
    } else {
        Tensor::cat(vec![rotated, heads.narrow(2, width, head_dim - width)], 2)
    }
}

/// Rotates cached keys `[kv_heads, positions, head_dim]` on to other positions: all by the same angles, of which
/// `cos` and `sin` are `[pairs]`. Pairs are those of [`rotate`].
///
/// A key rotated to a position and then by the angles of a distance is the key rotated to the position that far
/// on, so positions that have been left free can be closed up without computing keys again.
pub fn rotate_by(keys: Tensor<3>, cos: Tensor<1>, sin: Tensor<1>, interleaved: bool) -> Tensor<3> {
    if !is_flex(&keys.device()) || keys.shape().num_elements() == 0 {
        return reference_by(keys, cos, sin, interleaved);
    }
    Tensor::from_dispatch(<Dispatched as RopeOps>::rotate_by(
        keys.into_dispatch(),
        cos.into_dispatch(),
        sin.into_dispatch(),
        interleaved,
    ))
}

/// The same in Burn's operations.
pub fn reference_by(keys: Tensor<3>, cos: Tensor<1>, sin: Tensor<1>, interleaved: bool) -> Tensor<3> {
    if keys.shape().num_elements() == 0 {
        return keys;
    }
    let pairs = cos.dims()[0];
    reference(keys, cos.reshape([1, 1, pairs]), sin.reshape([1, 1, pairs]), interleaved)
}

#[backend_extension(Flex)]
pub(crate) trait RopeOps: Backend {
    fn rotate(
        heads: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        interleaved: bool,
    ) -> FloatTensor<Self>;

    fn rotate_by(
        keys: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        interleaved: bool,
    ) -> FloatTensor<Self>;
}

impl RopeOps for Flex {
    fn rotate(heads: FlexTensor, cos: FlexTensor, sin: FlexTensor, interleaved: bool) -> FlexTensor {
        // Turned in place where nobody else holds the heads.
        let (mut heads, cos, sin) = (whole(heads), cos.to_contiguous(), sin.to_contiguous());
        let [rows, count, head_dim] = dims(&heads);
        let [angled, _, pairs] = dims(&cos);
        assert_eq!(angled, rows, "angles of other rows");
        let row = count * head_dim;
        if rows * row == 0 || pairs == 0 {
            return heads;
        }
        let (cos, sin): (&[f32], &[f32]) = (elements(&cos), elements(&sin));
        let together = PIECE.div_ceil(row);
        let pieces = heads.storage_mut::<f32>().par_chunks_mut(together * row);
        let angles = cos.par_chunks(together * pairs).zip(sin.par_chunks(together * pairs));
        pieces.zip(angles).for_each(|(heads, (cos, sin))| {
            dispatch(Rotation { heads, count, head_dim, cos, sin, pairs, interleaved });
        });
        heads
    }

    fn rotate_by(keys: FlexTensor, cos: FlexTensor, sin: FlexTensor, interleaved: bool) -> FlexTensor {
        let (mut keys, cos, sin) = (whole(keys), cos.to_contiguous(), sin.to_contiguous());
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

/// Keys that all turn by the same angles.
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

/// Some rows.
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

/// Turns the pairs of one head, one angle each.
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
