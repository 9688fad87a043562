//! Reference implementation in Burn's operations.

use burn::tensor::Tensor;

/// See [`rotate`](super::rotate).
pub fn rotate(heads: Tensor<3>, cos: Tensor<3>, sin: Tensor<3>, interleaved: bool) -> Tensor<3> {
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

/// See [`rotate_by`](super::rotate_by).
pub fn rotate_by(keys: Tensor<3>, cos: Tensor<1>, sin: Tensor<1>, interleaved: bool) -> Tensor<3> {
    if keys.shape().num_elements() == 0 {
        return keys;
    }
    let pairs = cos.dims()[0];
    rotate(keys, cos.reshape([1, 1, pairs]), sin.reshape([1, 1, pairs]), interleaved)
}
