//! Attention on accelerators.
//! A cube takes queries that share a key head and visits their span in blocks of as many positions as it has units: the units score
//! keys, weigh queries, then gather values. Maxima and sums are carried along. Blocks are counted from the start of the
//! span, so a row's result does not depend on the rows beside it, unless there are few rows.

mod blocks;
mod parts;
mod rope_and_cache;

use std::ops::Range;

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{DType, Shape, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::ir::{ElemType, UIntKind};
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::kernel::{cast, into_contiguous};
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, full_client};
use burn_cubecl::tensor::CubeTensor;

use super::kv_tensor::{KvPrimitive, KvTensor};
use super::ops::AttentionOps;
use super::params::{AttentionParams, MAX_HEAD_DIM};
use super::span::{AttentionSequence, Span};
use super::visibility::Visibility;
use crate::cube::{cubes, dims, element, floats, integers, is_cube, plane_size, primitive, room, zeroed};
use blocks::{
    How, PlaceLaunch, Reading, ScoresLaunch, SizesLaunch, StridesLaunch, UNITS, attend_blocks, attend_several,
};
use parts::{keep_rows, merge_parts, quantize_rows};
pub(super) use rope_and_cache::{CubeRopeAndCache, supports_rope_and_cache};

/// Queries of a cube: unused ones cost as much.
const FEWEST_QUERIES: usize = 4;
const MOST_QUERIES: usize = 8;
/// Cubes below which a span is split, to occupy all of a device.
const FEW_CUBES: usize = 64;
/// Positions below which a part of a span is not worth a cube.
const SMALL_PART: usize = 512;
/// Short spans that share a launch, and its buffers.
const TOGETHER: usize = 4;
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
        attend(&[span], &query, 0..rows, params, &gathered, 0);
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

/// See [`batch_attention`](super::batch_attention). Short spans share launches, also across parts, and a long span is split among cubes. Only
/// rows with several partial results are merged.
///
/// # Panics
/// If the tensors are not on an accelerator, or nothing is asked.
pub(super) fn batch_attention(query: Tensor<3>, parts: Vec<AttentionSequence>) -> Tensor<2> {
    let query = floats(primitive(query));
    let [rows, heads, head_dim] = dims(&query);
    let mut all = Gathered::of(&query, rows);
    if parts.iter().any(|part| part.spans.iter().all(Span::is_empty)) {
        all.output = zeroed(&query, [rows, heads, head_dim]);
    }
    let mut first = 0;
    let parts: Vec<PartSpans> = parts
        .into_iter()
        .filter(|part| part.rows > 0)
        .map(|AttentionSequence { rows, spans, params }| {
            let spans = spans.into_iter().filter(|span| !span.is_empty());
            let spans = spans.map(|span| Sides::of(&query, span)).collect();
            first += rows;
            PartSpans { rows: first - rows..first, spans, params }
        })
        .collect();
    if can_batch(&parts, &query) {
        attend_batch(&parts, &query, &all);
    } else {
        for PartSpans { rows: of_part, spans, params } in parts {
            let rows = of_part.len();
            let launches = together(spans, &query, rows);
            let count: usize = launches.iter().map(|spans| parts_of(spans, &query, rows)).sum();
            if count == 0 {
                continue;
            }
            let gathered = (count > 1).then(|| Gathered::of(&query, count * rows));
            let mut at = if count > 1 { 0 } else { of_part.start };
            for spans in launches {
                let into = gathered.as_ref().unwrap_or(&all);
                attend(&spans, &query, of_part.clone(), params, into, at);
                at += parts_of(&spans, &query, rows) * rows;
            }
            if let Some(gathered) = gathered {
                gathered.merge(rows, count, count, &all, of_part.start);
            }
        }
    }
    let Gathered { output, .. } = all;
    Tensor::<3>::from_primitive::<CubeBackend>(output).reshape([rows, heads * head_dim])
}

/// A part with its spans that are not empty.
struct PartSpans {
    rows: Range<usize>,
    spans: Vec<Sides>,
    params: AttentionParams,
}

/// Returns whether the spans of several parts can share launches: short spans of one form, and equally many rows in each part.
fn can_batch(parts: &[PartSpans], query: &CubeTensor) -> bool {
    let [first, _, ..] = parts else { return false };
    let (rows, binds) = (first.rows.len(), query.client.properties().hardware.max_bindings);
    let same_scores = |one: &AttentionParams, other: &AttentionParams| {
        (one.window, one.scale, one.softcap) == (other.window, other.scale, other.softcap)
    };
    binds >= BINDINGS
        && parts.iter().all(|part| {
            part.rows.len() == rows
                && same_scores(&part.params, &first.params)
                && !part.spans.is_empty()
                && part.spans.iter().all(|span| span.goes_with(&first.spans[0], query, rows))
        })
}

/// The rows that attend to a span, and the rows of their results.
#[derive(Clone, Copy)]
struct SpanRows {
    params: AttentionParams,
    /// The first row in the query.
    row: usize,
    /// The first row of the results.
    slot: usize,
}

