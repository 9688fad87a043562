//! Reference implementation in Burn's operations: chunks of tokens by matrix products.

use burn::tensor::{Tensor, activation};

use super::{ScanParams, ScanTokens, StateSpace};

/// Tokens of a chunk. Products within a chunk grow with its square, and the memory is read and written once a
/// chunk.
const CHUNK: usize = 64;

/// See [`scan`](super::scan).
///
/// Tensors are `[groups, heads of a group, tokens, width]`, where directions have one head.
pub fn scan(
    tokens: ScanTokens,
    params: ScanParams,
    space: StateSpace,
    memory: Tensor<3>,
) -> (Tensor<2>, Tensor<3>) {
    let StateSpace { heads, width, groups, states, steps: [smallest, largest] } = space;
    let sharing = heads / groups;
    let [count, _] = tokens.mixed.dims();
    if count == 0 {
        return (Tensor::zeros([0, heads * width], &tokens.mixed.device()), memory);
    }
    let part = |from, heads, width| {
        let part = tokens.mixed.clone().narrow(1, from, groups * heads * width);
        part.reshape([count, groups * heads, width]).swap_dims(0, 1).reshape([groups, heads, count, width])
    };
    let value: Tensor<4> = part(0, sharing, width);
    let writes = part(heads * width, 1, states);
    let reads = part(heads * width + groups * states, 1, states);
    let step = activation::softplus(tokens.step.add(params.bias.unsqueeze()), 1.0).clamp_min(smallest);
    let step = if largest.is_finite() { step.clamp_max(largest) } else { step };
    // Logarithms of decays.
    let decay = step.clone().mul(params.rate.exp().neg().unsqueeze());
    let [step, decay] = [step, decay].map(|values| values.transpose().reshape([groups, sharing, count, 1]));
    let weighed = value.clone().mul(step);
    let mut memory = memory.reshape([groups, sharing, states, width]);
    let mut found = Vec::new();
    for first in (0..count).step_by(CHUNK) {
        let of_chunk = |tensor: &Tensor<4>| tensor.clone().narrow(2, first, CHUNK.min(count - first));
        let chunk = [&weighed, &writes, &reads, &decay].map(of_chunk);
        let (read, after) = if count - first == 1 { one(chunk, memory) } else { many(chunk, memory) };
        memory = after;
        found.push(read);
    }
    let found = if found.len() == 1 { found.remove(0) } else { Tensor::cat(found, 2) };
    let found = found.add(value.mul(params.skip.reshape([groups, sharing, 1, 1])));
    let found = found.reshape([heads, count, width]).swap_dims(0, 1);
    (found.reshape([count, heads * width]), memory.reshape([heads, states, width]))
}

/// One token: the matrix decays, is written to and read.
fn one([value, write, read, decay]: [Tensor<4>; 4], memory: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
    let memory = memory.mul(decay.exp()).add(write.transpose().mul(value));
    (read.matmul(memory.clone()), memory)
}

/// A chunk of tokens. What a token reads of an earlier one in the chunk is a product of their directions, as in
/// attention, times the decay between them; what it reads of tokens before the chunk is in the memory.
fn many([value, write, read, decay]: [Tensor<4>; 4], memory: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
    let [groups, sharing, count, _] = value.dims();
    let lower = |diagonal| {
        let ones: Tensor<2> = Tensor::ones([count, count], &value.device());
        ones.tril(diagonal).unsqueeze::<4>()
    };
    // From the token of a column to that of a row. Sums that begin at the column lose no digits to what came
    // before it.
    let between = decay.clone().expand([groups, sharing, count, count]).mul(lower(-1)).cumsum(2);
    let from_start = decay.cumsum(2);
    let to_end = between.clone().narrow(2, count - 1, 1).transpose().exp();
    let all = from_start.clone().narrow(2, count - 1, 1).exp();
    let scores = read.clone().matmul(write.clone().transpose()).mul(between.exp().mul(lower(0)));
    let found = scores.matmul(value.clone()).add(read.matmul(memory.clone()).mul(from_start.exp()));
    let memory = memory.mul(all).add(write.transpose().matmul(value.mul(to_end)));
    (found, memory)
}
