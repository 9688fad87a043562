//! The selective state space on the CPU.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use rayon::prelude::*;

use super::{StateSpace, StateSpaceOps};
use crate::flex::{compact, contiguous, dims, elements, tensor};
use crate::simd::{Kernel, LANES, Lanes, dispatch, f64_math};

/// Columns of a matrix that pass through the tokens together. Columns are independent, and with 128 rows these
/// fill half of an L1 cache.
const COLUMNS: usize = 2 * LANES;

impl StateSpaceOps for Flex {
    fn scan(
        mixed: FlexTensor,
        step: FlexTensor,
        rate: FlexTensor,
        bias: FlexTensor,
        skip: FlexTensor,
        memory: FlexTensor,
        space: StateSpace,
    ) -> (FlexTensor, FlexTensor) {
        // The memory is updated in place if it is not shared.
        let mut memory = compact(memory);
        let [mixed, step, rate, bias, skip] = [mixed, step, rate, bias, skip].map(contiguous);
        let [count, channels] = dims(&mixed);
        let StateSpace { heads, width, states, .. } = space;
        assert_eq!(channels, space.channels(), "the channels do not fit the heads");
        assert_eq!(dims(&memory), [heads, states, width], "the memory does not fit the heads");
        assert_eq!(dims(&step), [count, heads], "the time steps do not fit the tokens");
        let mut read = vec![0.0; count * heads * width];
        if read.is_empty() || states == 0 {
            return (tensor(read, [count, heads * width]), memory);
        }
        let inputs = Inputs {
            mixed: elements(&mixed),
            step: elements(&step),
            rate: elements(&rate),
            bias: elements(&bias),
            skip: elements(&skip),
            space,
        };
        let matrices = memory.storage_mut::<f32>().par_chunks_mut(states * width);
        let of_heads = matrices.zip(read.par_chunks_mut(count * width)).enumerate();
        of_heads.for_each(|(head, (matrix, read))| dispatch(Head { inputs: &inputs, head, matrix, read }));
        let read = if count == 1 { read } else { by_token(&read, count, space) };
        (tensor(read, [count, heads * width]), memory)
    }
}

/// From `[heads, tokens, width]` to `[tokens, heads, width]`.
fn by_token(read: &[f32], count: usize, StateSpace { heads, width, .. }: StateSpace) -> Vec<f32> {
    let mut by_token = Vec::with_capacity(read.len());
    for token in 0..count {
        for head in 0..heads {
            by_token.extend_from_slice(&read[(head * count + token) * width..][..width]);
        }
    }
    by_token
}

/// Inputs of all heads.
struct Inputs<'a> {
    mixed: &'a [f32],
    step: &'a [f32],
    rate: &'a [f32],
    bias: &'a [f32],
    skip: &'a [f32],
    space: StateSpace,
}

/// The tokens and the matrix of one head.
struct Head<'a> {
    inputs: &'a Inputs<'a>,
    head: usize,
    /// `[states, width]`
    matrix: &'a mut [f32],
    /// `[tokens, width]`
    read: &'a mut [f32],
}

/// What a token does to a head's matrix.
#[derive(Clone, Copy)]
struct Gate {
    decay: f32,
    step: f32,
}

impl Kernel for Head<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { inputs, head, matrix, read } = self;
        let StateSpace { width, .. } = inputs.space;
        let gates: Vec<Gate> = (0..read.len() / width).map(|token| inputs.gate(token, head)).collect();
        let through = Through { inputs, head, gates: &gates };
        if width.is_multiple_of(COLUMNS) {
            let stride = width / COLUMNS;
            for block in 0..stride {
                let columns = &mut matrix.as_chunks_mut::<COLUMNS>().0[block..];
                through.run::<L>(columns, stride, block * COLUMNS, COLUMNS, read);
            }
            return;
        }
        let mut columns = vec![[0.0; COLUMNS]; inputs.space.states];
        for start in (0..width).step_by(COLUMNS) {
            let count = COLUMNS.min(width - start);
            for (columns, row) in columns.iter_mut().zip(matrix.chunks_exact(width)) {
                columns[..count].copy_from_slice(&row[start..][..count]);
            }
            through.run::<L>(&mut columns, 1, start, count, read);
            for (columns, row) in columns.iter().zip(matrix.chunks_exact_mut(width)) {
                row[start..][..count].copy_from_slice(&columns[..count]);
            }
        }
    }
}

impl Inputs<'_> {
    fn gate(&self, token: usize, head: usize) -> Gate {
        let StateSpace { heads, steps: [smallest, largest], .. } = self.space;
        let step = softplus(f64::from(self.step[token * heads + head]) + f64::from(self.bias[head]));
        // Comparisons pass NaN on.
        let step = if step < f64::from(smallest) { f64::from(smallest) } else { step };
        let step = if step > f64::from(largest) { f64::from(largest) } else { step };
        let rate = -f64_math::exp(f64::from(self.rate[head]));
        Gate { decay: f64_math::exp(step * rate) as f32, step: step as f32 }
    }
}

/// `ln(1 + eˣ)`, or x above 20, as in Burn and in the models' training code.
fn softplus(x: f64) -> f64 {
    if x > 20.0 { x } else { f64_math::exp(x).ln_1p() }
}

/// The tokens that columns of a head's matrix pass through.
struct Through<'a> {
    inputs: &'a Inputs<'a>,
    head: usize,
    gates: &'a [Gate],
}

