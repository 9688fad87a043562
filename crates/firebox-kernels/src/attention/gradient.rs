//! Attention with a backward pass of its own.
//!
//! The softmax weights are not stored. The backward pass recomputes them block by block from the log-sum-exp.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Tensor};
use rayon::prelude::*;

use super::kv_tensor::{KvPrimitive, KvTensor};
use super::ops::AttentionOps;
use super::params::AttentionParams;
use super::span::Span;
use super::visibility::Visibility;
use crate::flex::{dims, elements, tensor};
use crate::graph::{Wanted, operand, record, records};
use crate::matrix::{Left, RowMajor, Size, add};
use crate::simd::{Kernel, LANES, Lanes, dispatch, exp, tanh};

/// Rows of a block.
const BLOCK_ROWS: usize = 64;

/// Positions of a block: its weights and those of [`BLOCK_ROWS`] rows stay in the L2 cache.
const BLOCK_POSITIONS: usize = 256;

/// Whether queries, keys or values are on a device that records gradients.
pub(super) fn recorded(query: &Tensor<3>, spans: &[Span]) -> bool {
    let of = |stored: &KvTensor| matches!(stored, KvTensor::Float(values) if records(&values.device()));
    records(&query.device()) || spans.iter().any(|span| of(&span.keys) || of(&span.values))
}

/// Attention over a single span of f32 without sinks, `[rows, heads, head_dim]`. Returns `None` in all other
/// cases.
pub(super) fn attention(
    query: &Tensor<3>,
    spans: &[Span],
    sinks: bool,
    params: AttentionParams,
) -> Option<Tensor<3>> {
    let [Span { keys: KvTensor::Float(keys), values: KvTensor::Float(values), position, visible }] = spans
    else {
        return None;
    };
    let single = [query.dtype(), keys.dtype(), values.dtype()] == [DType::F32; 3];
    if sinks || !single || query.shape().num_elements() * keys.shape().num_elements() == 0 {
        return None;
    }
    let operands = [query, keys, values].map(|tensor| operand(tensor.clone()));
    let [query, keys, values] = operands.each_ref().map(|operand| operand.numbers().to_contiguous());
    let held = [&keys, &values].map(|stored| KvPrimitive::Float(stored.clone()));
    let [held_keys, held_values] = held;
    let (output, log_sum_exp) =
        Flex::span_attention(query.clone(), held_keys, held_values, *position, visible.clone(), params);
    let state = ForwardState {
        query,
        keys,
        values,
        output: output.clone(),
        log_sum_exp,
        position: *position,
        visible: visible.clone(),
        params,
    };
    Some(record(operands, output, move |gradient, wanted| {
        only(state.backward(&gradient.to_contiguous()), wanted)
    }))
}

/// The operands and results of a forward pass.
struct ForwardState {
    /// `[rows, heads, head_dim]`
    query: FlexTensor,
    /// `[kv_heads, positions, head_dim]`
    keys: FlexTensor,
    values: FlexTensor,
    /// `[rows, heads, head_dim]`
    output: FlexTensor,
    /// `[rows, heads]`
    log_sum_exp: FlexTensor,
    position: usize,
    visible: Option<Visibility>,
    params: AttentionParams,
}

impl ForwardState {
    /// Returns the gradients of queries, keys and values.
    fn backward(&self, gradient: &FlexTensor) -> [FlexTensor; 3] {
        let [rows, heads, head_dim] = dims(&self.query);
        let [kv_heads, positions, _] = dims(&self.keys);
        let (mut query_grad, [mut key_grad, mut value_grad]) = (
            vec![0.0; rows * heads * head_dim],
            [(); 2].map(|()| vec![0.0; kv_heads * positions * head_dim]),
        );
        let sequence = Sequence {
            query: elements(&self.query),
            keys: elements(&self.keys),
            values: elements(&self.values),
            output: elements(&self.output),
            gradient: elements(gradient),
            log_sum_exp: elements(&self.log_sum_exp),
            rows,
            positions,
            heads: [heads, kv_heads],
            head_dim,
            steps: [positions * head_dim, head_dim],
            position: self.position,
            visible: self.visible.as_ref(),
            params: self.params,
        };
        sequence.backward(&mut query_grad, &mut key_grad, &mut value_grad);
        let stored = [kv_heads, positions, head_dim];
        [tensor(query_grad, [rows, heads, head_dim]), tensor(key_grad, stored), tensor(value_grad, stored)]
    }
}

/// Keeps the gradients that are wanted.
fn only<const N: usize>(gradients: [FlexTensor; N], wanted: Wanted<N>) -> [Option<FlexTensor>; N] {
    let mut wanted = wanted.into_iter();
    gradients.map(|gradient| wanted.next().is_some_and(|wanted| wanted).then_some(gradient))
}

