//! What the tensors of a file say about its configuration.

/// The parts of the configuration that follow from tensors rather than from metadata.
#[derive(Debug, Default)]
pub(crate) struct TensorSummary {
    pub(crate) vocab_size: usize,
    pub(crate) has_output: bool,
    pub(crate) has_attention_bias: bool,
    pub(crate) has_attention_output_bias: bool,
    pub(crate) has_mlp_bias: bool,
    pub(crate) has_query_norm: bool,
    pub(crate) has_convolution_bias: bool,
    /// Whether the convolution of Mamba-2 has a bias.
    pub(crate) has_mixer_convolution_bias: bool,
    /// Whether a number is added to each expert's score before some are chosen.
    pub(crate) has_expert_bias: bool,
    /// Whether queries, keys, values and gates of the delta rule are one matrix.
    pub(crate) has_grouped_projections: bool,
    /// Whether what heads multiply latents by is one matrix.
    pub(crate) has_joined_factors: bool,
    /// Layers with matrices of keys, and of values.
    pub(crate) key_projections: usize,
    pub(crate) value_projections: usize,
    /// Rows of the table of every layer's own inputs.
    pub(crate) layer_rows: Option<usize>,
    pub(crate) token_types: Option<usize>,
    pub(crate) rope_factors: Option<Vec<f32>>,
    pub(crate) long_factors: Option<Vec<f32>>,
    pub(crate) short_factors: Option<Vec<f32>>,
}
