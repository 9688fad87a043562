//! What a decoder is made of. A family file fills this in from a `config.json`; the modules are built from it.

use serde::Serialize;

pub use firebox_kernels::Activation;

/// A whole decoder.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DecoderConfig {
    /// The `model_type` of its family.
    pub family: &'static str,
    /// Rows of the embedding and of the unembedding.
    pub vocab_size: usize,
    /// Width of the hidden state.
    pub hidden_size: usize,
    /// Positions the model was trained for.
    pub max_positions: usize,
    /// Multiplies embeddings.
    pub embedding_scale: Option<f32>,
    /// The position schemes its attention layers refer to by index.
    pub ropes: Vec<RopeConfig>,
    /// From first to last.
    pub blocks: Vec<BlockConfig>,
    /// Before the unembedding.
    pub final_norm: NormConfig,
    /// Whether the unembedding is the embedding.
    pub tied_embeddings: bool,
    /// `cap * tanh(logit / cap)` on the logits.
    pub logit_softcap: Option<f32>,
    /// How its tensors are called.
    pub names: TensorNames,
}

/// Tensor names outside the blocks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorNames {
    /// What stands before every name but the unembedding's, such as `model.`
    pub prefix: String,
    /// The unembedding's name without `.weight`.
    pub unembedding: String,
    /// Tensors that start with one of these belong to parts this engine does not run.
    pub foreign: Vec<String>,
}

impl Default for TensorNames {
    fn default() -> Self {
        Self { prefix: "model.".into(), unembedding: "lm_head".into(), foreign: Vec::new() }
    }
}

/// One layer: norm, mixer, norm, feed-forward, each with a residual around it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BlockConfig {
    /// Before the mixer.
    pub mixer_norm: NormConfig,
    /// What moves information between positions.
    pub mixer: MixerConfig,
    /// On the mixer's output, before it joins the residual.
    pub mixer_output_norm: Option<NormConfig>,
    /// Before the feed-forward.
    pub feed_forward_norm: NormConfig,
    /// What works on each position alone.
    pub feed_forward: FeedForwardConfig,
    /// On the feed-forward's output, before it joins the residual.
    pub feed_forward_output_norm: Option<NormConfig>,
}

/// A root-mean-square norm.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NormConfig {
    /// Its name within the block, without `.weight`.
    pub name: String,
    /// How many elements are normalised together.
    pub width: usize,
    /// Added to the mean square.
    pub epsilon: f64,
    /// Added to the stored weight; 1 where the checkpoint stores weights around zero.
    pub weight_offset: f32,
}

impl NormConfig {
    /// The same norm under another name and width.
    pub(crate) fn named(&self, name: &str, width: usize) -> Self {
        Self { name: name.into(), width, ..self.clone() }
    }
}

/// What moves information between positions.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum MixerConfig {
    /// Softmax attention over all earlier positions or a window of them.
    Attention(AttentionConfig),
    /// The gated delta rule.
    GatedDeltaNet(DeltaNetConfig),
}

/// Grouped-query attention.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AttentionConfig {
    /// Width of the hidden state.
    pub hidden_size: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Multiplies queries times keys.
    pub scale: f32,
    /// How many positions are visible, the query's own included.
    pub window: Option<usize>,
    /// `cap * tanh(score / cap)` on the scores.
    pub softcap: Option<f32>,
    /// Which of the model's position schemes applies, if any.
    pub rope: Option<usize>,
    /// Norm of every query head and every key head.
    pub head_norm: Option<NormConfig>,
    /// Whether the query projection carries a gate for the output beside every head.
    pub gated: bool,
    /// How the projections are stored.
    pub projections: AttentionProjections,
    /// Whether queries, keys and values have a bias.
    pub input_bias: bool,
    /// Whether the output has a bias.
    pub output_bias: bool,
}

/// How queries, keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AttentionProjections {
    /// `q_proj`, `k_proj`, `v_proj`
    Separate,
    /// `qkv_proj`, one after the other
    Fused,
}

