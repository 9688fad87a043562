//! The state of a recurrent layer.

use burn::tensor::Tensor;

/// The state that a recurrent layer carries from token to token: a matrix per head and the last inputs of its causal
/// convolution. Its size does not depend on the number of tokens.
#[derive(Debug, Clone, Default)]
pub struct RecurrentState {
    /// `[heads, key width, value width]`, absent before the first token.
    pub memory: Option<Tensor<3>>,
    /// `[kernel - 1, channels]`, the convolution's inputs before the next token.
    pub convolution: Option<Tensor<2>>,
}
