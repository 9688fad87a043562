//! The rows of one pass: the input tokens of its sequences, with their positions and rotary tables.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};

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
        let mut next = 0;
        let groups: Vec<Group> = groups
            .map(|(count, position, length)| {
                let rows = next..next + count;
                next = rows.end;
                Group { rows, position, length: length.max(position + count) }
            })
            .collect();
        let spans: Vec<_> = groups
            .iter()
            .map(|group| (group.position..group.position + group.rows.len(), group.length))
            .collect();
        let ropes = config.ropes.iter().map(|rope| RopeTable::new(rope, &spans, device)).collect();
        Self { groups, ropes }
    }

    pub fn rope(&self, index: usize) -> &RopeTable {
        &self.ropes[index]
    }
}

/// Tokens that are known to be in the vocabulary, as a tensor.
pub(crate) fn indices(tokens: &[u32], device: &Device) -> Tensor<1, Int> {
    let indices: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
    Tensor::from_data(TensorData::new(indices, [tokens.len()]), device)
}
