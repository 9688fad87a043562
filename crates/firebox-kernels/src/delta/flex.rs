//! The gated delta rule on the CPU.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use rayon::prelude::*;

use super::{DeltaOps, EPSILON, Heads};
use crate::flex::{compact, contiguous, dims, elements, tensor};
use crate::simd::{DOUBLES, Doubles, Kernel, Lanes, dispatch, f64_math};

impl DeltaOps for Flex {
    fn delta_rule(
        mixed: FlexTensor,
        step: FlexTensor,
        decay: FlexTensor,
        rate: FlexTensor,
        bias: FlexTensor,
        memory: FlexTensor,
        heads: Heads,
        logarithmic: bool,
    ) -> (FlexTensor, FlexTensor) {
        // The memory is updated in place if it is not shared.
        let mut memory = compact(memory);
        let [mixed, step, decay, rate, bias] = [mixed, step, decay, rate, bias].map(contiguous);
        let [count, channels] = dims(&mixed);
        let Heads { value_heads, key_width, value_width, .. } = heads;
        assert_eq!(channels, heads.channels(), "the channels do not fit the heads");
        assert_eq!(dims(&memory), [value_heads, key_width, value_width], "the memory does not fit the heads");
        assert_eq!((dims(&step), dims(&decay)), ([count, value_heads], [count, value_heads]));
        let width = value_heads * value_width;
        let mut read = vec![0.0; count * width];
        if read.is_empty() || key_width == 0 {
            return (tensor(read, [count, width]), memory);
        }
        let inputs = Inputs {
            mixed: elements(&mixed),
            step: elements(&step),
            decay: elements(&decay),
            rate: elements(&rate),
            bias: elements(&bias),
            heads,
            logarithmic,
        };
        let matrices = memory.storage_mut::<f64>().par_chunks_mut(key_width * value_width);
        let of_heads = matrices.zip(read.par_chunks_mut(count * value_width)).enumerate();
        of_heads.for_each(|(head, (matrix, read))| dispatch(Head { inputs: &inputs, head, matrix, read }));
        let read = if count == 1 { read } else { by_token(&read, count, heads) };
        (tensor(read, [count, width]), memory)
    }
}

/// From `[value heads, tokens, value width]` to `[tokens, value heads, value width]`.
fn by_token(read: &[f32], count: usize, heads: Heads) -> Vec<f32> {
    let Heads { value_heads, value_width, .. } = heads;
    let mut by_token = Vec::with_capacity(read.len());
    for token in 0..count {
        for head in 0..value_heads {
            by_token.extend_from_slice(&read[(head * count + token) * value_width..][..value_width]);
        }
    }
    by_token
}

/// Inputs of all heads.
struct Inputs<'a> {
    mixed: &'a [f64],
    step: &'a [f32],
    decay: &'a [f32],
    rate: &'a [f32],
    bias: &'a [f32],
    heads: Heads,
    logarithmic: bool,
}

/// Tokens whose queries and keys are kept in a fraction of the L2 cache.
const TOKENS: usize = 32;

/// Columns of a matrix that pass through the tokens together. Columns are independent, and with 128 rows
/// these fill half of an L1 cache.
const COLUMNS: usize = 2 * DOUBLES;

/// Columns that pass through a single token together, in place: a matrix that is read once is read fastest in
/// long pieces.
const WIDE_COLUMNS: usize = 8 * DOUBLES;

/// The tokens and the matrix of one head.
struct Head<'a> {
    inputs: &'a Inputs<'a>,
    head: usize,
    /// `[key width, value width]`
    matrix: &'a mut [f64],
    /// `[tokens, value width]`
    read: &'a mut [f32],
}

