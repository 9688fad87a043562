//! The configuration of an encoder.

use serde::Serialize;

use crate::config::{Activation, BlockConfig, MixerConfig, NormConfig, RopeConfig, TensorNames};
use crate::pooling::Pooling;

/// Configuration of an encoder: its embedding, and layers that see all of a text.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EncoderConfig {
    /// The `model_type` of its family.
    pub family: &'static str,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the hidden state.
    pub hidden_size: usize,
    /// Length of the longest text in tokens.
    pub max_positions: usize,
    /// Factor of the embeddings.
    pub embedding_scale: Option<f32>,
    /// Row of a text's first token in the table of positions, if there is a table.
    pub first_position: Option<usize>,
    /// Number of token types, which distinguish the two texts of a pair; zero without a table of them.
    pub token_types: usize,
    /// Norm of the embeddings.
    pub embedding_norm: Option<NormConfig>,
    /// Position schemes, which attention layers refer to by index.
    pub ropes: Vec<RopeConfig>,
    /// Layers, from first to last.
    pub blocks: Vec<BlockConfig>,
    /// Norm after the last layer.
    pub final_norm: Option<NormConfig>,
    /// The classifier, if the checkpoint is one.
    pub classifier: Option<ClassifierConfig>,
    /// Names of its tensors. The prefix may be absent in a checkpoint.
    pub names: TensorNames,
}

/// Configuration of a classifier: pooled states, a linear layer, a nonlinearity, a norm if there is one, and the scores.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClassifierConfig {
    /// How the states of a text become one vector.
    pub pooling: Pooling,
    /// Name of the linear layer.
    pub dense: &'static str,
    /// Whether it has a bias.
    pub bias: bool,
    /// The nonlinearity.
    pub activation: Activation,
    /// Norm behind it.
    pub norm: Option<NormConfig>,
    /// Whether the closing token of a pair's first text stands twice.
    pub repeats_separator: bool,
    /// Name of the layer that yields the scores.
    pub scores: &'static str,
}

impl EncoderConfig {
    /// Returns the number of attention heads of the layer that has most.
    pub fn heads(&self) -> usize {
        let heads = self.blocks.iter().filter_map(|block| match &block.mixer {
            MixerConfig::Attention(attention) => Some(attention.heads),
            _ => None,
        });
        heads.max().unwrap_or(0)
    }
}
