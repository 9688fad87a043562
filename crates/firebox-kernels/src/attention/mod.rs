//! Attention of some rows of one sequence over keys and values that may lie in several places.
//!
//! Each place is a [`Span`]. [`span_attention`] gathers from one of them and says with what weight, and [`merge`]
//! combines what several have given into what one long span would have given. So nothing is copied to be read
//! together.

#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
mod flex;
#[cfg(feature = "autodiff")]
mod gradient;
mod kernel;
mod kv_tensor;
mod merge;
mod products;
pub mod reference;
mod rows;
mod visibility;

pub use kv_tensor::KvTensor;
pub use visibility::Visibility;

use std::ops::Range;

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};
use burn::tensor::{DType, Device, Tensor};

use crate::flex::{DispatchBackend, has_native_ops, is_flex};
use kv_tensor::KvPrimitive;

/// Positions that are computed with as one piece, counted from the start of a span.
///
/// On the CPU a result depends, in its last bits, on where these pieces begin. Whoever hands over only the end
/// of what is cached lets it begin at a multiple of this to get the result of handing over all.
pub const BLOCK: usize = 256;

/// The widest head that accelerators have a version for.
const MAX_HEAD_DIM: usize = 512;

/// What a row sees, and how scores are made.
///
/// A row sees no position after its own.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionParams {
    /// The position of the first row; the others follow it.
    pub position: usize,
    /// How many positions a row sees, its own included; absent means all.
    pub window: Option<usize>,
    /// Multiplies queries times keys.
    pub scale: f32,
    /// `cap * tanh(score / cap)` on the scores.
    pub softcap: Option<f32>,
}

impl AttentionParams {
    /// What the row sees of `positions` keys, the first of which is at `position`, as indices from the first.
    pub(crate) fn visible(&self, row: usize, position: usize, positions: usize) -> Range<usize> {
        let end = self.position + row + 1;
        let start = self.window.map_or(0, |window| end.saturating_sub(window));
        let index = |at: usize| at.saturating_sub(position).min(positions);
        index(start)..index(end)
    }
}

/// Keys and values of consecutive positions.
#[derive(Debug, Clone)]
pub struct Span {
    /// What queries are multiplied with.
    pub keys: KvTensor,
    /// What is gathered.
    pub values: KvTensor,
    /// The position of the first key.
    pub position: usize,
    /// Which positions may be seen; absent means all.
    pub visible: Option<Visibility>,
}

