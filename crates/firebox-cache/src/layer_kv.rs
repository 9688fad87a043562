//! The stored tensors of one layer for consecutive positions.

use std::ops::Range;

use firebox_kernels::attention::KvTensor;

/// The stored tensors of an attention layer, or hidden states, for consecutive positions.
#[derive(Debug, Clone)]
pub enum LayerKv {
    /// Keys and values, `[kv_heads, positions, head_dim]`.
    Attention {
        /// The keys.
        keys: KvTensor,
        /// The values.
        values: KvTensor,
    },
    /// Rows that are keys and values of one head at once, `[1, positions, width]`.
    Latents(KvTensor),
    /// Hidden states, `[1, positions, width]`.
    HiddenStates(KvTensor),
}

impl LayerKv {
    /// The number of positions.
    pub(crate) fn positions(&self) -> usize {
        match self {
            Self::Attention { keys: held, .. } | Self::Latents(held) | Self::HiddenStates(held) => {
                held.positions()
            }
        }
    }

    /// A view of some of the positions.
    pub(crate) fn part(&self, positions: Range<usize>) -> Self {
        match self {
            Self::Attention { keys, values } => {
                Self::Attention { keys: keys.part(positions.clone()), values: values.part(positions) }
            }
            Self::Latents(rows) => Self::Latents(rows.part(positions)),
            Self::HiddenStates(states) => Self::HiddenStates(states.part(positions)),
        }
    }

    /// Overwrites the positions from `at` on. Keys and values on accelerators are those of a page, and written in place.
    ///
    /// # Panics
    /// If the two are of different kinds of layers.
    pub(crate) fn assign(&mut self, at: usize, added: Self) {
        match (self, added) {
            (Self::Attention { keys, values }, Self::Attention { keys: new_keys, values: new_values }) => {
                KvTensor::overwrite_both([keys, values], at, [new_keys, new_values]);
            }
            (Self::Latents(held), Self::Latents(added))
            | (Self::HiddenStates(held), Self::HiddenStates(added)) => held.assign(at, added),
            _ => panic!("keys, latents and hidden states do not mix"),
        }
    }
}