impl Kernel for Head<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { inputs, head, matrix, read } = self;
        let Heads { key_heads, value_heads, key_width, value_width, .. } = inputs.heads;
        let key_head = inputs.heads.key_head(head);
        let query_at = key_head * key_width;
        let key_at = (key_heads + key_head) * key_width;
        let value_at = 2 * key_heads * key_width + head * value_width;
        let rate = f64::from(inputs.rate[head]);
        let rate = if inputs.logarithmic { -f64_math::exp(rate) } else { rate };
        let bias = f64::from(inputs.bias[head]);
        let query_scale = 1.0 / (key_width as f64).sqrt();

        let count = read.len() / value_width;
        let mut gates = [Gate::default(); TOKENS];
        let mut directions = vec![0.0; 2 * TOKENS.min(count) * key_width];
        let mut columns = vec![[0.0; COLUMNS]; key_width];
        for (part, read) in read.chunks_mut(TOKENS * value_width).enumerate() {
            let count = read.len() / value_width;
            let first = part * TOKENS;
            let mixed = &inputs.mixed[first * inputs.heads.channels()..];
            let mixed = mixed.chunks_exact(inputs.heads.channels());
            let (queries, keys) = directions[..2 * count * key_width].split_at_mut(count * key_width);
            let into = queries.chunks_exact_mut(key_width).zip(keys.chunks_exact_mut(key_width));
            for ((token, (query, key)), mixed) in into.enumerate().zip(mixed) {
                unit(&mixed[query_at..][..key_width], query_scale, query);
                unit(&mixed[key_at..][..key_width], 1.0, key);
                let index = (first + token) * value_heads + head;
                gates[token] = Gate {
                    decay: f64_math::exp(softplus(f64::from(inputs.decay[index]) + bias) * rate),
                    step: f64_math::sigmoid(f64::from(inputs.step[index])),
                };
            }
            let values = &inputs.mixed[first * inputs.heads.channels() + value_at..];
            let through =
                Through { queries, keys, gates: &gates[..count], values, stride: inputs.heads.channels() };
            let mut in_place = 0;
            if count == 1 {
                while in_place + WIDE_COLUMNS <= value_width {
                    through.once::<L::Doubles>(matrix, in_place, read);
                    in_place += WIDE_COLUMNS;
                }
            }
            for start in (in_place..value_width).step_by(COLUMNS) {
                let width = COLUMNS.min(value_width - start);
                for (columns, row) in columns.iter_mut().zip(matrix.chunks_exact(value_width)) {
                    let row = &row[start..][..width];
                    // A constant length avoids a call for every row.
                    match row.first_chunk::<COLUMNS>() {
                        Some(whole) => *columns = *whole,
                        None => columns[..width].copy_from_slice(row),
                    }
                }
                through.run::<L>(&mut columns, start, width, read, value_width);
                for (columns, row) in columns.iter().zip(matrix.chunks_exact_mut(value_width)) {
                    let row = &mut row[start..][..width];
                    match row.first_chunk_mut::<COLUMNS>() {
                        Some(whole) => *whole = *columns,
                        None => row.copy_from_slice(&columns[..width]),
                    }
                }
            }
        }
    }
}

/// Decay and step size of a token.
#[derive(Clone, Copy, Default)]
struct Gate {
    decay: f64,
    step: f64,
}

/// The tokens that columns pass through.
struct Through<'a> {
    queries: &'a [f64],
    keys: &'a [f64],
    gates: &'a [Gate],
    /// The first token's value; those of the next tokens follow at `stride`.
    values: &'a [f64],
    stride: usize,
}

