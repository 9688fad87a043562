//! Reference implementation in Burn's operations.

use burn::tensor::{DType, Tensor, activation};

use super::{DecayParams, EPSILON, Heads, Tokens};

/// See [`delta_rule`](super::delta_rule). Computes in the dtype of the memory.
pub fn delta_rule(
    tokens: Tokens,
    decay_params: DecayParams,
    heads: Heads,
    mut memory: Tensor<3>,
) -> (Tensor<2>, Tensor<3>) {
    let Heads { key_heads, value_heads, key_width, value_width, .. } = heads;
    let [count, _] = tokens.mixed.dims();
    let dtype = memory.dtype();
    let wide = |tensor: Tensor<2>| tensor.cast(dtype);
    let rate = decay_params.rate.cast(dtype);
    let rate = if decay_params.logarithmic { rate.exp().neg() } else { rate };
    let bias = decay_params.bias.cast(dtype);
    let per_head = |values: Tensor<2>| values.transpose().reshape([value_heads, count, 1]);
    let step = per_head(activation::sigmoid(wide(tokens.step)));
    let decay = activation::softplus(wide(tokens.decay).add(bias.unsqueeze()), 1.0);
    let decay = per_head(decay.mul(rate.unsqueeze()).exp());
    let part = |from, heads, width| {
        let part = tokens.mixed.clone().narrow(1, from, heads * width);
        part.reshape([count, heads, width]).swap_dims(0, 1).cast(dtype)
    };
    let unit = |heads: Tensor<3>| {
        let square = heads.clone().square().sum_dim(2);
        heads.div(square.add_scalar(EPSILON).sqrt())
    };
    let query = unit(part(0, key_heads, key_width)).div_scalar((key_width as f64).sqrt());
    let query = heads.for_values(query);
    let key = heads.for_values(unit(part(key_heads * key_width, key_heads, key_width)));
    let value = part(2 * key_heads * key_width, value_heads, value_width);
    let mut read = vec![Tensor::zeros([value_heads, 0, value_width], (&memory.device(), dtype))];
    for token in 0..count {
        let at = |tensor: &Tensor<3>| tensor.clone().narrow(1, token, 1);
        memory = memory.mul(at(&decay));
        let recalled = at(&key).matmul(memory.clone());
        let correction = at(&value).sub(recalled).mul(at(&step));
        memory = memory.add(at(&key).transpose().mul(correction));
        read.push(at(&query).matmul(memory.clone()));
    }
    let read = Tensor::cat(read, 1).swap_dims(0, 1).reshape([count, value_heads * value_width]);
    (read.cast(DType::F32), memory)
}

impl Heads {
    /// Returns the key head of every value head.
    fn for_values(&self, heads: Tensor<3>) -> Tensor<3> {
        let of_value = (0..self.value_heads).map(|head| heads.clone().narrow(0, self.key_head(head), 1));
        Tensor::cat(of_value.collect(), 0)
    }
}
