//! Attention of some rows of one sequence over keys and values that may lie in several places.
//!
//! Each place is a [`Span`]. [`attend_span`] gathers from one of them and says with what weight, and [`merge`]
//! combines what several have given into what one long span would have given. So nothing is copied to be read
//! together.

#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
mod flex;
#[cfg(feature = "autodiff")]
mod gradient;
mod kernel;
mod merge;
mod products;
pub mod reference;
mod rows;
mod stored;
mod visibility;

pub use stored::Stored;
pub use visibility::Visibility;

use std::ops::Range;

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};
use burn::tensor::{DType, Device, Tensor};

use crate::flex::{Dispatched, has_own, is_flex};
use stored::Held;

/// Positions that are computed with as one piece, counted from the start of a span.
///
/// On the CPU a result depends, in its last bits, on where these pieces begin. Whoever hands over only the end
/// of what is cached lets it begin at a multiple of this to get the result of handing over all.
pub const BLOCK: usize = 256;

/// The widest head that accelerators have a version for.
const WIDEST_HEAD: usize = 512;

/// What a row sees, and how scores are made.
///
/// A row sees no position after its own.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attending {
    /// The position of the first row; the others follow it.
    pub position: usize,
    /// How many positions a row sees, its own included; absent means all.
    pub window: Option<usize>,
    /// Multiplies queries times keys.
    pub scale: f32,
    /// `cap * tanh(score / cap)` on the scores.
    pub softcap: Option<f32>,
}

