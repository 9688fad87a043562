use std::ops::Range;

use firebox_kernels::attend::Stored;

/// What a layer that is not recurrent remembers of consecutive positions.
#[derive(Debug, Clone)]
pub enum Remembered {
    /// Keys and values, `[kv_heads, positions, head_dim]`.
    Attention {
        /// What queries are multiplied with.
        keys: Stored,
        /// What is gathered.
        values: Stored,
    },
    /// Hidden states, `[1, positions, width]`.
    States(Stored),
}

impl Remembered {
    /// How many positions.
    pub(crate) fn positions(&self) -> usize {
        match self {
            Self::Attention { keys: held, .. } | Self::States(held) => held.positions(),
        }
    }

    /// Some of the positions, where they lie.
    pub(crate) fn part(&self, positions: Range<usize>) -> Self {
        match self {
            Self::Attention { keys, values } => {
                Self::Attention { keys: keys.part(positions.clone()), values: values.part(positions) }
            }
            Self::States(states) => Self::States(states.part(positions)),
        }
    }

    /// Writes over the positions from `at` on.
    ///
    /// # Panics
    /// If they are of different layers.
    pub(crate) fn assign(&mut self, at: usize, added: Self) {
        match (self, added) {
            (Self::Attention { keys, values }, Self::Attention { keys: new_keys, values: new_values }) => {
                Stored::assign_both([keys, values], at, [new_keys, new_values]);
            }
            (Self::States(states), Self::States(added)) => states.assign(at, added),
            _ => panic!("keys and hidden states do not mix"),
        }
    }
}
