//! Attention on accelerators.
//! A cube takes queries that share a key head and visits their span in blocks of as many positions as it has units: the units score
//! keys, weigh queries, then gather values. Maxima and sums are carried along. Blocks are counted from the start of the
//! span, so a row's result does not depend on the rows beside it, unless there are few rows.

mod blocks;
mod few_rows;
mod head_inputs;
mod heads_kernels;
mod memories;
mod merged_rows;
mod part_table;
mod parts;
mod parts_of_rows;
mod reading;
mod rope_and_cache;
mod sides;
pub(super) mod view;

use std::ops::Range;

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{DType, Shape, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::kernel::{cast, into_contiguous};
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, full_client};
use burn_cubecl::tensor::CubeTensor;

use super::kv_tensor::KvPrimitive;
use super::ops::AttentionOps;
use super::params::{AttentionParams, MAX_HEAD_DIM};
use super::span::{AttentionSequence, Span};
use super::visibility::Visibility;
use crate::cube::{cubes, dims, element, floats, is_cube, primitive, room, zeroed};
use blocks::{ScoresLaunch, SizesLaunch, StridesLaunch, UNITS, attend_blocks, attend_several};
use parts::{keep_rows, merge_parts, quantize_rows};
pub(super) use rope_and_cache::{CubeRopeAndCache, supports_rope_and_cache};
use sides::{Scoring, Sides, SpanRows, in_rows, steps};

/// Short spans that share a launch, and its buffers.
const TOGETHER: usize = 4;
/// The positions that a cube looks at in a span that grows from step to step: more than any has.
const GROWING: usize = 1 << 24;
const BINDINGS: u32 = 12;

impl AttentionOps for CubeBackend {
    fn span_attention(
        query: FloatTensor<Self>,
        keys: KvPrimitive<Self>,
        values: KvPrimitive<Self>,
        position: usize,
        visible: Option<Visibility>,
        params: AttentionParams,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let query = floats(query);
        let [rows, _, _] = dims(&query);
        let span = Sides::new(&query, keys, values, position, visible);
        let parts = span.split(&query, rows).parts;
        let gathered = Gathered::of(&query, parts * rows);
        attend(&[span], &query, 0..rows, Scoring { params, steps: None }, &gathered, 0);
        let Gathered { output, log_sum_exp } = gathered;
        if parts == 1 { (output, log_sum_exp) } else { Self::merge(output, log_sum_exp, rows) }
    }

    fn merge(
        outputs: FloatTensor<Self>,
        log_sum_exps: FloatTensor<Self>,
        rows: usize,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (outputs, sums) = (floats(outputs), floats(log_sum_exps));
        let [part_rows, _, _] = dims(&outputs);
        let [sum_rows, _] = dims(&sums);
        let merged = Gathered::of(&outputs, rows);
        let parts = Gathered { output: outputs, log_sum_exp: sums };
        parts.merge(rows, part_rows / rows, sum_rows / rows, &merged, 0);
        (merged.output, merged.log_sum_exp)
    }