impl Through<'_> {
    /// Each pass over the columns corrects them towards one token and decays them for the next, so that a
    /// token costs one pass instead of two.
    #[inline(always)]
    fn run<L: Lanes>(
        &self,
        columns: &mut [[f64; COLUMNS]],
        start: usize,
        width: usize,
        read: &mut [f32],
        value_width: usize,
    ) {
        let key_width = columns.len();
        let mut recalled = [0.0; COLUMNS];
        forget::<L::Doubles>(columns, self.gates[0].decay, &self.keys[..key_width], &mut recalled);
        for (token, gate) in self.gates.iter().enumerate() {
            let mut correction = [0.0; COLUMNS];
            let value = &self.values[token * self.stride + start..][..width];
            for lane in 0..width {
                correction[lane] = (value[lane] - recalled[lane]) * gate.step;
            }
            let at = token * key_width;
            let (key, query) = (&self.keys[at..][..key_width], &self.queries[at..][..key_width]);
            let mut found = [0.0; COLUMNS];
            match self.gates.get(token + 1) {
                Some(next) => {
                    let next_key = &self.keys[at + key_width..][..key_width];
                    correct_and_forget::<L::Doubles>(
                        columns,
                        (key, query, next_key),
                        &correction,
                        next.decay,
                        &mut found,
                        &mut recalled,
                    );
                }
                None => correct::<L::Doubles>(columns, (key, query), &correction, &mut found),
            }
            for (read, found) in read[token * value_width + start..][..width].iter_mut().zip(found) {
                *read = found as f32;
            }
        }
    }

    /// Passes columns through the first token, with the operations of [`run`](Self::run) in the same order.
    #[inline(always)]
    fn once<D: Doubles>(&self, matrix: &mut [f64], start: usize, read: &mut [f32]) {
        const VECTORS: usize = WIDE_COLUMNS / DOUBLES;
        let value_width = read.len();
        let Gate { decay, step } = self.gates[0];
        let decay = D::splat(decay);
        let mut sums = [D::splat(0.0); VECTORS];
        for (row, key) in matrix.chunks_exact(value_width).zip(self.keys) {
            let key = D::splat(*key);
            let vectors = row[start..][..WIDE_COLUMNS].as_chunks::<DOUBLES>().0;
            for (sum, vector) in sums.iter_mut().zip(vectors) {
                *sum = sum.mul_add(key, D::load(vector).mul(decay));
            }
        }
        let mut recalled = [[0.0; DOUBLES]; VECTORS];
        for (recalled, sum) in recalled.iter_mut().zip(sums) {
            sum.store(recalled);
        }
        let mut corrections = [D::splat(0.0); VECTORS];
        let values = self.values[start..][..WIDE_COLUMNS].as_chunks::<DOUBLES>().0;
        for ((correction, recalled), value) in corrections.iter_mut().zip(recalled).zip(values) {
            let mut lanes = [0.0; DOUBLES];
            for lane in 0..DOUBLES {
                lanes[lane] = (value[lane] - recalled[lane]) * step;
            }
            *correction = D::load(&lanes);
        }
        let mut sums = [D::splat(0.0); VECTORS];
        for ((row, key), query) in matrix.chunks_exact_mut(value_width).zip(self.keys).zip(self.queries) {
            let (key, query) = (D::splat(*key), D::splat(*query));
            let vectors = row[start..][..WIDE_COLUMNS].as_chunks_mut::<DOUBLES>().0;
            for ((sum, vector), correction) in sums.iter_mut().zip(vectors).zip(corrections) {
                let corrected = D::load(vector).mul(decay).mul_add(key, correction);
                *sum = sum.mul_add(query, corrected);
                corrected.store(vector);
            }
        }
        for (read, sum) in read[start..][..WIDE_COLUMNS].as_chunks_mut::<DOUBLES>().0.iter_mut().zip(sums) {
            let mut found = [0.0; DOUBLES];
            sum.store(&mut found);
            for (read, found) in read.iter_mut().zip(found) {
                *read = found as f32;
            }
        }
    }
}

#[inline(always)]
fn load<D: Doubles>(values: &[f64; COLUMNS]) -> (D, D) {
    let (first, second) = values.split_at(DOUBLES);
    match (first.first_chunk(), second.first_chunk()) {
        (Some(first), Some(second)) => (D::load(first), D::load(second)),
        _ => unreachable!("two vectors of columns"),
    }
}

#[inline(always)]
fn store<D: Doubles>(vectors: (D, D), values: &mut [f64; COLUMNS]) {
    let (first, second) = values.split_at_mut(DOUBLES);
    if let (Some(first), Some(second)) = (first.first_chunk_mut(), second.first_chunk_mut()) {
        vectors.0.store(first);
        vectors.1.store(second);
    }
}

