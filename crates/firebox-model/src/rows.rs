use std::ops::Range;

use burn::tensor::{Device, Tensor, TensorData};

use crate::config::{DecoderConfig, MixerConfig};
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
    /// For each distinct window of the model, what every group sees through it.
    views: Vec<(Option<usize>, Vec<View>)>,
}

/// The rows of one sequence.
#[derive(Debug, Clone)]
pub(crate) struct Group {
    pub rows: Range<usize>,
    pub position: usize,
}

/// What the rows of one sequence see of its positions.
#[derive(Debug, Clone)]
pub(crate) struct View {
    /// Earlier positions are seen by none of them.
    pub first: usize,
    /// `[rows, positions from first on]`, 0 where visible and -inf elsewhere; absent where all is visible.
    pub mask: Option<Tensor<2>>,
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
        let mut views: Vec<(Option<usize>, Vec<View>)> = Vec::new();
        for block in &config.blocks {
            if let MixerConfig::Attention(attention) = &block.mixer
                && !views.iter().any(|(window, _)| *window == attention.window)
            {
                let of_groups =
                    groups.iter().map(|group| View::new(group, attention.window, device)).collect();
                views.push((attention.window, of_groups));
            }
        }
        Self { groups, ropes, views }
    }

    pub fn rope(&self, index: usize) -> &RopeTable {
        &self.ropes[index]
    }

    pub fn views(&self, window: Option<usize>) -> &[View] {
        self.views.iter().find(|(known, _)| *known == window).map_or(&[], |(_, views)| views)
    }
}

impl View {
    fn new(group: &Group, window: Option<usize>, device: &Device) -> Self {
        let (rows, position) = (group.rows.len(), group.position);
        let reach = window.unwrap_or(usize::MAX);
        let first = (position + 1).saturating_sub(reach);
        let seen = position + rows - first;
        // A single row sees all that `first` leaves.
        if rows <= 1 {
            return Self { first, mask: None };
        }
        let mut mask = vec![f32::NEG_INFINITY; rows * seen];
        for (row, visible) in mask.chunks_exact_mut(seen).enumerate() {
            let own = position + row;
            let from = (own + 1).saturating_sub(reach) - first;
            visible[from..=own - first].fill(0.0);
        }
        Self { first, mask: Some(Tensor::from_data(TensorData::new(mask, [rows, seen]), device)) }
    }
}
