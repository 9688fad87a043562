//! Attention of the rows of one sequence over keys and values in one or more spans of memory.
//!
//! Each contiguous stretch is a [`Span`]. [`span_attention`] attends to one span and returns the log-sum-exp
//! of its scores with the output; [`merge`] combines several outputs into the one that a single long span
//! would have given. Nothing is copied to make spans contiguous.

#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
mod flex;
#[cfg(feature = "autodiff")]
mod gradient;
mod head_transform;
mod kernel;
mod kv_assign;
mod kv_quantize;
mod kv_tensor;
mod merge;
mod ops;
mod output;
mod params;
mod products;
pub mod reference;
mod rope_and_cache;
mod rows;
mod span;
mod visibility;

pub use head_transform::HeadTransform;
pub use kv_tensor::KvTensor;
pub use output::AttentionOutput;
pub use params::{AttentionParams, BLOCK};
pub use rope_and_cache::RopeAndCache;
pub use span::{AttentionSequence, Span};
pub use visibility::Visibility;

use burn::tensor::Tensor;

use crate::flex::{DispatchBackend, has_native_ops, is_flex};
use ops::AttentionOps;
use params::MAX_HEAD_DIM;

/// Attention of queries `[rows, heads, head_dim]` over all spans, `[rows, heads * head_dim]`. Consecutive
/// query heads share a key head. `sinks` holds one score per head, which adds to the sum of the softmax and
/// contributes no value.
///
/// On the CPU a row's result does not depend on the other rows or on the number of threads.
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
        return batch_attention(
            query,
            vec![AttentionSequence { rows, spans: spans.to_vec(), params, steps: None }],
        );
    }
    let parts = if is_flex(&query.device()) && !recorded {
        for span in spans {
            span.check(heads, head_dim);
        }
        let empty = rows * heads * head_dim == 0 || spans.iter().all(Span::is_empty);
        let part = || AttentionSequence { rows, spans: spans.to_vec(), params, steps: None };
        vec![if empty { nothing() } else { flex::batch_attention(query.clone(), vec![part()]) }]
    } else if spans.is_empty() {
        vec![nothing()]
    } else {
        spans.iter().map(|span| span_attention(query.clone(), span, params)).collect()
    };
    merge_with_sinks(parts, sinks).output.reshape([rows, heads * head_dim])
}

/// Attention of several sequences, each over its own spans, `[rows, heads * head_dim]`; equal to
/// [`attention`] for each sequence. `query` is `[rows, heads, head_dim]`, the rows of one sequence after
/// those of another.
///
/// On the CPU the threads synchronise once for all sequences. On accelerators nothing is copied to join the
/// sequences.
///
/// # Panics
/// If the sequences do not have as many rows as the queries.
pub fn batch_attention(query: Tensor<3>, parts: Vec<AttentionSequence>) -> Tensor<2> {
    let [rows, heads, head_dim] = query.dims();
    assert_eq!(
        parts.iter().map(|part| part.rows).sum::<usize>(),
        rows,
        "the sequences have other rows than the queries"
    );
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

/// Returns whether the attention of rows with heads of this width can be part of a [recorded step](crate::step).
pub fn can_record(rows: &Tensor<2>, head_dim: usize) -> bool {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    return head_dim <= MAX_HEAD_DIM && cube::supports_rope_and_cache(rows);
    #[cfg(not(any(feature = "wgpu", feature = "cuda")))]
    {
        let _ = (rows, head_dim);
        false
    }
}

/// Whether queries, keys or values are on a device that records gradients on the CPU.
fn recorded(_query: &Tensor<3>, _spans: &[Span]) -> bool {
    #[cfg(feature = "autodiff")]
    return gradient::recorded(_query, _spans);
    #[cfg(not(feature = "autodiff"))]
    false
}

/// Attention over one span; see [`attention`].
///
/// # Panics
/// If shapes contradict each other, or a dtype is none that [`KvTensor`] names.
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

/// Merges outputs of the same rows over different spans into the output over all spans.
///
/// # Panics
/// If `parts` is empty, or the outputs differ in shape.
pub fn merge(parts: Vec<AttentionOutput>) -> AttentionOutput {
    merge_with_sinks(parts, None)
}

/// [`merge`] with sinks; see [`attention`].
pub fn merge_with_sinks(mut parts: Vec<AttentionOutput>, sinks: Option<Tensor<1>>) -> AttentionOutput {
    assert!(!parts.is_empty(), "there are no outputs to merge");
    if parts.len() == 1 && sinks.is_none() || parts[0].output.dims()[0] == 0 {
        return parts.remove(0);
    }
    let shape = parts[0].output.dims();
    let [rows, heads, _] = shape;
    assert!(parts.iter().all(|part| part.output.dims() == shape), "outputs to merge differ in shape");
    let (mut outputs, mut sums): (Vec<_>, Vec<_>) =
        parts.into_iter().map(|part| (part.output, part.log_sum_exp)).unzip();
    // Sinks count as one more log-sum-exp without an output.
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
