//! What attention means, in Burn's own operations.

use burn::tensor::{Device, Tensor, TensorData, activation};

use super::Attending;

/// See [`attend`](super::attend).
pub fn attend(query: Tensor<3>, keys: Tensor<3>, values: Tensor<3>, attending: Attending) -> Tensor<2> {
    let [rows, heads, head_dim] = query.dims();
    let [kv_heads, positions, _] = keys.dims();
    let sharing = heads / kv_heads;
    let query = query.reshape([rows, kv_heads, sharing, head_dim]).permute([1, 2, 0, 3]).reshape([
        kv_heads,
        sharing * rows,
        head_dim,
    ]);
    let mut scores = query.matmul(keys.transpose()).mul_scalar(attending.scale);
    if let Some(cap) = attending.softcap {
        scores = scores.div_scalar(cap).tanh().mul_scalar(cap);
    }
    if let Some(mask) = mask(rows, positions, attending, &scores.device()) {
        scores = scores.reshape([kv_heads, sharing, rows, positions]).add(mask.unsqueeze()).reshape([
            kv_heads,
            sharing * rows,
            positions,
        ]);
    }
    activation::softmax(scores, 2)
        .matmul(values)
        .reshape([kv_heads, sharing, rows, head_dim])
        .permute([2, 0, 1, 3])
        .reshape([rows, heads * head_dim])
}

/// 0 where visible and -inf elsewhere; absent where all is visible.
fn mask(rows: usize, positions: usize, attending: Attending, device: &Device) -> Option<Tensor<2>> {
    if (0..rows).all(|row| attending.visible(row) == (0..positions)) {
        return None;
    }
    let mut mask = vec![f32::NEG_INFINITY; rows * positions];
    for (row, mask) in mask.chunks_exact_mut(positions).enumerate() {
        mask[attending.visible(row)].fill(0.0);
    }
    Some(Tensor::from_data(TensorData::new(mask, [rows, positions]), device))
}