#[inline(always)]
fn forget<D: Doubles>(
    columns: &mut [[f64; COLUMNS]],
    decay: f64,
    key: &[f64],
    recalled: &mut [f64; COLUMNS],
) {
    let decay = D::splat(decay);
    let mut sums = (D::splat(0.0), D::splat(0.0));
    for (row, key) in columns.iter_mut().zip(key) {
        let (first, second) = load::<D>(row);
        let kept = (first.mul(decay), second.mul(decay));
        store(kept, row);
        let key = D::splat(*key);
        sums = (sums.0.mul_add(key, kept.0), sums.1.mul_add(key, kept.1));
    }
    store(sums, recalled);
}

#[inline(always)]
fn correct<D: Doubles>(
    columns: &mut [[f64; COLUMNS]],
    (key, query): (&[f64], &[f64]),
    correction: &[f64; COLUMNS],
    found: &mut [f64; COLUMNS],
) {
    let correction = load::<D>(correction);
    let mut sums = (D::splat(0.0), D::splat(0.0));
    for ((row, key), query) in columns.iter_mut().zip(key).zip(query) {
        let (first, second) = load::<D>(row);
        let (key, query) = (D::splat(*key), D::splat(*query));
        let corrected = (first.mul_add(key, correction.0), second.mul_add(key, correction.1));
        store(corrected, row);
        sums = (sums.0.mul_add(query, corrected.0), sums.1.mul_add(query, corrected.1));
    }
    store(sums, found);
}

/// [`correct`], and [`forget`] for the next token, with the same operations in the same order.
#[inline(always)]
fn correct_and_forget<D: Doubles>(
    columns: &mut [[f64; COLUMNS]],
    (key, query, next_key): (&[f64], &[f64], &[f64]),
    correction: &[f64; COLUMNS],
    decay: f64,
    found: &mut [f64; COLUMNS],
    recalled: &mut [f64; COLUMNS],
) {
    let (correction, decay) = (load::<D>(correction), D::splat(decay));
    let mut read = (D::splat(0.0), D::splat(0.0));
    let mut recall = (D::splat(0.0), D::splat(0.0));
    for (((row, key), query), next_key) in columns.iter_mut().zip(key).zip(query).zip(next_key) {
        let (first, second) = load::<D>(row);
        let (key, query, next_key) = (D::splat(*key), D::splat(*query), D::splat(*next_key));
        let corrected = (first.mul_add(key, correction.0), second.mul_add(key, correction.1));
        read = (read.0.mul_add(query, corrected.0), read.1.mul_add(query, corrected.1));
        let kept = (corrected.0.mul(decay), corrected.1.mul(decay));
        recall = (recall.0.mul_add(next_key, kept.0), recall.1.mul_add(next_key, kept.1));
        store(kept, row);
    }
    store(read, found);
    store(recall, recalled);
}

/// Scales a vector to length `scale`.
#[inline(always)]
fn unit(vector: &[f64], scale: f64, result: &mut [f64]) {
    let mut squares = [0.0; DOUBLES];
    let (chunks, rest) = vector.as_chunks::<DOUBLES>();
    for chunk in chunks {
        for (square, value) in squares.iter_mut().zip(chunk) {
            *square += value * value;
        }
    }
    for (square, value) in squares.iter_mut().zip(rest) {
        *square += value * value;
    }
    let mut sum = 0.0;
    for square in squares {
        sum += square;
    }
    let factor = scale / (sum + EPSILON).sqrt();
    for (result, value) in result.iter_mut().zip(vector) {
        *result = value * factor;
    }
}

