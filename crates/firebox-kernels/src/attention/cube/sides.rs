//! The keys and values of a span, and how a launch reads them.

use std::ops::Range;

use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::ir::{ElemType, UIntKind};
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::super::kv_tensor::{KvPrimitive, KvTensor};
use super::super::params::{AttentionParams, MAX_HEAD_DIM};
use super::super::span::Span;
use super::super::visibility::Visibility;
use super::blocks::{How, PlaceLaunch, StridesLaunch, UNITS};
use super::reading::Reading;
use crate::cube::{dims, element, integers, plane_size, primitive, room};
use crate::step::StepCounter;

/// Cubes below which a span is split, to occupy all of a device.
const FEW_CUBES: usize = 64;
/// Positions below which a part of a span is not worth a cube.
const SMALL_PART: usize = 512;

/// How a span is shared out among cubes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Split {
    /// Queries of a cube.
    pub queries: usize,
    /// Cubes beside each other for the queries of a key head.
    pub groups: usize,
    pub parts: usize,
    /// Positions of a part.
    pub piece: usize,
}

/// How scores are made, and the counter of a recorded step.
#[derive(Clone)]
pub(super) struct Scoring {
    pub params: AttentionParams,
    pub steps: Option<StepCounter>,
}

/// The rows that attend to a span, and the rows of their results.
#[derive(Clone, Copy)]
pub(super) struct SpanRows {
    pub params: AttentionParams,
    /// The first row in the query.
    pub row: usize,
    /// The first row of the results.
    pub slot: usize,
}

/// The keys and values of a span.
pub(super) struct Sides {
    pub keys: Side,
    pub values: Side,
    position: usize,
    /// Which positions may be seen.
    visible: Option<Visibility>,
}

impl Sides {
    pub fn new(
        query: &CubeTensor,
        keys: KvPrimitive<CubeBackend>,
        values: KvPrimitive<CubeBackend>,
        position: usize,
        visible: Option<Visibility>,
    ) -> Self {
        let [keys, values] = [keys, values].map(|held| Side::new(query, held));
        Self { keys, values, position, visible }
    }

    pub fn of(query: &CubeTensor, span: Span) -> Self {
        let held = |stored| match stored {
            KvTensor::Float(numbers) => KvPrimitive::Float(primitive(numbers)),
            KvTensor::Bytes { words, scales } => {
                KvPrimitive::Bytes { words: integers(words), scales: primitive(scales) }
            }
        };
        Self::new(query, held(span.keys), held(span.values), span.position, span.visible)
    }

    /// The position of the first key.
    pub fn position(&self) -> usize {
        self.position
    }

    pub fn positions(&self) -> usize {
        let [_, positions, _] = dims(&self.keys.numbers);
        positions
    }

    /// The position after the last key.
    pub fn end(&self) -> usize {
        self.position + self.positions()
    }

    /// The bits of visible positions beside `like`, and how many words they are. `None` means that all are visible.
    pub fn uploaded_mask(&self, like: &CubeTensor) -> Option<(CubeTensor, usize)> {
        self.visible.as_ref().map(|visible| uploaded(like, visible))
    }

    /// The bits of visible positions, by words of 32 positions. Positions beyond the last word are hidden.
    pub fn mask_words(&self, words: Range<usize>) -> impl Iterator<Item = u32> {
        words.map(|word| {
            let Some(visible) = &self.visible else { return u32::MAX };
            let both = visible.words().get(word / 2).copied().unwrap_or(0);
            (both >> (32 * (word % 2))) as u32
        })
    }

    pub fn split(&self, query: &CubeTensor, rows: usize) -> Split {
        let ([kv_heads, positions, _], [_, heads, head_dim]) = (dims(&self.keys.numbers), dims(query));
        let asked = rows * (heads / kv_heads);
        // The same for one row as for many, because it decides the order of sums.
        let queries = if head_dim <= MAX_HEAD_DIM / 2 { 8 } else { 4 };
        let groups = asked.div_ceil(queries);
        let parts = (FEW_CUBES / (groups * kv_heads)).min(positions / SMALL_PART).max(1);
        let piece = positions.div_ceil(parts).next_multiple_of(UNITS as usize);
        Split { queries, groups, parts: positions.div_ceil(piece), piece }
    }

    /// Whether this span and another can be looked at by one launch, each by cubes of its own.
    pub fn goes_with(&self, other: &Self, query: &CubeTensor, rows: usize) -> bool {
        let alone = |span: &Self| span.visible.is_none() && span.split(query, rows).parts == 1;
        let read = |side: &Side| (side.reading, side.vector, side.element, dims::<3>(&side.numbers)[0]);
        let floats = self.keys.reading != Reading::Bytes && self.values.reading != Reading::Bytes;
        floats
            && alone(self)
            && alone(other)
            && read(&self.keys) == read(&other.keys)
            && read(&self.values) == read(&other.values)
    }

    pub fn how(&self, query: &CubeTensor, split: Split, scoring: &Scoring, several: bool) -> How {
        let [_, _, head_dim] = dims(query);
        How {
            queries: split.queries,
            columns: head_dim.div_ceil(4).next_power_of_two() as u32,
            keys: self.keys.reading,
            values: self.values.reading,
            masked: self.visible.is_some(),
            capped: scoring.params.softcap.is_some(),
            counted: scoring.steps.is_some(),
            several,
            plane: plane_size(&query.client),
        }
    }

    pub fn place(&self, SpanRows { params, row, slot }: SpanRows) -> PlaceLaunch {
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
            u32::from(reach == positions as i64),
        )
    }
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
pub(super) fn in_rows(tensor: CubeTensor) -> CubeTensor {
    if tensor.meta.strides()[2] == 1 { tensor } else { into_contiguous(tensor) }
}

/// Steps between heads and between positions.
pub(super) fn steps(tensor: &CubeTensor) -> (usize, usize) {
    (tensor.meta.strides()[0], tensor.meta.strides()[1])
}

/// Keys or values, and how to read them.
pub(super) struct Side {
    pub numbers: CubeTensor,
    /// Anything where the numbers are floats.
    pub scales: CubeTensor,
    reading: Reading,
    pub vector: VectorSize,
    pub element: ElemType,
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

    /// Whether every load takes four floats at once.
    pub fn is_in_fours(&self) -> bool {
        self.reading == Reading::Fours
    }

    /// Steps between heads and between positions of the scales.
    pub fn scale_strides(&self) -> StridesLaunch {
        let (head, position) = match self.reading {
            Reading::Bytes => steps(&self.scales),
            Reading::Fours | Reading::Elements => (0, 0),
        };
        StridesLaunch::new(head as u32, position as u32)
    }
}
