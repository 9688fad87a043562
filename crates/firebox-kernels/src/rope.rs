//! Rotation of pairs of elements by the angle of their position.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Flex, backend_extension};
use burn::tensor::Tensor;

use crate::flex::{Dispatched, dims, elements, is_flex, tensor};

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
    fn rotate(
        heads: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        interleaved: bool,
    ) -> FloatTensor<Self> {
        let (heads, cos, sin) = (heads.to_contiguous(), cos.to_contiguous(), sin.to_contiguous());
        let [rows, count, head_dim] = dims(&heads);
        let [_, _, pairs] = dims(&cos);
        let (cos, sin): (&[f32], &[f32]) = (elements(&cos), elements(&sin));
        let mut rotated = elements::<f32>(&heads).to_vec();
        let angles = cos.chunks_exact(pairs).zip(sin.chunks_exact(pairs));
        for (row, (cos, sin)) in rotated.chunks_exact_mut(count * head_dim).zip(angles) {
            for head in row.chunks_exact_mut(head_dim) {
                turn(head, cos, sin, interleaved);
            }
        }
        tensor(rotated, [rows, count, head_dim])
    }

    fn rotate_by(
        keys: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        interleaved: bool,
    ) -> FloatTensor<Self> {
        let (keys, cos, sin) = (keys.to_contiguous(), cos.to_contiguous(), sin.to_contiguous());
        let [heads, positions, head_dim] = dims(&keys);
        let (cos, sin): (&[f32], &[f32]) = (elements(&cos), elements(&sin));
        let mut rotated = elements::<f32>(&keys).to_vec();
        for key in rotated.chunks_exact_mut(head_dim) {
            turn(key, cos, sin, interleaved);
        }
        tensor(rotated, [heads, positions, head_dim])
    }
}

/// Turns the pairs of one head, one angle each.
fn turn(head: &mut [f32], cos: &[f32], sin: &[f32], interleaved: bool) {
    if interleaved {
        for ((pair, cos), sin) in head.chunks_exact_mut(2).zip(cos).zip(sin) {
            (pair[0], pair[1]) = (pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin);
        }
    } else {
        let (first, rest) = head.split_at_mut(cos.len());
        for (((a, b), cos), sin) in first.iter_mut().zip(rest).zip(cos).zip(sin) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}