/// `ln(1 + eˣ)`, or x above 20, as in Burn and in the models' training code.
#[inline(always)]
fn softplus(x: f64) -> f64 {
    if x > 20.0 { x } else { f64_math::exp(x).ln_1p() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::on_each_instruction_set;

    const HEADS: Heads =
        Heads { key_heads: 1, value_heads: 1, key_width: 11, value_width: WIDE_COLUMNS + 19, tiled: false };
    const COUNT: usize = TOKENS + 5;

    fn ramp(count: usize, step: usize) -> Vec<f64> {
        (0..count).map(|i| (i * step % 23) as f64 / 11.0 - 1.0).collect()
    }

    /// The rule one element at a time.
    fn plainly(inputs: &Inputs<'_>, matrix: &mut [f64], read: &mut [f32]) {
        let Heads { key_width, value_width, .. } = HEADS;
        for token in 0..COUNT {
            let mixed = &inputs.mixed[token * HEADS.channels()..][..HEADS.channels()];
            let unit = |vector: &[f64]| -> Vec<f64> {
                let square: f64 = vector.iter().map(|value| value * value).sum();
                vector.iter().map(|value| value / (square + EPSILON).sqrt()).collect()
            };
            let (query, key) = (unit(&mixed[..key_width]), unit(&mixed[key_width..2 * key_width]));
            let softplus = (f64::from(inputs.decay[token]) + f64::from(inputs.bias[0])).exp().ln_1p();
            let decay = (softplus * f64::from(inputs.rate[0])).exp();
            let step = 1.0 / (1.0 + (-f64::from(inputs.step[token])).exp());
            for column in 0..value_width {
                let element = |row: usize| row * value_width + column;
                for row in 0..key_width {
                    matrix[element(row)] *= decay;
                }
                let recalled: f64 = (0..key_width).map(|row| key[row] * matrix[element(row)]).sum();
                let correction = (mixed[2 * key_width + column] - recalled) * step;
                for row in 0..key_width {
                    matrix[element(row)] += key[row] * correction;
                }
                let found: f64 = (0..key_width).map(|row| query[row] * matrix[element(row)]).sum();
                read[token * value_width + column] = (found / (key_width as f64).sqrt()) as f32;
            }
        }
    }

    struct Check<'a> {
        inputs: &'a Inputs<'a>,
        expected: (&'a [f64], &'a [f32]),
        name: &'static str,
    }

    impl Kernel for Check<'_> {
        #[inline(always)]
        fn run<L: Lanes>(self) {
            let Self { inputs, expected, name } = self;
            let Heads { key_width, value_width, .. } = HEADS;
            let (mut matrix, mut read) = (ramp(key_width * value_width, 7), vec![0.0; COUNT * value_width]);
            Head { inputs, head: 0, matrix: &mut matrix, read: &mut read }.run::<L>();
            for (found, expected) in matrix.iter().zip(expected.0) {
                assert!((found - expected).abs() < 1e-12, "{name}: {found} instead of {expected}");
            }
            for (found, expected) in read.iter().zip(expected.1) {
                assert!((found - expected).abs() < 1e-6, "{name}: {found} instead of {expected}");
            }
            // Single tokens use other code for wide columns.
            let (mut one_by_one, channels) = (ramp(key_width * value_width, 7), HEADS.channels());
            for (token, expected) in read.chunks_exact(value_width).enumerate() {
                let alone = Inputs {
                    mixed: &inputs.mixed[token * channels..][..channels],
                    step: &inputs.step[token..=token],
                    decay: &inputs.decay[token..=token],
                    ..*inputs
                };
                let mut read = vec![0.0; value_width];
                Head { inputs: &alone, head: 0, matrix: &mut one_by_one, read: &mut read }.run::<L>();
                assert_eq!(read, expected, "{name}, token {token}");
            }
            assert_eq!(one_by_one, matrix, "{name}");
        }
    }

    #[test]
    fn every_instruction_set_corrects() {
        let Heads { key_width, value_width, .. } = HEADS;
        let mixed = ramp(COUNT * HEADS.channels(), 5);
        let narrow = |values: Vec<f64>| -> Vec<f32> { values.iter().map(|value| *value as f32).collect() };
        let (step, decay) = (narrow(ramp(COUNT, 3)), narrow(ramp(COUNT, 9)));
        let inputs = Inputs {
            mixed: &mixed,
            step: &step,
            decay: &decay,
            rate: &[-0.3],
            bias: &[0.2],
            heads: HEADS,
            logarithmic: false,
        };
        let mut matrix = ramp(key_width * value_width, 7);
        let mut read = vec![0.0; COUNT * value_width];
        plainly(&inputs, &mut matrix, &mut read);
        on_each_instruction_set(|name| Check { inputs: &inputs, expected: (&matrix, &read), name });
    }
}