impl Span {
    /// How many positions it holds.
    pub fn len(&self) -> usize {
        self.keys.positions()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Panics unless queries of this shape can attend to it.
    fn check(&self, heads: usize, head_dim: usize) {
        let [keys, values] = [&self.keys, &self.values].map(|stored| stored.check(heads, head_dim));
        assert_eq!(keys, values, "as many heads and positions of keys as of values");
    }
}

/// What rows have gathered from one span or several.
#[derive(Debug, Clone)]
pub struct AttentionOutput {
    /// The weighted mean of the values, `[rows, heads, head_dim]`; zeros where nothing was visible.
    pub output: Tensor<3>,
    /// The logarithm of the sum of all weights, `[rows, heads]`; -inf where nothing was visible.
    pub log_sum_exp: Tensor<2>,
}

impl AttentionOutput {
    fn nothing(shape: [usize; 3], device: &Device) -> Self {
        let [rows, heads, _] = shape;
        Self {
            output: Tensor::zeros(shape, (device, DType::F32)),
            log_sum_exp: Tensor::full([rows, heads], f32::NEG_INFINITY, (device, DType::F32)),
        }
    }
}

/// From queries `[rows, heads, head_dim]`, what the rows gather from all spans, `[rows, heads * head_dim]`.
/// Query heads share key heads in consecutive runs. `sinks` are scores, one for each head, that take part in
/// the sum of the weights and weigh nothing.
///
/// On the CPU a row's result does not depend on the rows beside it or on the number of threads.
pub fn attention(
    query: Tensor<3>,
    spans: &[Span],
    sinks: Option<Tensor<1>>,
    params: AttentionParams,
) -> Tensor<2> {
    let [rows, heads, head_dim] = query.dims();
    let nothing = || AttentionOutput::nothing([rows, heads, head_dim], &query.device());
    let recorded = recorded(&query, spans);
    #[cfg(feature = "autodiff")]
    if recorded {
        for span in spans {
            span.check(heads, head_dim);
        }
        if let Some(output) = gradient::attention(&query, spans, sinks.is_some(), params) {
            return output.reshape([rows, heads * head_dim]);
        }
    }
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if sinks.is_none() && rows * heads * head_dim > 0 && cube::is_supported(&query) {
        return batch_attention(query, vec![AttentionSequence { rows, spans: spans.to_vec(), params }]);
    }
    let parts = if is_flex(&query.device()) && !recorded {
        for span in spans {
            span.check(heads, head_dim);
        }
        let empty = rows * heads * head_dim == 0 || spans.iter().all(Span::is_empty);
        let part = || AttentionSequence { rows, spans: spans.to_vec(), params };
        vec![if empty { nothing() } else { flex::batch_attention(query.clone(), vec![part()]) }]
    } else if spans.is_empty() {
        vec![nothing()]
    } else {
        spans.iter().map(|span| span_attention(query.clone(), span, params)).collect()
    };
    merge_with_sinks(parts, sinks).output.reshape([rows, heads * head_dim])
}

/// Consecutive rows of one sequence, and what they gather from.
#[derive(Debug, Clone)]
pub struct AttentionSequence {
    /// How many rows.
    pub rows: usize,
    /// What the sequence remembers.
    pub spans: Vec<Span>,
    /// What the rows see of it.
    pub params: AttentionParams,
}

/// What the rows of several sequences gather, each from its own spans, `[rows, heads * head_dim]`: as [`attention`] has it
/// for every part alone. `query` is `[rows, heads, head_dim]`, the rows of one part after those of another.
///
/// On the CPU threads meet once for all parts. On accelerators nothing is copied to be put together.
///
/// # Panics
/// If the parts have other rows than the queries.
pub fn batch_attention(query: Tensor<3>, parts: Vec<AttentionSequence>) -> Tensor<2> {
    let [rows, heads, head_dim] = query.dims();
    assert_eq!(parts.iter().map(|part| part.rows).sum::<usize>(), rows, "parts of other rows");
    let width = heads * head_dim;
    for span in parts.iter().flat_map(|part| &part.spans) {
        span.check(heads, head_dim);
    }
    let recorded = || parts.iter().any(|part| recorded(&query, &part.spans));
    if !parts.is_empty() && rows * width > 0 && is_flex(&query.device()) && !recorded() {
        return flex::batch_attention(query, parts).output.reshape([rows, width]);
    }
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if rows * width > 0 && cube::is_supported(&query) {
        return cube::batch_attention(query, parts);
    }
    let mut first = 0;
    let mut attended = Vec::with_capacity(parts.len());
    for part in parts {
        let of_part = query.clone().narrow(0, first, part.rows);
        attended.push(attention(of_part, &part.spans, None, part.params));
        first += part.rows;
    }
    match attended.len() {
        0 => query.reshape([rows, width]),
        1 => attended.remove(0),
        _ => Tensor::cat(attended, 0),
    }
}

/// Whether gradients on the CPU may be wanted of what is attended with or to.
fn recorded(_query: &Tensor<3>, _spans: &[Span]) -> bool {
    #[cfg(feature = "autodiff")]
    return gradient::recorded(_query, _spans);
    #[cfg(not(feature = "autodiff"))]
    false
}

/// What the rows gather from one span; see [`attention`].
///
/// # Panics
/// If shapes contradict each other or a dtype is none that [`KvTensor`] names.
pub fn span_attention(query: Tensor<3>, span: &Span, params: AttentionParams) -> AttentionOutput {
    let [rows, heads, head_dim] = query.dims();
    let positions = span.len();
    span.check(heads, head_dim);
    if rows * heads * head_dim * positions == 0 {
        return AttentionOutput::nothing([rows, heads, head_dim], &query.device());
    }
    let device = query.device();
    let own = has_native_ops(&device) && (is_flex(&device) || head_dim <= MAX_HEAD_DIM);
    if !own || recorded(&query, std::slice::from_ref(span)) {
        return reference::span_attention(query, span, params);
    }
    let (output, log_sum_exp) = <DispatchBackend as AttentionOps>::span_attention(
        query.into_dispatch(),
        span.keys.primitive(),
        span.values.primitive(),
        span.position,
        span.visible.clone(),
        params,
    );
    AttentionOutput { output: Tensor::from_dispatch(output), log_sum_exp: Tensor::from_dispatch(log_sum_exp) }
}

/// What the same rows would have gathered from the spans of all parts together.
///
/// # Panics
/// If there is no part, or the parts differ in shape.
pub fn merge(parts: Vec<AttentionOutput>) -> AttentionOutput {
    merge_with_sinks(parts, None)
}

/// The same with sinks; see [`attention`].
pub fn merge_with_sinks(mut parts: Vec<AttentionOutput>, sinks: Option<Tensor<1>>) -> AttentionOutput {
    assert!(!parts.is_empty(), "nothing to merge");
    if parts.len() == 1 && sinks.is_none() || parts[0].output.dims()[0] == 0 {
        return parts.remove(0);
    }
    let shape = parts[0].output.dims();
    let [rows, heads, _] = shape;
    assert!(parts.iter().all(|part| part.output.dims() == shape), "parts of one shape");
    let (mut outputs, mut sums): (Vec<_>, Vec<_>) =
        parts.into_iter().map(|part| (part.output, part.log_sum_exp)).unzip();
    // Sinks are one more part, but for having gathered nothing.
    sums.extend(sinks.map(|sinks| sinks.reshape([1, heads]).expand([rows, heads])));
    if !has_native_ops(&outputs[0].device()) {
        return reference::merge(outputs, sums);
    }
    let outputs = if outputs.len() == 1 { outputs.remove(0) } else { Tensor::cat(outputs, 0) };
    let (output, log_sum_exp) = <DispatchBackend as AttentionOps>::merge(
        outputs.into_dispatch(),
        Tensor::cat(sums, 0).into_dispatch(),
        rows,
    );
    AttentionOutput { output: Tensor::from_dispatch(output), log_sum_exp: Tensor::from_dispatch(log_sum_exp) }
}

/// The operations of backends that have versions of their own.
#[backend_extension(Flex, Cube: cfg(any(feature = "wgpu", feature = "cuda")))]
pub(crate) trait AttentionOps: Backend {
    fn span_attention(
        query: FloatTensor<Self>,
        #[extension_type] keys: KvPrimitive<Self>,
        #[extension_type] values: KvPrimitive<Self>,
        position: usize,
        visible: Option<Visibility>,
        params: AttentionParams,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Parts of `rows` rows, one after the other; logarithms beyond those of the outputs belong to sinks.
    fn merge(
        outputs: FloatTensor<Self>,
        log_sum_exps: FloatTensor<Self>,
        rows: usize,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    fn quantize(values: FloatTensor<Self>) -> (IntTensor<Self>, FloatTensor<Self>);
}
