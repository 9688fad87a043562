//! The rows of one pass: the input tokens of its sequences, with their positions and rotary tables.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};
use firebox_kernels::step::{StepCounter, StepInput};

use crate::Head;
use crate::config::DecoderConfig;
use crate::rope::RopeTable;

/// Consecutive tokens of one sequence, on their way through the layers.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// The tokens.
    pub tokens: &'a [u32],
    /// How many tokens of the sequence have passed before.
    pub position: usize,
    /// How long the sequence is known to become, at least: position schemes that depend on the length of
    /// the sequence use it, so that a prompt means the same in one piece and in several.
    pub length: usize,
    /// What its last layers are; absent means the model's own.
    pub head: Option<&'a Arc<Head>>,
}

impl<'a> Input<'a> {
    /// Tokens for the model's own last layers.
    pub fn new(tokens: &'a [u32], position: usize, length: usize) -> Self {
        Self { tokens, position, length, head: None }
    }
}

/// What layers need to know about the rows of a hidden state, worked out once for all of them.
#[derive(Debug, Clone)]
pub(crate) struct Rows {
    pub groups: Vec<Group>,
    ropes: Vec<RopeTable>,
    /// The counter of a recorded step.
    pub steps: Option<StepCounter>,
}

/// The rows of one sequence.
#[derive(Debug, Clone)]
pub(crate) struct Group {
    pub rows: Range<usize>,
    pub position: usize,
    /// How long the sequence is known to become.
    pub length: usize,
}

impl Rows {
    pub fn new(config: &DecoderConfig, inputs: &[Input<'_>], device: &Device) -> Self {
        let inputs = inputs.iter().map(|input| (input.tokens.len(), input.position, input.length));
        Self::of(config, inputs, device)
    }

    /// Those of some groups, in that order.
    pub fn some(&self, groups: &[usize], config: &DecoderConfig, device: &Device) -> Self {
        let groups = groups.iter().map(|&group| &self.groups[group]);
        Self::of(config, groups.map(|group| (group.rows.len(), group.position, group.length)), device)
    }

    /// Of how many rows, from which position and for which length each group is.
    fn of(
        config: &DecoderConfig,
        groups: impl Iterator<Item = (usize, usize, usize)>,
        device: &Device,
    ) -> Self {
        let groups = Group::in_order(groups);
        let spans = Group::spans(&groups);
        let ropes = config.ropes.iter().map(|rope| RopeTable::new(rope, &spans, device)).collect();
        Self { groups, ropes, steps: None }
    }

    /// Returns the rows of a recorded step, whose angles are the sections of `input` behind the first.
    pub fn recorded(config: &DecoderConfig, inputs: &[Input<'_>], input: &StepInput) -> Self {
        let groups = Group::of_inputs(inputs);
        let rows = groups.last().map_or(0, |group| group.rows.end);
        let ropes = config.ropes.iter().enumerate().map(|(index, rope)| {
            let pairs = rope.width.div_ceil(2);
            let table = |section| input.floats(section, [rows, 1, pairs]);
            RopeTable::from_tables(rope, [table(2 * index + 1), table(2 * index + 2)])
        });
        Self { ropes: ropes.collect(), groups, steps: Some(input.counter()) }
    }

    /// Returns cosines and sines of the inputs' positions for every position scheme.
    pub fn angles(config: &DecoderConfig, inputs: &[Input<'_>]) -> Vec<[Vec<f32>; 2]> {
        let spans = Group::spans(&Group::of_inputs(inputs));
        config.ropes.iter().map(|rope| rope.angles(&spans)).collect()
    }

    pub fn rope(&self, index: usize) -> &RopeTable {
        &self.ropes[index]
    }
}

impl Group {
    fn of_inputs(inputs: &[Input<'_>]) -> Vec<Self> {
        Self::in_order(inputs.iter().map(|input| (input.tokens.len(), input.position, input.length)))
    }

    /// Of how many rows, from which position and for which length each group is.
    fn in_order(groups: impl Iterator<Item = (usize, usize, usize)>) -> Vec<Self> {
        let mut next = 0;
        groups
            .map(|(count, position, length)| {
                let rows = next..next + count;
                next = rows.end;
                Self { rows, position, length: length.max(position + count) }
            })
            .collect()
    }

    /// The positions of the groups, with the lengths of their sequences.
    fn spans(groups: &[Self]) -> Vec<(Range<usize>, usize)> {
        groups.iter().map(|group| (group.position..group.position + group.rows.len(), group.length)).collect()
    }
}

/// Tokens that are known to be in the vocabulary, as a tensor.
pub(crate) fn indices(tokens: &[u32], device: &Device) -> Tensor<1, Int> {
    let indices: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
    Tensor::from_data(TensorData::new(indices, [tokens.len()]), device)
}
