use std::ops::Range;

use burn::tensor::Device;

use crate::config::DecoderConfig;
use crate::rope::RopeTable;

/// Consecutive tokens of one sequence, on their way through the layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Input<'a> {
    /// The tokens.
    pub tokens: &'a [u32],
    /// How many tokens of the sequence have passed before.
    pub position: usize,
    /// How long the sequence is known to become, at least: position schemes that depend on the length of
    /// the sequence use it, so that a prompt means the same in one piece and in several.
    pub length: usize,
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
}

impl Rows {
    pub fn new(config: &DecoderConfig, inputs: &[Input<'_>], device: &Device) -> Self {
        let mut next = 0;
        let groups: Vec<Group> = inputs
            .iter()
            .map(|input| {
                let rows = next..next + input.tokens.len();
                next = rows.end;
                Group { rows, position: input.position }
            })
            .collect();
        let spans: Vec<_> = inputs
            .iter()
            .map(|input| {
                let positions = input.position..input.position + input.tokens.len();
                let length = input.length.max(positions.end);
                (positions, length)
            })
            .collect();
        let ropes = config.ropes.iter().map(|rope| RopeTable::new(rope, &spans, device)).collect();
        Self { groups, ropes }
    }

    pub fn rope(&self, index: usize) -> &RopeTable {
        &self.ropes[index]
    }
}
