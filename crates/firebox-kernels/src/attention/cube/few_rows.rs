//! Attention of sequences with few rows: every row by cubes of its own, all pages in one launch, and another that merges their parts.
//!
//! What a row gathers depends neither on the rows beside it nor on how full its last page is.

use burn_cubecl::cubecl::ir::ElemType;
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::tensor::CubeTensor;

use super::SequenceSpans;
use super::head_inputs::HeadInputs;
use super::heads_kernels::{LANES, LINES};
use super::merged_rows::merge_parts_of_rows;
use super::part_table::{self, Launch, MEMORIES, PARTS, PartTable};
use super::parts_of_rows::{How, SizesLaunch, attend_parts, place_and_attend_parts};
use crate::cube::{dims, plane_size, room};

/// Rows that a sequence has at most. Rows read keys and values one by one, which caches make up for while they are few.
const MOST_ROWS: usize = 8;
/// Buffers of a launch.
const BINDINGS: u32 = 4 + MEMORIES as u32;
/// Buffers of a launch that transforms heads as well.
const PLACING_BINDINGS: u32 = 10 + MEMORIES as u32;
/// Numbers of a vector.
const VECTOR: usize = 4;

/// Returns whether the rows of a sequence are few, and its spans can be read here.
pub(super) fn takes(sequence: &SequenceSpans, query: &CubeTensor) -> bool {
    sequence.rows.len() <= MOST_ROWS
        && !sequence.spans.is_empty()
        && query.client.properties().hardware.max_bindings >= BINDINGS
        && sequence.spans.iter().all(part_table::fits)
}

/// Returns whether the only row of a sequence can attend in the launch that transforms its heads.
pub(super) fn takes_heads(sequence: &SequenceSpans, query: &CubeTensor) -> bool {
    sequence.rows.len() == 1
        && takes(sequence, query)
        && query.client.properties().hardware.max_bindings >= PLACING_BINDINGS
}

/// Computes attention of the rows of some sequences, and writes it to their rows of `output`, `[rows, heads, head_dim]`. With `heads`, of
/// heads that are transformed first; the last position of a sequence is then written.
pub(super) fn attend(
    mut sequences: Vec<SequenceSpans>,
    query: &CubeTensor,
    heads: Option<&HeadInputs>,
    output: &CubeTensor,
) {
    while let Some(first) = sequences.first() {
        let form = Form::of(first);
        let (alike, others): (Vec<_>, Vec<_>) =
            sequences.into_iter().partition(|sequence| Form::of(sequence) == form);
        Attending::new(&alike, form, query).run(heads, output);
        sequences = others;
    }
}

/// What sequences of one launch have in common.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Form {
    window: Option<usize>,
    scale: f32,
    softcap: Option<f32>,
    element: ElemType,
    kv_heads: usize,
}

impl Form {
    fn of(sequence: &SequenceSpans) -> Self {
        let params = sequence.scoring.params;
        let keys = &sequence.spans[0].keys;
        let [kv_heads, _, _] = dims(&keys.numbers);
        Self {
            window: params.window,
            scale: params.scale,
            softcap: params.softcap,
            element: keys.element,
            kv_heads,
        }
    }
}

/// Rows that launches share, and the buffers of these.
struct Attending<'a> {
    form: Form,
    query: &'a CubeTensor,
    table: PartTable,
    /// The table on the device.
    words: CubeTensor,
    counter: CubeTensor,
    /// A record of every part and head: an output, and a vector that begins with the logarithm of its sum.
    parts: CubeTensor,
    how: How,
}

impl<'a> Attending<'a> {
    fn new(sequences: &[SequenceSpans], form: Form, query: &'a CubeTensor) -> Self {
        let [_, heads, head_dim] = dims(query);
        let mut table = PartTable::new();
        for SequenceSpans { rows, spans, scoring } in sequences {
            for (index, row) in rows.clone().enumerate() {
                table.add_row(row, scoring.params.position + index, spans);
            }
        }
        let steps = sequences[0].scoring.steps.as_ref();
        let words = table.uploaded(query, steps);
        let counter = steps.map_or_else(|| words.clone(), |steps| steps.counter.clone());
        let parts = room(query, [table.entries() * PARTS * heads * (head_dim + VECTOR)]);
        // As many queries as shared memory has room for the sums of.
        let queries = (heads / form.kv_heads).next_power_of_two().min(if head_dim <= 256 { 4 } else { 2 });
        let how = How {
            queries,
            columns: (head_dim / VECTOR).next_power_of_two() as u32,
            capped: form.softcap.is_some(),
            plane: plane_size(&query.client),
        };
        Self { form, query, table, words, counter, parts, how }
    }