/// Computes attention of all parts in launches of up to [`TOGETHER`] spans, followed by one merge.
fn attend_batch(parts: &[PartSpans], query: &CubeTensor, all: &Gathered) {
    let (rows, params) = (parts[0].rows.len(), parts[0].params);
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
            let span_rows =
                SpanRows { params: part.params, row: index * rows, slot: layer * total + index * rows };
            (span, span_rows)
        })
    });
    let spans: Vec<_> = spans.collect();
    for together in spans.chunks(TOGETHER) {
        attend_spans(together, query, rows, params, gathered.as_ref().unwrap_or(all));
    }
    if let Some(gathered) = gathered {
        gathered.merge(total, most, most, all, 0);
    }
}

/// Overwrites the keys and values from position `at` on, converted to the type of the stored tensors. Writes in place if the
/// stored tensors are not shared. All shapes are those of [`KvTensor::assign`](super::KvTensor::assign), and keys and values
/// have the same shape.
///
/// # Panics
/// If the tensors are not on an accelerator.
pub(super) fn assign_both(kept: [Tensor<3>; 2], at: usize, added: [Tensor<3>; 2]) -> [Tensor<3>; 2] {
    let [keys, values] = kept.map(|kept| {
        let kept = into_contiguous(primitive(kept));
        // A copy may have room between its rows.
        if kept.can_mut() { kept } else { into_contiguous(kept.copy()) }
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

/// How a span is shared out among cubes.
#[derive(Debug, Clone, Copy)]
struct Split {
    /// Queries of a cube.
    queries: usize,
    /// Cubes beside each other for the queries of a key head.
    groups: usize,
    parts: usize,
    /// Positions of a part.
    piece: usize,
}

/// The keys and values of a span.
struct Sides {
    keys: Side,
    values: Side,
    position: usize,
    /// Which positions may be seen, in words of 32; the second number is how many words.
    visible: Option<(CubeTensor, usize)>,
}

impl Sides {
    fn new(
        query: &CubeTensor,
        keys: KvPrimitive<CubeBackend>,
        values: KvPrimitive<CubeBackend>,
        position: usize,
        visible: Option<Visibility>,
    ) -> Self {
        let [keys, values] = [keys, values].map(|held| Side::new(query, held));
        Self { keys, values, position, visible: visible.map(|visible| uploaded(query, &visible)) }
    }

    fn of(query: &CubeTensor, span: Span) -> Self {
        let held = |stored| match stored {
            KvTensor::Float(numbers) => KvPrimitive::Float(primitive(numbers)),
            KvTensor::Bytes { words, scales } => {
                KvPrimitive::Bytes { words: integers(words), scales: primitive(scales) }
            }
        };
        Self::new(query, held(span.keys), held(span.values), span.position, span.visible)
    }

    fn split(&self, query: &CubeTensor, rows: usize) -> Split {
        let ([kv_heads, positions, _], [_, heads, head_dim]) = (dims(&self.keys.numbers), dims(query));
        let most = if head_dim <= MAX_HEAD_DIM / 2 { MOST_QUERIES } else { FEWEST_QUERIES };
        let asked = rows * (heads / kv_heads);
        let queries = asked.next_power_of_two().clamp(FEWEST_QUERIES, most);
        let groups = asked.div_ceil(queries);
        let parts = (FEW_CUBES / (groups * kv_heads)).min(positions / SMALL_PART).max(1);
        let piece = positions.div_ceil(parts).next_multiple_of(UNITS as usize);
        Split { queries, groups, parts: positions.div_ceil(piece), piece }
    }

    /// Whether this span and another can be looked at by one launch, each by cubes of its own.
    fn goes_with(&self, other: &Self, query: &CubeTensor, rows: usize) -> bool {
        let alone = |span: &Self| span.visible.is_none() && span.split(query, rows).parts == 1;
        let read = |side: &Side| (side.reading, side.vector, side.element, dims::<3>(&side.numbers)[0]);
        let floats = self.keys.reading != Reading::Bytes && self.values.reading != Reading::Bytes;
        floats
            && alone(self)
            && alone(other)
            && read(&self.keys) == read(&other.keys)
            && read(&self.values) == read(&other.values)
    }

    fn how(&self, query: &CubeTensor, split: Split, params: AttentionParams, several: bool) -> How {
        let [_, _, head_dim] = dims(query);
        How {
            queries: split.queries,
            columns: head_dim.div_ceil(4).next_power_of_two() as u32,
            keys: self.keys.reading,
            values: self.values.reading,
            masked: self.visible.is_some(),
            capped: params.softcap.is_some(),
            several,
            plane: plane_size(&query.client),
        }
    }

    fn place(&self, SpanRows { params, row, slot }: SpanRows) -> PlaceLaunch {
        let ((key_head, key_position), (value_head, value_position)) =
            (steps(&self.keys.numbers), steps(&self.values.numbers));
        let [_, positions, _] = dims(&self.keys.numbers);
        // Where the first row itself is, counted from the first key, and one.
        let reach = params.position as i64 + 1 - self.position as i64;
        PlaceLaunch::new(
            key_head as u32,
            key_position as u32,
            value_head as u32,
            value_position as u32,
            positions as u32,
            reach.clamp(i64::from(i32::MIN / 4), i64::from(i32::MAX / 4)) as i32,
            row as u32,
            slot as u32,
        )
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
    params: AttentionParams,
    gathered: &Gathered,
    into: usize,
) {
    let span_rows = |index: usize| SpanRows { params, row: rows.start, slot: into + index * rows.len() };
    if spans.len() > 1 {
        let spans: Vec<_> = spans.iter().enumerate().map(|(index, span)| (span, span_rows(index))).collect();
        return attend_spans(&spans, query, rows.len(), params, gathered);
    }
    let split = spans[0].split(query, rows.len());
    let Sides { keys, values, visible, .. } = &spans[0];
    // Not looked at, where all may be seen.
    let (bits, words) = visible.as_ref().map_or((query, 0), |(bits, words)| (bits, *words));
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
        bits.clone().into_buffer_arg(),
        gathered.output.clone().into_buffer_arg(),
        gathered.log_sum_exp.clone().into_buffer_arg(),
        spans[0].place(span_rows(0)),
        keys.scale_strides(),
        values.scale_strides(),
        sizes(query, kv_heads, rows.len(), split.piece, words),
        scores(params),
        spans[0].how(query, split, params, false),
        keys.element,
        values.element,
    );
}

/// Computes attention to up to [`TOGETHER`] spans of one form in one launch, each for `rows` rows of its own.
fn attend_spans(
    spans: &[(&Sides, SpanRows)],
    query: &CubeTensor,
    rows: usize,
    params: AttentionParams,
    gathered: &Gathered,
) {
    let first = spans[0].0;
    let split = first.split(query, rows);
    let [kv_heads, _, _] = dims(&first.keys.numbers);
    // A span is not split here.
    let longest = spans.iter().map(|(span, _)| dims::<3>(&span.keys.numbers)[1]).max().unwrap_or(0);
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
        query.clone().into_buffer_arg(),
        gathered.output.clone().into_buffer_arg(),
        gathered.log_sum_exp.clone().into_buffer_arg(),
        first_place,
        second_place,
        third_place,
        fourth_place,
        sizes(query, kv_heads, rows, longest, 0),
        scores(params),
        first.how(query, split, params, true),
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

/// The bits beside `like`, and how many words they are.
fn uploaded(like: &CubeTensor, visible: &Visibility) -> (CubeTensor, usize) {
    let words: Vec<u32> =
        visible.words().iter().flat_map(|word| [*word as u32, (*word >> 32) as u32]).collect();
    if words.is_empty() {
        return (room(like, [1]), 0);
    }
    let (client, count) = (like.client.clone(), words.len());
    let handle = client.create_from_slice(bytemuck::cast_slice(&words));
    let shape = Shape::new([count]);
    (CubeTensor::new_contiguous(client, like.device.clone(), shape, handle, DType::U32), count)
}

/// The tensor with the elements of a row after each other; steps between heads and between positions are free.
fn in_rows(tensor: CubeTensor) -> CubeTensor {
    if tensor.meta.strides()[2] == 1 { tensor } else { into_contiguous(tensor) }
}

/// Steps between heads and between positions.
fn steps(tensor: &CubeTensor) -> (usize, usize) {
    (tensor.meta.strides()[0], tensor.meta.strides()[1])
}

/// Keys or values, and how to read them.
struct Side {
    numbers: CubeTensor,
    /// Anything where the numbers are floats.
    scales: CubeTensor,
    reading: Reading,
    vector: VectorSize,
    element: ElemType,
}

impl Side {
    fn new(query: &CubeTensor, held: KvPrimitive<CubeBackend>) -> Self {
        let [_, _, head_dim] = dims(query);
        match held {
            KvPrimitive::Float(numbers) => {
                let numbers = in_rows(numbers);
                let (head, position) = steps(&numbers);
                let whole = [head_dim, head, position].iter().all(|length| length.is_multiple_of(4));
                Self {
                    scales: query.clone(),
                    reading: if whole { Reading::Fours } else { Reading::Elements },
                    vector: if whole { 4 } else { 1 },
                    element: element(&numbers),
                    numbers,
                }
            }
            KvPrimitive::Bytes { words, scales } => Self {
                numbers: in_rows(words),
                scales,
                reading: Reading::Bytes,
                vector: 1,
                element: ElemType::UInt(UIntKind::U32),
            },
        }
    }

    /// Steps between heads and between positions of the scales.
    fn scale_strides(&self) -> StridesLaunch {
        let (head, position) = match self.reading {
            Reading::Bytes => steps(&self.scales),
            Reading::Fours | Reading::Elements => (0, 0),
        };
        StridesLaunch::new(head as u32, position as u32)
    }
}