impl Attending {
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
    pub keys: Stored,
    /// What is gathered.
    pub values: Stored,
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
pub struct Attended {
    /// The weighted mean of the values, `[rows, heads, head_dim]`; zeros where nothing was visible.
    pub output: Tensor<3>,
    /// The logarithm of the sum of all weights, `[rows, heads]`; -inf where nothing was visible.
    pub log_sum_exp: Tensor<2>,
}

impl Attended {
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
pub fn attend(query: Tensor<3>, spans: &[Span], sinks: Option<Tensor<1>>, attending: Attending) -> Tensor<2> {
    let [rows, heads, head_dim] = query.dims();
    let nothing = || Attended::nothing([rows, heads, head_dim], &query.device());
    let recorded = recorded(&query, spans);
    #[cfg(feature = "autodiff")]
    if recorded {
        for span in spans {
            span.check(heads, head_dim);
        }
        if let Some(output) = gradient::attend(&query, spans, sinks.is_some(), attending) {
            return output.reshape([rows, heads * head_dim]);
        }
    }
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if sinks.is_none() && rows * heads * head_dim > 0 && cube::attends(&query) {
        return attend_each(query, vec![Part { rows, spans: spans.to_vec(), attending }]);
    }
    let parts = if is_flex(&query.device()) && !recorded {
        for span in spans {
            span.check(heads, head_dim);
        }
        let empty = rows * heads * head_dim == 0 || spans.iter().all(Span::is_empty);
        let part = || Part { rows, spans: spans.to_vec(), attending };
        vec![if empty { nothing() } else { flex::attend_each(query.clone(), vec![part()]) }]
    } else if spans.is_empty() {
        vec![nothing()]
    } else {
        spans.iter().map(|span| attend_span(query.clone(), span, attending)).collect()
    };
    merge_with(parts, sinks).output.reshape([rows, heads * head_dim])
}

/// Consecutive rows of one sequence, and what they gather from.
#[derive(Debug, Clone)]
pub struct Part {
    /// How many rows.
    pub rows: usize,
    /// What the sequence remembers.
    pub spans: Vec<Span>,
    /// What the rows see of it.
    pub attending: Attending,
}

/// What the rows of several sequences gather, each from its own spans, `[rows, heads * head_dim]`: as [`attend`] has it
/// for every part alone. `query` is `[rows, heads, head_dim]`, the rows of one part after those of another.
///
/// On the CPU threads meet once for all parts. On accelerators nothing is copied to be put together.
///
/// # Panics
/// If the parts have other rows than the queries.
pub fn attend_each(query: Tensor<3>, parts: Vec<Part>) -> Tensor<2> {
    let [rows, heads, head_dim] = query.dims();
    assert_eq!(parts.iter().map(|part| part.rows).sum::<usize>(), rows, "parts of other rows");
    let width = heads * head_dim;
    for span in parts.iter().flat_map(|part| &part.spans) {
        span.check(heads, head_dim);
    }
    let recorded = || parts.iter().any(|part| recorded(&query, &part.spans));
    if !parts.is_empty() && rows * width > 0 && is_flex(&query.device()) && !recorded() {
        return flex::attend_each(query, parts).output.reshape([rows, width]);
    }
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if rows * width > 0 && cube::attends(&query) {
        return cube::attend_each(query, parts);
    }
    let mut first = 0;
    let mut attended = Vec::with_capacity(parts.len());
    for part in parts {
        let of_part = query.clone().narrow(0, first, part.rows);
        attended.push(attend(of_part, &part.spans, None, part.attending));
        first += part.rows;
    }
    match attended.len() {
        0 => query.reshape([rows, width]),
        1 => attended.remove(0),
        _ => Tensor::cat(attended, 0),
    }
}

/// What the rows of several sequences gather, each from its own sequence, `[rows, heads * head_dim]`: as [`attend`]
/// has it for every one of them alone.
///
/// `query` is `[rows, heads, head_dim]`, `keys` and `values` are `[rows, kv_heads, head_dim]`, all of f32. The
/// sequences lie one after the other, and `lengths` says how many rows each has. `attending` is that of each of them.
///
/// # Panics
/// If the lengths do not add up to the rows.
pub fn attend_sequences(
    query: Tensor<3>,
    keys: Tensor<3>,
    values: Tensor<3>,
    lengths: &[usize],
    attending: Attending,
) -> Tensor<2> {
    let [rows, heads, head_dim] = query.dims();
    let [_, kv_heads, _] = keys.dims();
    assert_eq!(lengths.iter().sum::<usize>(), rows, "lengths of other rows");
    assert_eq!(keys.dims(), [rows, kv_heads, head_dim], "keys of other rows");
    assert_eq!(values.dims(), keys.dims(), "keys and values differ in shape");
    assert!(kv_heads > 0 && heads.is_multiple_of(kv_heads), "{heads} query heads over {kv_heads}");
    #[cfg(feature = "autodiff")]
    if rows * heads * head_dim > 0
        && [query.device(), keys.device(), values.device()].iter().any(crate::graph::records)
    {
        return gradient::attend_sequences(query, keys, values, lengths, attending)
            .reshape([rows, heads * head_dim]);
    }
    let mut first = 0;
    let mut parts = Vec::with_capacity(lengths.len());
    for &length in lengths.iter().filter(|length| **length > 0) {
        let part = |all: &Tensor<3>| all.clone().narrow(0, first, length);
        let stored = |all| Stored::Float(part(all).swap_dims(0, 1));
        let span = Span {
            keys: stored(&keys),
            values: stored(&values),
            position: attending.position,
            visible: None,
        };
        parts.push(attend(part(&query), &[span], None, attending));
        first += length;
    }
    if parts.is_empty() {
        return query.reshape([rows, heads * head_dim]);
    }
    Tensor::cat(parts, 0)
}

/// Whether gradients on the CPU may be wanted of what is attended with or to.
fn recorded(_query: &Tensor<3>, _spans: &[Span]) -> bool {
    #[cfg(feature = "autodiff")]
    return gradient::recorded(_query, _spans);
    #[cfg(not(feature = "autodiff"))]
    false
}

/// What the rows gather from one span; see [`attend`].
///
/// # Panics
/// If shapes contradict each other or a dtype is none that [`Stored`] names.
pub fn attend_span(query: Tensor<3>, span: &Span, attending: Attending) -> Attended {
    let [rows, heads, head_dim] = query.dims();
    let positions = span.len();
    span.check(heads, head_dim);
    if rows * heads * head_dim * positions == 0 {
        return Attended::nothing([rows, heads, head_dim], &query.device());
    }
    let device = query.device();
    let own = has_own(&device) && (is_flex(&device) || head_dim <= WIDEST_HEAD);
    if !own || recorded(&query, std::slice::from_ref(span)) {
        return reference::attend_span(query, span, attending);
    }
    let (output, log_sum_exp) = <Dispatched as AttendOps>::attend_span(
        query.into_dispatch(),
        span.keys.held(),
        span.values.held(),
        span.position,
        span.visible.clone(),
        attending,
    );
    Attended { output: Tensor::from_dispatch(output), log_sum_exp: Tensor::from_dispatch(log_sum_exp) }
}

/// What the same rows would have gathered from the spans of all parts together.
///
/// # Panics
/// If there is no part, or the parts differ in shape.
pub fn merge(parts: Vec<Attended>) -> Attended {
    merge_with(parts, None)
}

/// The same with sinks; see [`attend`].
pub fn merge_with(mut parts: Vec<Attended>, sinks: Option<Tensor<1>>) -> Attended {
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
    if !has_own(&outputs[0].device()) {
        return reference::merge(outputs, sums);
    }
    let outputs = if outputs.len() == 1 { outputs.remove(0) } else { Tensor::cat(outputs, 0) };
    let (output, log_sum_exp) =
        <Dispatched as AttendOps>::merge(outputs.into_dispatch(), Tensor::cat(sums, 0).into_dispatch(), rows);
    Attended { output: Tensor::from_dispatch(output), log_sum_exp: Tensor::from_dispatch(log_sum_exp) }
}

/// The operations of backends that have versions of their own.
#[backend_extension(Flex, Cube: cfg(any(feature = "wgpu", feature = "cuda")))]
pub(crate) trait AttendOps: Backend {
    fn attend_span(
        query: FloatTensor<Self>,
        #[extension_type] keys: Held<Self>,
        #[extension_type] values: Held<Self>,
        position: usize,
        visible: Option<Visibility>,
        attending: Attending,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Parts of `rows` rows, one after the other; logarithms beyond those of the outputs belong to sinks.
    fn merge(
        outputs: FloatTensor<Self>,
        log_sum_exps: FloatTensor<Self>,
        rows: usize,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    fn quantize(values: FloatTensor<Self>) -> (IntTensor<Self>, FloatTensor<Self>);
}
