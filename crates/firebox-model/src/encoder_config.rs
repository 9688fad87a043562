//! The configuration of a sentence encoder.

use serde::Serialize;

use crate::config::Activation;

/// Configuration of a sentence encoder.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EncoderConfig {
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the hidden state.
    pub hidden_size: usize,
    /// Inner width of the feed-forward networks.
    pub inner_size: usize,
    /// Number of layers.
    pub layers: usize,
    /// Attention heads.
    pub heads: usize,
    /// Length of the longest text in tokens.
    pub max_positions: usize,
    /// Number of token types, which distinguish the two texts of a pair.
    pub token_types: usize,
    /// Added to the variance.
    pub epsilon: f64,
    /// Activation of the feed-forward networks.
    pub activation: Activation,
}