    fn quantize(values: FloatTensor<Self>) -> (IntTensor<Self>, FloatTensor<Self>) {
        let values = floats(values);
        let [kv_heads, positions, head_dim] = dims(&values);
        let row_words = head_dim.div_ceil(4);
        let words = empty_device_contiguous_dtype(
            values.client.clone(),
            values.device.clone(),
            Shape::new([kv_heads, positions, row_words]),
            DType::I32,
        );
        let scales = room(&values, [kv_heads, positions]);
        let rows = kv_heads * positions;
        quantize_rows::launch(
            &values.client.clone(),
            cubes(rows.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            values.into_buffer_arg(),
            words.clone().into_buffer_arg(),
            scales.clone().into_buffer_arg(),
            rows as u32,
            head_dim as u32,
        );
        (words, scales)
    }
}

/// Whether there is a version here for queries `[rows, heads, head_dim]`.
pub(super) fn is_supported(query: &Tensor<3>) -> bool {
    is_cube(&query.device()) && query.dims()[2] <= MAX_HEAD_DIM
}

/// See [`batch_attention`](super::batch_attention). Sequences of few rows share launches. Of others, short spans share launches, also across
/// parts, and a long span is split among cubes; only rows with several partial results are merged.
///
/// # Panics
/// If the tensors are not on an accelerator, or nothing is asked.
pub(super) fn batch_attention(query: Tensor<3>, sequences: Vec<AttentionSequence>) -> Tensor<2> {
    let query = floats(primitive(query));
    let [rows, heads, head_dim] = dims(&query);
    let all = Gathered::of_sequences(&query, &sequences);
    attend_sequences(SequenceSpans::of(&query, sequences), &query, &all);
    Tensor::<3>::from_primitive::<CubeBackend>(all.output).reshape([rows, heads * head_dim])
}

/// Computes attention of the rows of sequences.
fn attend_sequences(sequences: Vec<SequenceSpans>, query: &CubeTensor, all: &Gathered) {
    let (few, parts): (Vec<_>, Vec<_>) =
        sequences.into_iter().partition(|sequence| few_rows::takes(sequence, query));
    few_rows::attend(few, query, None, &all.output);
    if can_batch(&parts, query) {
        return attend_batch(&parts, query, all);
    }
    for SequenceSpans { rows: of_part, spans, scoring } in parts {
        let rows = of_part.len();
        let launches = together(spans, query, rows);
        let count: usize = launches.iter().map(|spans| parts_of(spans, query, rows)).sum();
        if count == 0 {
            continue;
        }
        let gathered = (count > 1).then(|| Gathered::of(query, count * rows));
        let mut at = if count > 1 { 0 } else { of_part.start };
        for spans in launches {
            let into = gathered.as_ref().unwrap_or(all);
            attend(&spans, query, of_part.clone(), scoring.clone(), into, at);
            at += parts_of(&spans, query, rows) * rows;
        }
        if let Some(gathered) = gathered {
            gathered.merge(rows, count, count, all, of_part.start);
        }
    }
}

/// Rows of a sequence, and its spans that are not empty.
struct SequenceSpans {
    rows: Range<usize>,
    spans: Vec<Sides>,
    scoring: Scoring,
}

impl SequenceSpans {
    /// The sequences of a query's rows, one after the other, apart from those without rows.
    fn of(query: &CubeTensor, sequences: Vec<AttentionSequence>) -> Vec<Self> {
        let mut first = 0;
        sequences
            .into_iter()
            .filter(|sequence| sequence.rows > 0)
            .map(|AttentionSequence { rows, spans, params, steps }| {
                let spans = spans.into_iter().filter(|span| !span.is_empty());
                let spans = spans.map(|span| Sides::of(query, span)).collect();
                first += rows;
                Self { rows: first - rows..first, spans, scoring: Scoring { params, steps } }
            })
            .collect()
    }
}

/// Returns whether the spans of several parts can share launches: short spans of one form, and equally many rows in each part.
fn can_batch(parts: &[SequenceSpans], query: &CubeTensor) -> bool {
    let [first, _, ..] = parts else { return false };
    let (rows, binds) = (first.rows.len(), query.client.properties().hardware.max_bindings);
    let same_scores = |one: &AttentionParams, other: &AttentionParams| {
        (one.window, one.scale, one.softcap) == (other.window, other.scale, other.softcap)
    };
    binds >= BINDINGS
        && parts.iter().all(|part| {
            part.rows.len() == rows
                && same_scores(&part.scoring.params, &first.scoring.params)
                && !part.spans.is_empty()
                && part.spans.iter().all(|span| span.goes_with(&first.spans[0], query, rows))
        })
}

/// Computes attention of all parts in launches of up to [`TOGETHER`] spans, followed by one merge.
fn attend_batch(parts: &[SequenceSpans], query: &CubeTensor, all: &Gathered) {
    let (rows, scoring) = (parts[0].rows.len(), &parts[0].scoring);
    let total = parts.len() * rows;
    let most = parts.iter().map(|part| part.spans.len()).max().unwrap_or(0);
    let gathered = (most > 1).then(|| {
        let mut gathered = Gathered::of(query, most * total);
        if parts.iter().any(|part| part.spans.len() < most) {
            // Slots without a span have no weight in the merge.
            let [_, heads, _] = dims(query);
            let (client, device) = (query.client.clone(), query.device.clone());
            let all = Shape::new([most * total * heads]);
            gathered.log_sum_exp = full_client::<f32>(client, all, device, f32::NEG_INFINITY);
        }
        gathered
    });
    let spans = parts.iter().enumerate().flat_map(|(index, part)| {
        part.spans.iter().enumerate().map(move |(layer, span)| {
            let span_rows = SpanRows {
                params: part.scoring.params,
                row: index * rows,
                slot: layer * total + index * rows,
            };
            (span, span_rows)
        })
    });
    let spans: Vec<_> = spans.collect();
    for together in spans.chunks(TOGETHER) {
        attend_spans(together, query, rows, scoring, gathered.as_ref().unwrap_or(all));
    }
    if let Some(gathered) = gathered {
        gathered.merge(total, most, most, all, 0);
    }
}

/// Overwrites the keys and values from position `at` on, converted to the type of the stored tensors. Writes `in_place`, or if the
/// stored tensors are not shared. All shapes are those of [`KvTensor::assign`](super::KvTensor::assign), and keys and values
/// have the same shape.
///
/// # Panics
/// If the tensors are not on an accelerator.
pub(super) fn assign_both(
    kept: [Tensor<3>; 2],
    at: usize,
    added: [Tensor<3>; 2],
    in_place: bool,
) -> [Tensor<3>; 2] {
    let [keys, values] = kept.map(|kept| {
        let kept = into_contiguous(primitive(kept));
        // A copy may have room between its rows.
        if in_place || kept.can_mut() { kept } else { into_contiguous(kept.copy()) }
    });
    let added = added.map(|added| in_rows(cast(primitive(added), DType::F32)));
    let steps = added.each_ref().map(|added| {
        let (head, position) = steps(added);
        StridesLaunch::new(head as u32, position as u32)
    });
    let ([heads, positions, head_dim], [_, count, _]) = (dims(&keys), dims(&added[0]));
    let elements = heads * count * head_dim;
    if elements > 0 {
        let ([new_keys, new_values], [key_steps, value_steps]) = (added, steps);
        let kind = element(&keys);
        keep_rows::launch(
            &keys.client.clone(),
            cubes(elements.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            new_keys.into_buffer_arg(),
            new_values.into_buffer_arg(),
            keys.clone().into_buffer_arg(),
            values.clone().into_buffer_arg(),
            key_steps,
            value_steps,
            elements as u32,
            head_dim as u32,
            count as u32,
            positions as u32,
            at as u32,
            kind,
        );
    }
    [keys, values].map(Tensor::from_primitive::<CubeBackend>)
}

/// What rows have gathered, or room for it.
struct Gathered {
    /// `[rows, heads, head_dim]`
    output: CubeTensor,
    /// `[rows, heads]`
    log_sum_exp: CubeTensor,
}

impl Gathered {
    /// Room for so many rows with the heads of a query.
    fn of(query: &CubeTensor, rows: usize) -> Self {
        let [_, heads, head_dim] = dims(query);
        Self { output: room(query, [rows, heads, head_dim]), log_sum_exp: room(query, [rows, heads]) }
    }

    /// Room for the rows of a query; zeros where a sequence has no positions.
    fn of_sequences(query: &CubeTensor, sequences: &[AttentionSequence]) -> Self {
        let [rows, heads, head_dim] = dims(query);
        let mut all = Self::of(query, rows);
        if sequences.iter().any(|sequence| sequence.spans.iter().all(Span::is_empty)) {
            all.output = zeroed(query, [rows, heads, head_dim]);
        }
        all
    }

    /// Merges parts of `rows` rows, one after the other, into the rows of `merged` from `into` on. Logarithms beyond those
    /// of the parts belong to sinks.
    fn merge(self, rows: usize, parts: usize, sums: usize, merged: &Self, into: usize) {
        let [_, heads, head_dim] = dims(&self.output);
        let elements = rows * heads * head_dim;
        merge_parts::launch(
            &self.output.client.clone(),
            cubes(elements.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            self.output.into_buffer_arg(),
            self.log_sum_exp.into_buffer_arg(),
            merged.output.clone().into_buffer_arg(),
            merged.log_sum_exp.clone().into_buffer_arg(),
            elements as u32,
            head_dim as u32,
            parts as u32,
            sums as u32,
            (into * heads) as u32,
            f32::NEG_INFINITY,
        );
    }
}

/// The spans of a part by launches.
fn together(spans: Vec<Sides>, query: &CubeTensor, rows: usize) -> Vec<Vec<Sides>> {
    let binds_enough = query.client.properties().hardware.max_bindings >= BINDINGS;
    let mut launches: Vec<Vec<Sides>> = Vec::new();
    for span in spans {
        match launches.last_mut() {
            Some(last) if binds_enough && last.len() < TOGETHER && last[0].goes_with(&span, query, rows) => {
                last.push(span);
            }
            _ => launches.push(vec![span]),
        }
    }
    launches
}

/// How many results of every row the spans of a launch give.
fn parts_of(spans: &[Sides], query: &CubeTensor, rows: usize) -> usize {
    if spans.len() > 1 { spans.len() } else { spans[0].split(query, rows).parts }
}

/// Has `rows` of the query gather from the spans of a launch, into the rows of `gathered` from `into` on, a span or part after
/// the other.
fn attend(
    spans: &[Sides],
    query: &CubeTensor,
    rows: Range<usize>,
    scoring: Scoring,
    gathered: &Gathered,
    into: usize,
) {
    let Scoring { params, steps } = &scoring;
    let span_rows =
        |index: usize| SpanRows { params: *params, row: rows.start, slot: into + index * rows.len() };
    if spans.len() > 1 {
        let spans: Vec<_> = spans.iter().enumerate().map(|(index, span)| (span, span_rows(index))).collect();
        return attend_spans(&spans, query, rows.len(), &scoring, gathered);
    }
    let split = spans[0].split(query, rows.len());
    let Sides { keys, values, .. } = &spans[0];
    // Where all may be seen, the binding holds the counter, or is not looked at.
    let counter = steps.as_ref().map_or(query, |steps| &steps.counter);
    let (bits, words) = spans[0].uploaded_mask(query).unwrap_or_else(|| (counter.clone(), 0));
    let piece = if steps.is_some() && split.parts == 1 { GROWING } else { split.piece };
    let [kv_heads, _, _] = dims(&keys.numbers);
    attend_blocks::launch(
        &query.client,
        CubeCount::Static(split.groups as u32, kv_heads as u32, split.parts as u32),
        CubeDim::new_1d(UNITS),
        keys.vector,
        values.vector,
        query.clone().into_buffer_arg(),
        keys.numbers.clone().into_buffer_arg(),
        keys.scales.clone().into_buffer_arg(),
        values.numbers.clone().into_buffer_arg(),
        values.scales.clone().into_buffer_arg(),
        bits.into_buffer_arg(),
        gathered.output.clone().into_buffer_arg(),
        gathered.log_sum_exp.clone().into_buffer_arg(),
        spans[0].place(span_rows(0)),
        keys.scale_strides(),
        values.scale_strides(),
        sizes(query, kv_heads, rows.len(), piece, words),
        scores(*params),
        spans[0].how(query, split, &scoring, false),
        keys.element,
        values.element,
    );
}

/// Computes attention to up to [`TOGETHER`] spans of one form in one launch, each for `rows` rows of its own.
fn attend_spans(
    spans: &[(&Sides, SpanRows)],
    query: &CubeTensor,
    rows: usize,
    scoring: &Scoring,
    gathered: &Gathered,
) {
    let first = spans[0].0;
    let split = first.split(query, rows);
    let [kv_heads, _, _] = dims(&first.keys.numbers);
    // A span is not split here.
    let longest = spans.iter().map(|(span, _)| dims::<3>(&span.keys.numbers)[1]).max().unwrap_or(0);
    let (piece, counter) = match &scoring.steps {
        Some(steps) => (GROWING, &steps.counter),
        None => (longest, query),
    };
    // There have to be as many; those that no cube looks at may be any.
    let every: [(&Sides, SpanRows); TOGETHER] =
        std::array::from_fn(|index| spans[index.min(spans.len() - 1)]);
    let [first_keys, second_keys, third_keys, fourth_keys] =
        every.map(|(span, _)| span.keys.numbers.clone().into_buffer_arg());
    let [first_values, second_values, third_values, fourth_values] =
        every.map(|(span, _)| span.values.numbers.clone().into_buffer_arg());
    let [first_place, second_place, third_place, fourth_place] =
        every.map(|(span, span_rows)| span.place(span_rows));
    attend_several::launch(
        &query.client,
        CubeCount::Static(split.groups as u32, kv_heads as u32, spans.len() as u32),
        CubeDim::new_1d(UNITS),
        first.keys.vector,
        first.values.vector,
        query.clone().into_buffer_arg(),
        first_keys,
        second_keys,
        third_keys,
        fourth_keys,
        first_values,
        second_values,
        third_values,
        fourth_values,
        counter.clone().into_buffer_arg(),
        gathered.output.clone().into_buffer_arg(),
        gathered.log_sum_exp.clone().into_buffer_arg(),
        first_place,
        second_place,
        third_place,
        fourth_place,
        sizes(query, kv_heads, rows, piece, 0),
        scores(scoring.params),
        first.how(query, split, scoring, true),
        first.keys.element,
        first.values.element,
    );
}

fn sizes(query: &CubeTensor, kv_heads: usize, rows: usize, piece: usize, words: usize) -> SizesLaunch {
    let [_, heads, head_dim] = dims(query);
    SizesLaunch::new(rows as u32, (heads / kv_heads) as u32, head_dim as u32, piece as u32, words as u32)
}

fn scores(params: AttentionParams) -> ScoresLaunch {
    ScoresLaunch::new(
        params.window.unwrap_or(usize::MAX).min(i32::MAX as usize / 2) as i32,
        params.scale,
        params.softcap.unwrap_or(1.0),
        f32::NEG_INFINITY,
    )
}