/// The forward pass of one sequence and the gradient of its output.
struct Sequence<'a> {
    /// `[rows, heads, head_dim]`
    query: &'a [f32],
    keys: &'a [f32],
    values: &'a [f32],
    /// `[rows, heads, head_dim]`
    output: &'a [f32],
    /// Gradient of the output.
    gradient: &'a [f32],
    /// `[rows, heads]`
    log_sum_exp: &'a [f32],
    rows: usize,
    positions: usize,
    /// Query heads and key heads.
    heads: [usize; 2],
    head_dim: usize,
    /// Strides of heads and positions of keys and values.
    steps: [usize; 2],
    /// Position of the first key.
    position: usize,
    visible: Option<&'a Visibility>,
    params: AttentionParams,
}

/// Gradients from one query head: `[rows, head_dim]` and twice `[positions, head_dim]`.
struct HeadGradients {
    query_grad: Vec<f32>,
    key_grad: Vec<f32>,
    value_grad: Vec<f32>,
}

impl Sequence<'_> {
    /// Adds the gradients of queries, keys and values, in the layout of their operands.
    fn backward(&self, query_grad: &mut [f32], key_grad: &mut [f32], value_grad: &mut [f32]) {
        let Self { heads: [heads, kv_heads], head_dim, steps: [head_step, position_step], .. } = *self;
        let sharing = heads / kv_heads;
        let parts: Vec<HeadGradients> = (0..heads)
            .into_par_iter()
            .map(|head| {
                let of = |count: usize| vec![0.0; count * head_dim];
                let mut parts = HeadGradients {
                    query_grad: of(self.rows),
                    key_grad: of(self.positions),
                    value_grad: of(self.positions),
                };
                dispatch(Head { sequence: self, head, parts: &mut parts });
                parts
            })
            .collect();
        for (head, parts) in parts.iter().enumerate() {
            add_rows(&mut query_grad[head * head_dim..], heads * head_dim, &parts.query_grad, head_dim);
            let from = head / sharing * head_step;
            add_rows(&mut key_grad[from..], position_step, &parts.key_grad, head_dim);
            add_rows(&mut value_grad[from..], position_step, &parts.value_grad, head_dim);
        }
    }

    /// Returns the keys or values of a head, with zeros at hidden positions, which may hold NaN.
    fn head(&self, stored: &[f32], kv_head: usize) -> Vec<f32> {
        let Self { head_dim, steps: [head_step, position_step], .. } = *self;
        let mut rows = vec![0.0; self.positions * head_dim];
        for (index, row) in rows.chunks_exact_mut(head_dim).enumerate() {
            if self.visible.is_none_or(|visible| visible.contains(index)) {
                row.copy_from_slice(&stored[kv_head * head_step + index * position_step..][..head_dim]);
            }
        }
        rows
    }
}

/// Adds rows to rows that start `step` elements apart.
fn add_rows(to: &mut [f32], step: usize, rows: &[f32], width: usize) {
    for (to, row) in to.chunks_mut(step).zip(rows.chunks_exact(width)) {
        for (to, number) in to.iter_mut().zip(row) {
            *to += number;
        }
    }
}

/// The backward pass of one query head.
struct Head<'a> {
    sequence: &'a Sequence<'a>,
    head: usize,
    parts: &'a mut HeadGradients,
}

impl Kernel for Head<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { sequence, head, parts: HeadGradients { query_grad, key_grad, value_grad } } = self;
        let Sequence { rows, positions, heads: [heads, kv_heads], head_dim, position, params, .. } =
            *sequence;
        let stride = heads * head_dim;
        let query = &sequence.query[head * head_dim..];
        let output = &sequence.output[head * head_dim..];
        let gradient = &sequence.gradient[head * head_dim..];
        let kv_head = head / (heads / kv_heads);
        let (keys, values) = (sequence.head(sequence.keys, kv_head), sequence.head(sequence.values, kv_head));
        let (turned_keys, turned_values) = (transposed(&keys, head_dim), transposed(&values, head_dim));
        let mut weights = Weights {
            params,
            hidden: hidden(positions, sequence.visible),
            weights: vec![0.0; BLOCK_ROWS * BLOCK_POSITIONS],
            gradients: vec![0.0; BLOCK_ROWS * BLOCK_POSITIONS],
        };
        for first in (0..rows).step_by(BLOCK_ROWS) {
            let count = BLOCK_ROWS.min(rows - first);
            let (query, gradient) = (&query[first * stride..], &gradient[first * stride..]);
            let output = &output[first * stride..];
            let queries = RowMajor { values: query, stride, columns: head_dim };
            let gradients = RowMajor { values: gradient, stride, columns: head_dim };
            let end = params.visible(first + count - 1, position, positions).end;
            let mut from = params.visible(first, position, positions).start / LANES * LANES;
            while from < end {
                let width = BLOCK_POSITIONS.min(end - from);
                let scored = Size { rows: count, terms: head_dim, columns: width };
                weights.weights.fill(0.0);
                weights.gradients.fill(0.0);
                let right = RowMajor { values: &turned_keys[from..], stride: positions, columns: width };
                add::<L, _>(Left::new(query, stride), &right, scored, &mut weights.weights, BLOCK_POSITIONS);
                let right = RowMajor { values: &turned_values[from..], stride: positions, columns: width };
                add::<L, _>(
                    Left::new(gradient, stride),
                    &right,
                    scored,
                    &mut weights.gradients,
                    BLOCK_POSITIONS,
                );
                for row in 0..count {
                    let mut output_dot = 0.0;
                    let at = row * stride;
                    for (output, gradient) in output[at..][..head_dim].iter().zip(&gradient[at..]) {
                        output_dot += output * gradient;
                    }
                    let seen = params.visible(first + row, position, positions);
                    let seen = seen.start.clamp(from, from + width) - from
                        ..seen.end.clamp(from, from + width) - from;
                    let sum = sequence.log_sum_exp[(first + row) * heads + head];
                    weights.weigh::<L>(row, from, width, seen, sum, output_dot);
                }
                let gathered = Size { rows: width, terms: count, columns: head_dim };
                let at = from * head_dim;
                let left = Left::transposed(&weights.weights, BLOCK_POSITIONS);
                add::<L, _>(left, &gradients, gathered, &mut value_grad[at..], head_dim);
                let left = Left::transposed(&weights.gradients, BLOCK_POSITIONS);
                add::<L, _>(left, &queries, gathered, &mut key_grad[at..], head_dim);
                let left = Left::new(&weights.gradients, BLOCK_POSITIONS);
                let right = RowMajor { values: &keys[at..], stride: head_dim, columns: head_dim };
                let returned = Size { rows: count, terms: width, columns: head_dim };
                add::<L, _>(left, &right, returned, &mut query_grad[first * head_dim..], head_dim);
                from += BLOCK_POSITIONS;
            }
        }
    }
}

