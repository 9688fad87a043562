//! The rows of one pass: those of each of its sequences, with their positions and rotary tables.

use std::ops::Range;

use burn::tensor::{Device, Int, Tensor, TensorData};
use firebox_kernels::step::{StepCounter, StepInput};
use firebox_kernels::transfers;

use crate::config::{DecoderConfig, RopeConfig};
use crate::rope::RopeTable;

/// What layers need to know about the rows of a hidden state, worked out once for all of them.
#[derive(Debug, Clone)]
pub(crate) struct Rows {
    pub groups: Vec<Group>,
    ropes: Vec<RopeTable>,
    /// The counter of a recorded step.
    pub steps: Option<StepCounter>,
    /// What layers get beside the hidden state, `[rows, layers * width]`, in models whose layers do.
    pub layer_inputs: Option<Tensor<2>>,
}

/// Joins the rows of groups again.
pub(crate) fn joined(mut groups: Vec<Tensor<2>>) -> Tensor<2> {
    if groups.len() == 1 { groups.remove(0) } else { Tensor::cat(groups, 0) }
}

/// The rows of one sequence.
#[derive(Debug, Clone)]
pub(crate) struct Group {
    pub rows: Range<usize>,
    pub position: usize,
    /// How long the sequence is known to become.
    pub length: usize,
}

/// How many rows a sequence has in a pass, from which position on, and how long it is known to become.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    pub rows: usize,
    pub position: usize,
    pub length: usize,
}

impl Rows {
    /// Lays out the rows of some sequences one after the other.
    pub fn new(ropes: &[RopeConfig], spans: impl Iterator<Item = Span>, device: &Device) -> Self {
        let groups = Group::in_order(spans);
        let spans = Group::positions(&groups);
        let ropes = ropes.iter().map(|rope| RopeTable::new(rope, &spans, device)).collect();
        Self { groups, ropes, steps: None, layer_inputs: None }
    }

    /// Returns the rows of a recorded step, whose angles are the sections of `input` behind the first.
    pub fn recorded(config: &DecoderConfig, spans: impl Iterator<Item = Span>, input: &StepInput) -> Self {
        let groups = Group::in_order(spans);
        let rows = groups.last().map_or(0, |group| group.rows.end);
        let ropes = config.ropes.iter().enumerate().map(|(index, rope)| {
            let pairs = rope.width.div_ceil(2);
            let table = |section| input.floats(section, [rows, 1, pairs]);
            RopeTable::from_tables(rope, [table(2 * index + 1), table(2 * index + 2)])
        });
        Self { ropes: ropes.collect(), groups, steps: Some(input.counter()), layer_inputs: None }
    }

    /// Returns cosines and sines of the positions of some sequences for every position scheme.
    pub fn angles(config: &DecoderConfig, spans: impl Iterator<Item = Span>) -> Vec<[Vec<f32>; 2]> {
        let positions = Group::positions(&Group::in_order(spans));
        config.ropes.iter().map(|rope| rope.angles(&positions)).collect()
    }

    /// Those of some groups, in that order.
    pub fn some(&self, groups: &[usize], config: &DecoderConfig, device: &Device) -> Self {
        let groups = groups.iter().map(|&group| &self.groups[group]);
        let spans = groups.clone().map(|group| Span {
            rows: group.rows.len(),
            position: group.position,
            length: group.length,
        });
        let rows: Vec<u32> =
            groups.flat_map(|group| group.rows.start as u32..group.rows.end as u32).collect();
        let layer_inputs =
            self.layer_inputs.as_ref().map(|inputs| inputs.clone().select(0, indices(&rows, device)));
        Self { layer_inputs, ..Self::new(&config.ropes, spans, device) }
    }

    pub fn rope(&self, index: usize) -> &RopeTable {
        &self.ropes[index]
    }
}

impl Group {
    /// Returns the group's rows of a tensor.
    pub fn of(&self, tensor: &Tensor<2>) -> Tensor<2> {
        tensor.clone().narrow(0, self.rows.start, self.rows.len())
    }

    /// Lays out sequences one after the other.
    fn in_order(spans: impl Iterator<Item = Span>) -> Vec<Self> {
        let mut next = 0;
        spans
            .map(|Span { rows: count, position, length }| {
                let rows = next..next + count;
                next = rows.end;
                Self { rows, position, length: length.max(position + count) }
            })
            .collect()
    }

    /// Returns the positions of the groups, with the lengths of their sequences.
    fn positions(groups: &[Self]) -> Vec<(Range<usize>, usize)> {
        groups.iter().map(|group| (group.position..group.position + group.rows.len(), group.length)).collect()
    }
}

/// Tokens that are known to be in the vocabulary, as a tensor.
pub(crate) fn indices(tokens: &[u32], device: &Device) -> Tensor<1, Int> {
    let indices: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
    transfers::count_upload();
    Tensor::from_data(TensorData::new(indices, [tokens.len()]), device)
}