/// The gated delta rule with its causal convolution.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DeltaNetConfig {
    /// Width of the hidden state.
    pub hidden_size: usize,
    /// Query and key heads.
    pub key_heads: usize,
    /// Value heads, a multiple of the key heads.
    pub value_heads: usize,
    /// Width of a query or key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Taps of the convolution.
    pub kernel: usize,
    /// On the convolution's output.
    pub activation: Activation,
    /// Norm of every value head, before the gate.
    pub norm: NormConfig,
    /// Whether `A_log` holds the decay `-exp(A_log)` already.
    pub decay_stored: bool,
    /// Whether value head `h` belongs to key head `h % key_heads` (and not `h / (value_heads / key_heads)`).
    pub value_heads_tiled: bool,
}

/// What works on each position alone.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum FeedForwardConfig {
    /// `down(activation(gate(x)) * up(x))`
    Gated(GatedConfig),
    /// Several gated networks, a few of which are chosen for each position.
    MixtureOfExperts(ExpertsConfig),
}

/// A gated feed-forward network.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GatedConfig {
    /// Width of the hidden state.
    pub hidden_size: usize,
    /// Width inside.
    pub inner_size: usize,
    /// On the gate.
    pub activation: Activation,
    /// Whether all three projections have a bias.
    pub bias: bool,
    /// Whether gate and up are stored as one `gate_up_proj`.
    pub fused: bool,
}

/// A mixture of gated networks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ExpertsConfig {
    /// What one expert is.
    pub expert: GatedConfig,
    /// How many there are.
    pub experts: usize,
    /// How many work on each position.
    pub chosen: usize,
    /// Whether the weights of the chosen are scaled to sum to one.
    pub normalised: bool,
}

/// Rotary positions.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RopeConfig {
    /// How many elements of a head are rotated; one more where that is odd.
    pub width: usize,
    /// Base of the frequencies.
    pub theta: f64,
    /// How the frequencies are stretched.
    pub scaling: RopeScaling,
    /// Which elements form a pair.
    pub layout: RopeLayout,
}

/// Which elements of a head are rotated together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeLayout {
    /// Element `i` with element `i + width / 2`.
    Half,
    /// Element `2i` with element `2i + 1`.
    Interleaved,
}

/// How rotary frequencies are stretched beyond the trained length.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Positions divided by a factor.
    Linear {
        /// The divisor.
        factor: f32,
    },
    /// A base that grows with the sequence, once it is longer than trained.
    Dynamic {
        /// How fast.
        factor: f64,
        /// The trained length.
        original: usize,
    },
    /// Low frequencies divided, high ones kept, a ramp between.
    Yarn {
        /// The divisor.
        factor: f64,
        /// The trained length.
        original: usize,
        /// Rotations over the trained length above which a frequency is kept.
        beta_fast: f64,
        /// Rotations below which it is divided.
        beta_slow: f64,
        /// Whether the ramp's ends are rounded to whole dimensions.
        truncate: bool,
        /// Multiplies cosines and sines.
        attention_factor: f32,
    },
    /// By wavelength against the trained length.
    Llama3 {
        /// The divisor of long wavelengths.
        factor: f32,
        /// Wavelengths longer than the trained length over this are divided.
        low_frequency: f32,
        /// Wavelengths shorter than the trained length over this are kept.
        high_frequency: f32,
        /// The trained length.
        original: usize,
    },
    /// A divisor of its own for every frequency, one set for short and one for long sequences.
    LongRope {
        /// Up to the trained length.
        short: Vec<f32>,
        /// Beyond it.
        long: Vec<f32>,
        /// The trained length.
        original: usize,
        /// Multiplies cosines and sines.
        attention_factor: f32,
    },
    /// A divisor of its own for every frequency.
    Factors {
        /// One for each pair.
        factors: Vec<f32>,
    },
}