    fn run(&self, heads: Option<&HeadInputs>, output: &CubeTensor) {
        for launch in self.table.launches() {
            match heads {
                Some(heads) => self.place_and_attend(launch, heads),
                None => self.attend(launch),
            }
        }
        let [_, heads, head_dim] = dims(self.query);
        merge_parts_of_rows::launch(
            &self.query.client,
            CubeCount::Static(heads as u32, self.table.rows() as u32, 1),
            CubeDim::new_2d(LANES, LINES),
            VECTOR,
            self.parts.clone().into_buffer_arg(),
            self.words.clone().into_buffer_arg(),
            output.clone().into_buffer_arg(),
            heads as u32,
            (head_dim / VECTOR) as u32,
            f32::NEG_INFINITY,
            self.how,
        );
    }

    fn attend(&self, launch: &Launch) {
        let [first, second, third, fourth, fifth, sixth, seventh, eighth] =
            memories(launch).map(CubeTensor::into_buffer_arg);
        attend_parts::launch(
            &self.query.client,
            self.cubes(launch),
            CubeDim::new_2d(LANES, LINES),
            VECTOR,
            self.query.clone().into_buffer_arg(),
            self.words.clone().into_buffer_arg(),
            self.counter.clone().into_buffer_arg(),
            first,
            second,
            third,
            fourth,
            fifth,
            sixth,
            seventh,
            eighth,
            self.parts.clone().into_buffer_arg(),
            self.sizes(launch),
            self.how,
            self.form.element,
        );
    }

    fn place_and_attend(&self, launch: &Launch, heads: &HeadInputs) {
        let [first, second, third, fourth, fifth, sixth, seventh, eighth] =
            memories(launch).map(CubeTensor::into_buffer_arg);
        let [query, key, value, query_weight, key_weight, cos, sin] =
            heads.buffers().map(CubeTensor::into_buffer_arg);
        place_and_attend_parts::launch(
            &self.query.client,
            self.cubes(launch),
            CubeDim::new_2d(LANES, LINES),
            VECTOR,
            query,
            key,
            value,
            query_weight,
            key_weight,
            cos,
            sin,
            self.words.clone().into_buffer_arg(),
            self.counter.clone().into_buffer_arg(),
            first,
            second,
            third,
            fourth,
            fifth,
            sixth,
            seventh,
            eighth,
            self.parts.clone().into_buffer_arg(),
            heads.sizes(1),
            self.sizes(launch),
            // The table says what a recorded step adds.
            heads.how(false),
            self.how,
            self.form.element,
        );
    }

    fn cubes(&self, launch: &Launch) -> CubeCount {
        let [_, heads, _] = dims(self.query);
        let groups = (heads / self.form.kv_heads).div_ceil(self.how.queries);
        let entries = launch.entries.len();
        CubeCount::Static((groups * PARTS) as u32, self.form.kv_heads as u32, entries as u32)
    }

    fn sizes(&self, launch: &Launch) -> SizesLaunch {
        let [_, heads, head_dim] = dims(self.query);
        SizesLaunch::new(
            heads as u32,
            (heads / self.form.kv_heads) as u32,
            (head_dim / VECTOR) as u32,
            self.table.entries_at() as u32,
            launch.entries.start as u32,
            self.form.window.unwrap_or(usize::MAX).min(i32::MAX as usize / 2) as i32,
            self.form.scale,
            self.form.softcap.unwrap_or(1.0),
            f32::NEG_INFINITY,
        )
    }
}

/// The memories of a launch; the last one again for bindings that it does not use.
fn memories(launch: &Launch) -> [CubeTensor; MEMORIES] {
    std::array::from_fn(|index| launch.memories[index.min(launch.memories.len() - 1)].clone())
}
