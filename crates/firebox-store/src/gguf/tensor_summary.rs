//! What the tensors of a file say about its configuration.

/// The parts of the configuration that follow from tensors rather than from metadata.
#[derive(Debug, Default)]
pub(crate) struct TensorSummary {
    pub(crate) vocab_size: usize,
    pub(crate) has_output: bool,
    pub(crate) has_attention_bias: bool,
    pub(crate) has_attention_output_bias: bool,
    pub(crate) has_mlp_bias: bool,
    pub(crate) token_types: Option<usize>,
    pub(crate) rope_factors: Option<Vec<f32>>,
    pub(crate) long_factors: Option<Vec<f32>>,
    pub(crate) short_factors: Option<Vec<f32>>,
}