/// Softmax weights of a block and their gradients, `[BLOCK_ROWS, BLOCK_POSITIONS]`. Before
/// [`weigh`](Self::weigh) they hold the products of queries and keys, and of gradients and values.
struct Weights {
    params: AttentionParams,
    /// Mask that is added to the scores: -inf where a position is hidden.
    hidden: Vec<f32>,
    weights: Vec<f32>,
    gradients: Vec<f32>,
}

impl Weights {
    /// Turns products into weights and into gradients of the products. `output_dot` is the dot product of the
    /// row's output and its gradient, `seen` the range of the block's positions that the row sees.
    #[inline(always)]
    fn weigh<L: Lanes>(
        &mut self,
        row: usize,
        from: usize,
        width: usize,
        seen: std::ops::Range<usize>,
        log_sum_exp: f32,
        output_dot: f32,
    ) {
        let AttentionParams { scale, softcap, .. } = self.params;
        let padded = width.next_multiple_of(LANES);
        let weights = &mut self.weights[row * BLOCK_POSITIONS..][..padded];
        let gradients = &mut self.gradients[row * BLOCK_POSITIONS..][..padded];
        let hidden = &self.hidden[from..][..padded];
        if seen.is_empty() || log_sum_exp == f32::NEG_INFINITY {
            weights.fill(0.0);
            gradients.fill(0.0);
            return;
        }
        let vectors = seen.start / LANES..seen.end.div_ceil(LANES);
        let of = |numbers| &mut <[f32]>::as_chunks_mut::<LANES>(numbers).0[vectors.clone()];
        let both = of(&mut *weights).iter_mut().zip(of(&mut *gradients));
        for ((weight, gradient), hidden) in both.zip(&hidden.as_chunks::<LANES>().0[vectors.clone()]) {
            let mut score = L::load(weight).mul(L::splat(scale));
            let mut slope = L::splat(scale);
            if let Some(cap) = softcap {
                let tangent = tanh(L::load(weight).mul(L::splat(scale / cap)));
                score = tangent.mul(L::splat(cap));
                slope = slope.mul(L::splat(1.0).sub(tangent.mul(tangent)));
            }
            let share = exp(score.add(L::load(hidden)).sub(L::splat(log_sum_exp)));
            let of_score = share.mul(L::load(gradient).sub(L::splat(output_dot)));
            *weight = share.store();
            *gradient = of_score.mul(slope).store();
        }
        for numbers in [weights, gradients] {
            numbers[..seen.start].fill(0.0);
            numbers[seen.end..].fill(0.0);
        }
    }
}

/// Returns the mask of every position, and of one vector beyond the last.
fn hidden(positions: usize, visible: Option<&Visibility>) -> Vec<f32> {
    let mut hidden = vec![0.0; positions + LANES];
    if let Some(visible) = visible {
        for (index, hidden) in hidden.iter_mut().enumerate() {
            if !visible.contains(index) {
                *hidden = f32::NEG_INFINITY;
            }
        }
    }
    hidden
}

/// Returns the transpose of rows of `width` elements.
fn transposed(rows: &[f32], width: usize) -> Vec<f32> {
    let count = rows.len() / width;
    let mut transposed = vec![0.0; rows.len()];
    for (column, transposed) in transposed.chunks_exact_mut(count).enumerate() {
        for (number, row) in transposed.iter_mut().zip(rows.chunks_exact(width)) {
            *number = row[column];
        }
    }
    transposed
}
