//! Fused head norm, rotation and cache write on accelerators, in launches of their own or together with attention.

use std::cell::RefCell;
use std::ops::Range;

use burn::tensor::{DType, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::super::head_transform::HeadTransform;
use super::super::params::MAX_HEAD_DIM;
use super::super::span::AttentionSequence;
use super::head_inputs::HeadInputs;
use super::heads_kernels::{DestinationLaunch, LANES, LINES, rope_and_cache_rows, rope_and_cache_several};
use super::part_table::offset;
use super::sides::{Sides, steps};
use super::{Gathered, SequenceSpans, attend_sequences, few_rows};
use crate::cube::{cubes, dims, element, plane_size, primitive, room};

/// Buffers of a launch that writes to one page.
const BINDINGS: u32 = 11;
/// Pages that one launch writes to, equally many rows each.
const TOGETHER: usize = 4;
/// Buffers of a launch that writes to several pages.
const SEVERAL_BINDINGS: u32 = BINDINGS + 2 * (TOGETHER as u32 - 1);

/// See [`RopeAndCache`](super::super::RopeAndCache).
#[derive(Debug)]
pub(in super::super) struct CubeRopeAndCache {
    heads: HeadInputs,
    steps: Option<CubeTensor>,
    placed: CubeTensor,
    pending: RefCell<Vec<Pending>>,
}

/// Rows that are not launched yet, with the page they go to.
#[derive(Debug, Clone)]
struct Pending {
    rows: Range<usize>,
    keys: CubeTensor,
    values: CubeTensor,
    at: usize,
}

impl Pending {
    fn destination(&self) -> DestinationLaunch {
        let [_, positions, _] = dims(&self.keys);
        DestinationLaunch::new(self.rows.start as u32, positions as u32, self.at as u32)
    }

    /// Returns whether one launch can write both.
    fn goes_with(&self, other: &Self) -> bool {
        self.rows.len() == other.rows.len() && self.keys.dtype == other.keys.dtype
    }
}

/// Returns whether the tensor is on an accelerator that binds enough buffers.
pub(in super::super) fn supports_rope_and_cache<const D: usize>(query: &Tensor<D>) -> bool {
    crate::cube::is_cube(&query.device())
        && primitive(query.clone()).client.properties().hardware.max_bindings >= BINDINGS
}

impl CubeRopeAndCache {
    pub fn new(heads: [Tensor<3>; 3], mut transform: HeadTransform) -> Self {
        let steps = transform.steps.take().map(|steps| steps.counter);
        let heads = HeadInputs::new(heads, transform);
        let placed = room(&heads.query, dims::<3>(&heads.query));
        Self { heads, steps, placed, pending: RefCell::default() }
    }

    /// Enqueues some rows, whose keys and values go to the positions of `kept` from `at` on, in place. The launch follows at
    /// [`query`](Self::query) or [`attend`](Self::attend).
    pub fn write(&self, rows: Range<usize>, kept: [Tensor<3>; 2], at: usize) -> [Tensor<3>; 2] {
        let [keys, values] = kept.map(|kept| into_contiguous(primitive(kept)));
        if !rows.is_empty() {
            let pending = Pending { rows, keys: keys.clone(), values: values.clone(), at };
            self.pending.borrow_mut().push(pending);
        }
        [keys, values].map(Tensor::from_primitive::<CubeBackend>)
    }

    /// Launches all pending rows and returns the queries.
    pub fn query(self) -> Tensor<3> {
        self.flush();
        Tensor::from_primitive::<CubeBackend>(self.placed)
    }

    /// Launches all pending rows and computes attention. The launch that attends also transforms and writes sequences of one row.
    pub fn attend(self, sequences: Vec<AttentionSequence>) -> Tensor<2> {
        let [rows, heads, head_dim] = dims(&self.heads.query);
        for span in sequences.iter().flat_map(|sequence| &sequence.spans) {
            span.check(heads, head_dim);
        }
        let all = Gathered::of_sequences(&self.heads.query, &sequences);
        let sequences = SequenceSpans::of(&self.heads.query, sequences);
        let (placed, others): (Vec<_>, Vec<_>) =
            sequences.into_iter().partition(|sequence| self.places(sequence));
        let is_placed = |pending: &Pending| placed.iter().any(|sequence| sequence.rows == pending.rows);
        self.pending.borrow_mut().retain(|pending| !is_placed(pending));
        few_rows::attend(placed, &self.heads.query, Some(&self.heads), &all.output);
        self.flush();
        attend_sequences(others, &self.placed, &all);
        Tensor::<3>::from_primitive::<CubeBackend>(all.output).reshape([rows, heads * head_dim])
    }

    /// Returns whether there is attention here for such heads.
    pub fn attends(&self) -> bool {
        let [rows, heads, head_dim] = dims(&self.heads.query);
        rows * heads * head_dim > 0 && head_dim <= MAX_HEAD_DIM
    }

    /// Returns whether the only row of a sequence can be transformed and written by the launch that attends.
    fn places(&self, sequence: &SequenceSpans) -> bool {
        few_rows::takes_heads(sequence, &self.heads.query)
            && sequence.spans.last().is_some_and(|last| {
                last.end() == sequence.scoring.params.position + 1
                    && self.writes_last(sequence.rows.start, last)
            })
    }

    /// Returns whether a row is to be written to the last position of a span.
    fn writes_last(&self, row: usize, span: &Sides) -> bool {
        let is_last = |side: &CubeTensor, kept: &CubeTensor, at: usize| {
            let memory = |tensor: &CubeTensor| tensor.handle.memory.clone().binding().id();
            let [_, positions, _] = dims(side);
            let place = |tensor, at| offset(tensor) + at * steps(tensor).1;
            memory(side) == memory(kept)
                && side.dtype == kept.dtype
                && steps(side) == steps(kept)
                && place(side, positions - 1) == place(kept, at)
        };
        self.pending.borrow().iter().any(|pending| {
            pending.rows == (row..row + 1)
                && is_last(&span.keys.numbers, &pending.keys, pending.at)
                && is_last(&span.values.numbers, &pending.values, pending.at)
        })
    }

    /// Launches all pending rows.
    fn flush(&self) {
        let pending = self.pending.take();
        let binds_several = self.heads.query.client.properties().hardware.max_bindings >= SEVERAL_BINDINGS;
        let mut rest = &pending[..];
        while let Some(first) = rest.first() {
            let most = if binds_several { TOGETHER } else { 1 };
            let count = rest.iter().take(most).take_while(|other| first.goes_with(other)).count();
            let (together, others) = rest.split_at(count);
            self.launch(together);
            rest = others;
        }
    }

    /// Launches rows that go to up to [`TOGETHER`] pages.
    fn launch(&self, together: &[Pending]) {
        let ([_, heads, head_dim], [_, kv_heads, _]) = (dims(&self.heads.query), dims(&self.heads.key));
        let rows = together[0].rows.len();
        let lines = together.len() * rows * (heads + 2 * kv_heads);
        if lines * head_dim == 0 {
            return;
        }
        let (client, kind) = (self.heads.query.client.clone(), element(&together[0].keys));
        let (cubes, dim) = (cubes(lines.div_ceil(LINES as usize)), CubeDim::new_2d(LANES, LINES));
        let sizes = self.heads.sizes(rows);
        let how = self.heads.how(self.steps.is_some());
        let [query, key, value, query_weight, key_weight, cos, sin] =
            self.heads.buffers().map(CubeTensor::into_buffer_arg);
        let steps = self.steps.clone().unwrap_or_else(|| self.heads.query.clone());
        let plane = plane_size(&client);
        if let [pending] = together {
            return rope_and_cache_rows::launch(
                &client,
                cubes,
                dim,
                query,
                key,
                value,
                query_weight,
                key_weight,
                cos,
                sin,
                steps.into_buffer_arg(),
                self.placed.clone().into_buffer_arg(),
                pending.keys.clone().into_buffer_arg(),
                pending.values.clone().into_buffer_arg(),
                pending.destination(),
                sizes,
                how,
                plane,
                kind,
            );
        }
        // Unused bindings repeat the last page.
        let every: [&Pending; TOGETHER] =
            std::array::from_fn(|index| &together[index.min(together.len() - 1)]);
        let [first_keys, second_keys, third_keys, fourth_keys] =
            every.map(|pending| pending.keys.clone().into_buffer_arg());
        let [first_values, second_values, third_values, fourth_values] =
            every.map(|pending| pending.values.clone().into_buffer_arg());
        let [first, second, third, fourth] = every.map(Pending::destination);
        rope_and_cache_several::launch(
            &client,
            cubes,
            dim,
            query,
            key,
            value,
            query_weight,
            key_weight,
            cos,
            sin,
            steps.into_buffer_arg(),
            self.placed.clone().into_buffer_arg(),
            first_keys,
            second_keys,
            third_keys,
            fourth_keys,
            first_values,
            second_values,
            third_values,
            fourth_values,
            first,
            second,
            third,
            fourth,
            sizes,
            together.len() as u32,
            how,
            plane,
            kind,
        );
    }

    /// Returns whether the heads can be written to a tensor of this dtype and shape.
    pub fn fits(&self, kept: &Tensor<3>) -> bool {
        let ([kv_heads, _, head_dim], [_, key_heads, key_dim]) = (kept.dims(), dims(&self.heads.key));
        matches!(kept.dtype(), DType::F32 | DType::F16) && (kv_heads, head_dim) == (key_heads, key_dim)
    }
}