impl Through<'_> {
    /// Takes every `stride`-th entry of `columns`, of which the first `count` columns, `start` and those behind it
    /// in the matrix, are in use.
    #[inline(always)]
    fn run<L: Lanes>(
        &self,
        columns: &mut [[f32; COLUMNS]],
        stride: usize,
        start: usize,
        count: usize,
        read: &mut [f32],
    ) {
        let StateSpace { heads, width, groups, states, .. } = self.inputs.space;
        let value_at = self.head * width + start;
        let write_at = heads * width + self.head / (heads / groups) * states;
        let read_at = write_at + groups * states;
        let skip = self.inputs.skip[self.head];
        let tokens = self.inputs.mixed.chunks_exact(self.inputs.space.channels());
        for ((mixed, gate), read) in tokens.zip(self.gates).zip(read.chunks_exact_mut(width)) {
            let mut value = [0.0; COLUMNS];
            value[..count].copy_from_slice(&mixed[value_at..][..count]);
            let mut found = value.map(|value| value * skip);
            let written = value.map(|value| value * gate.step);
            let directions = (&mixed[write_at..][..states], &mixed[read_at..][..states]);
            pass::<L>(columns, stride, directions, gate.decay, &written, &mut found);
            read[start..][..count].copy_from_slice(&found[..count]);
        }
    }
}

/// Takes columns through one token: decay, write, and add what is read to `found`.
#[inline(always)]
fn pass<L: Lanes>(
    columns: &mut [[f32; COLUMNS]],
    stride: usize,
    (write, read): (&[f32], &[f32]),
    decay: f32,
    value: &[f32; COLUMNS],
    found: &mut [f32; COLUMNS],
) {
    let (decay, value, mut sums) = (L::splat(decay), load::<L>(value), load::<L>(found));
    for ((row, write), read) in columns.iter_mut().step_by(stride).zip(write).zip(read) {
        let (first, second) = load::<L>(row);
        let (write, read) = (L::splat(*write), L::splat(*read));
        let first = first.mul(decay).mul_add(write, value.0);
        let second = second.mul(decay).mul_add(write, value.1);
        sums = (sums.0.mul_add(read, first), sums.1.mul_add(read, second));
        store((first, second), row);
    }
    store(sums, found);
}

#[inline(always)]
fn load<L: Lanes>(values: &[f32; COLUMNS]) -> (L, L) {
    let halves = values.as_chunks::<LANES>().0;
    (L::load(&halves[0]), L::load(&halves[1]))
}

#[inline(always)]
fn store<L: Lanes>(vectors: (L, L), values: &mut [f32; COLUMNS]) {
    let halves = values.as_chunks_mut::<LANES>().0;
    halves[0] = vectors.0.store();
    halves[1] = vectors.1.store();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::on_each_instruction_set;

    const COUNT: usize = 5;

    fn space(width: usize) -> StateSpace {
        StateSpace { heads: 2, width, groups: 1, states: 7, steps: [0.01, 0.9] }
    }

    fn ramp(count: usize, step: usize) -> Vec<f32> {
        (0..count).map(|i| (i * step % 23) as f32 / 11.0 - 1.0).collect()
    }

    /// The second head, one element at a time.
    fn plainly(inputs: &Inputs<'_>, matrix: &mut [f32], read: &mut [f32]) {
        let StateSpace { heads, width, states, steps, .. } = inputs.space;
        for token in 0..COUNT {
            let mixed = &inputs.mixed[token * inputs.space.channels()..][..inputs.space.channels()];
            let directions = &mixed[heads * width..];
            let step = f64::from(inputs.step[token * heads + 1]) + f64::from(inputs.bias[1]);
            let step = step.exp().ln_1p().clamp(f64::from(steps[0]), f64::from(steps[1]));
            let decay = (-step * f64::from(inputs.rate[1]).exp()).exp();
            for column in 0..width {
                let value = f64::from(mixed[width + column]);
                let mut found = value * f64::from(inputs.skip[1]);
                for state in 0..states {
                    let element = &mut matrix[state * width + column];
                    let after = f64::from(*element) * decay + f64::from(directions[state]) * value * step;
                    found += f64::from(directions[states + state]) * after;
                    *element = after as f32;
                }
                read[token * width + column] = found as f32;
            }
        }
    }

    struct Check<'a> {
        inputs: &'a Inputs<'a>,
        expected: (&'a [f32], &'a [f32]),
        name: &'static str,
    }

    impl Kernel for Check<'_> {
        #[inline(always)]
        fn run<L: Lanes>(self) {
            let Self { inputs, expected, name } = self;
            let StateSpace { width, states, .. } = inputs.space;
            let (mut matrix, mut read) = (ramp(states * width, 7), vec![0.0; COUNT * width]);
            Head { inputs, head: 1, matrix: &mut matrix, read: &mut read }.run::<L>();
            for (found, expected) in matrix.iter().chain(&read).zip(expected.0.iter().chain(expected.1)) {
                assert!((found - expected).abs() < 2e-6, "{name}: {found} instead of {expected}");
            }
        }
    }

    #[test]
    fn every_instruction_set_scans() {
        for width in [COLUMNS, 2 * COLUMNS, COLUMNS + 3, 5] {
            let space = space(width);
            let mixed = ramp(COUNT * space.channels(), 5);
            let step = ramp(COUNT * space.heads, 3);
            let inputs = Inputs {
                mixed: &mixed,
                step: &step,
                rate: &[0.3, -0.4],
                bias: &[0.1, 0.2],
                skip: &[0.7, 1.3],
                space,
            };
            let (mut matrix, mut read) = (ramp(space.states * width, 7), vec![0.0; COUNT * width]);
            plainly(&inputs, &mut matrix, &mut read);
            on_each_instruction_set(|name| Check { inputs: &inputs, expected: (&matrix, &read), name });
        }
    }
}
