//! Pooling of token states into one vector per text.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

/// How the states of a text's tokens become one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// Their mean.
    #[default]
    Mean,
    /// The first token's, which encoders may keep for what a text is about.
    First,
    /// The last token's: the only one of a decoder that has seen all of the text.
    Last,
}

impl Pooling {
    /// From `[tokens, width]` to `[width]`.
    pub fn pool(self, states: Tensor<2>) -> Tensor<1> {
        let [tokens, width] = states.dims();
        match self {
            Self::Mean => states.mean_dim(0),
            Self::First => states.narrow(0, 0, 1),
            Self::Last => states.narrow(0, tokens.saturating_sub(1), 1),
        }
        .reshape([width])
    }
}

/// A vector of the same direction whose length is one.
pub fn of_length_one(vector: Tensor<1>) -> Tensor<1> {
    // A zero vector stays zero instead of becoming NaN.
    let length = vector.clone().square().sum().sqrt().clamp_min(1e-12);
    vector.div(length)
}
