//! Configuration of a decoder. A family file fills it in from a `config.json`, and the modules are built from
//! it.

use serde::Serialize;

pub use firebox_kernels::Activation;

/// Configuration of a decoder.
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
    /// Factor of the embeddings.
    pub embedding_scale: Option<f32>,
    /// Position schemes, which attention layers refer to by index.
    pub ropes: Vec<RopeConfig>,
    /// Layers, from first to last.
    pub blocks: Vec<BlockConfig>,
    /// Norm before the unembedding.
    pub final_norm: NormConfig,
    /// Whether the unembedding is the embedding.
    pub tied_embeddings: bool,
    /// Factor of the logits.
    pub logit_scale: Option<f32>,
    /// Applies `cap * tanh(logit / cap)` to the logits.
    pub logit_softcap: Option<f32>,
    /// Name of a table with a row for each of [`max_positions`](Self::max_positions), without `.weight`, whose rows
    /// are added to the embeddings.
    pub learned_positions: Option<String>,
    /// Inputs that every layer gets beside the hidden state.
    pub layer_inputs: Option<LayerInputsConfig>,
    /// Names of its tensors.
    pub names: TensorNames,
}

/// Configuration of inputs that every layer gets beside the hidden state: rows of a table, and projected embeddings.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerInputsConfig {
    /// Width of one layer's input.
    pub width: usize,
    /// Rows of the table.
    pub vocab_size: usize,
    /// Norm of the projected embeddings of every layer.
    pub norm: NormConfig,
}

/// Tensor names outside the blocks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorNames {
    /// Prefix of all names but the unembedding's, such as `model.`
    pub prefix: String,
    /// The embedding's name within the prefix, without `.weight`.
    pub embedding: String,
    /// The name of the list of layers within the prefix.
    pub layers: String,
    /// The unembedding's name without `.weight`.
    pub unembedding: String,
    /// Parts of names within a layer: what modules call them, and what the checkpoint does.
    pub renamed: &'static [(&'static str, &'static str)],
    /// Whether the matrices of layers lie as `[inputs, outputs]`.
    pub transposed: bool,
    /// Prefixes of tensors that belong to parts which are not run.
    pub foreign: Vec<String>,
}

impl Default for TensorNames {
    fn default() -> Self {
        Self {
            prefix: "model.".into(),
            embedding: "embed_tokens".into(),
            layers: "layers".into(),
            unembedding: "lm_head".into(),
            renamed: &[],
            transposed: false,
            foreign: Vec::new(),
        }
    }
}

/// Configuration of a layer: norm, mixer, norm and feed-forward, with residual connections.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BlockConfig {
    /// Norm before the mixer.
    pub mixer_norm: NormConfig,
    /// The mixer.
    pub mixer: MixerConfig,
    /// Norm of the mixer's output, before it is added to the residual.
    pub mixer_output_norm: Option<NormConfig>,
    /// Norm before the feed-forward network.
    pub feed_forward_norm: NormConfig,
    /// The feed-forward network.
    pub feed_forward: FeedForwardConfig,
    /// Norm of the feed-forward network's output, before it is added to the residual.
    pub feed_forward_output_norm: Option<NormConfig>,
    /// Factor of what mixer and feed-forward add to the residual.
    pub residual_scale: Option<f32>,
    /// Whether the feed-forward does not wait for the mixer: it reads the block's input, through its own norm or else
    /// through the mixer's, and both outputs are added at once.
    pub parallel: bool,
    /// Whether the norms of outputs apply to their sums with the residual, as in the layers of older encoders. Layers of
    /// decoders cannot.
    pub norms_sums: bool,
    /// What the block adds to the residual from its [own input](LayerInputsConfig), behind the feed-forward.
    pub layer_input: Option<LayerInputConfig>,
    /// Name of a number that the block's output is multiplied by.
    pub output_scale: Option<String>,
}

/// Configuration of the network that adds a layer's own input to its hidden state.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerInputConfig {
    /// The layer's index.
    pub layer: usize,
    /// Width of the hidden state.
    pub hidden_size: usize,
    /// Width of the input.
    pub width: usize,
    /// Activation of the gate.
    pub activation: Activation,
    /// Norm of what is added.
    pub norm: NormConfig,
}

/// Configuration of a norm.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NormConfig {
    /// What it computes.
    pub kind: NormKind,
    /// Name within the block, without `.weight`.
    pub name: String,
    /// Number of elements that are normalised together.
    pub width: usize,
    /// Added to the mean square.
    pub epsilon: f64,
    /// Added to the stored weight; 1 if the checkpoint stores weights around zero.
    pub weight_offset: f32,
}

/// What a norm computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// Divides by the root of the mean square.
    Rms,
    /// Subtracts the mean and divides by the standard deviation.
    Layer {
        /// Whether a bias is added.
        bias: bool,
    },
    /// Nothing: there is no norm at this place.
    Absent,
}

impl NormConfig {
    /// Returns the norm with another name and width.
    pub(crate) fn named(&self, name: &str, width: usize) -> Self {
        Self { name: name.into(), width, ..self.clone() }
    }
}

/// Configuration of a mixer.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum MixerConfig {
    /// Softmax attention over all earlier positions or a window of them.
    Attention(AttentionConfig),
    /// Softmax attention to latents that all heads share.
    LatentAttention(LatentAttentionConfig),
    /// The gated delta rule.
    GatedDeltaNet(DeltaNetConfig),
    /// A causal convolution of few taps between two gates.
    ShortConvolution(ShortConvolutionConfig),
    /// A convolution and a selective state space.
    Mamba(MambaConfig),
    /// Nothing: the layer is a feed-forward network.
    Absent,
}

/// Configuration of grouped-query attention.
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
    /// Factor of the products of queries and keys.
    pub scale: f32,
    /// Number of visible positions, the query's own included.
    pub window: Option<usize>,
    /// Applies `cap * tanh(score / cap)` to the scores.
    pub softcap: Option<f32>,
    /// Index of the position scheme, if any.
    pub rope: Option<usize>,
    /// Norm of queries and keys.
    pub head_norm: Option<NormConfig>,
    /// What that norm covers, and when it is applied.
    pub head_norm_place: HeadNormPlace,
    /// Growth of the queries with their positions.
    pub query_growth: Option<QueryGrowth>,
    /// Whether the query projection also yields a gate of the output.
    pub gated: bool,
    /// Layout of the projections.
    pub projections: AttentionProjections,
    /// Whether queries, keys and values have a bias.
    pub input_bias: bool,
    /// Whether the output has a bias.
    pub output_bias: bool,
    /// Whether every query head has a learned score that adds to the sum of the softmax and has no value.
    pub sinks: bool,
    /// Whether values are the keys before their norm and rotation.
    pub keys_as_values: bool,
    /// Added to the mean square by a norm of every value head that has no weight, if there is one.
    pub value_norm: Option<f64>,
    /// The earlier layer whose keys and values are read, if the layer has none of its own.
    pub kv_layer: Option<usize>,
}

/// What the norm of queries and keys covers, and when it is applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HeadNormPlace {
    /// Every head, before it is rotated.
    Heads,
    /// All heads together, before they are rotated.
    Projection,
    /// Every head, after it is rotated.
    RotatedHeads,
}

/// Multiplies the query at position `p` by `1 + rate * ln(1 + floor(p / original))`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct QueryGrowth {
    /// Factor of the logarithm.
    pub rate: f32,
    /// Number of positions over which queries stay as they are.
    pub original: usize,
}

/// Layout of the query, key and value projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AttentionProjections {
    /// `q_proj`, `k_proj`, `v_proj`
    Separate,
    /// `qkv_proj`, one after the other
    Fused,
}

/// Configuration of attention to latents that all heads share. The query of a head is a plain part and then a rotated one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LatentAttentionConfig {
    /// Width of the hidden state.
    pub hidden_size: usize,
    /// Query heads.
    pub heads: usize,
    /// Width of the latents that queries are projected from; `None` where they are projected from the hidden state.
    pub query_rank: Option<usize>,
    /// Width of the latents that keys and values are projected from.
    pub rank: usize,
    /// Elements of a query or key that are not rotated.
    pub plain_dim: usize,
    /// Elements that are rotated. Those of keys are shared by all heads.
    pub rotated_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// Factor of the products of queries and keys.
    pub scale: f32,
    /// Index of the position scheme.
    pub rope: usize,
    /// Norm of latents.
    pub latent_norm: NormConfig,
    /// Whether the projections to latents and that of the output have a bias.
    pub bias: bool,
    /// Whether what heads multiply latents by is a matrix for keys and one for values.
    pub separate_factors: bool,
}

impl LatentAttentionConfig {
    /// Width of what is cached for a position: the rotated part of the key and the latent.
    pub fn width(&self) -> usize {
        self.rotated_dim + self.rank
    }
}

/// Configuration of a gated short convolution.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ShortConvolutionConfig {
    /// Width of the hidden state and of the convolution.
    pub hidden_size: usize,
    /// Taps of the convolution.
    pub kernel: usize,
    /// Whether the projections and the convolution have biases.
    pub bias: bool,
}

/// Configuration of Mamba-2.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MambaConfig {
    /// Width of the hidden state.
    pub hidden_size: usize,
    /// Heads of the state space.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Groups of heads that share their directions, and are normalised together; a divisor of the heads.
    pub groups: usize,
    /// Width of a direction: rows of a head's state.
    pub states: usize,
    /// Taps of the convolution.
    pub kernel: usize,
    /// Activation of the convolution.
    pub activation: Activation,
    /// Whether both projections have a bias.
    pub projection_bias: bool,
    /// Whether `A_log` already holds the decay `-exp(A_log)`.
    pub decay_stored: bool,
    /// Whether the convolution has a bias.
    pub convolution_bias: bool,
    /// Norm of all heads, after the gate.
    pub norm: NormConfig,
    /// Smaller time steps are raised to this one.
    pub smallest_step: f32,
    /// Larger time steps are lowered to this one.
    pub largest_step: Option<f32>,
}

/// Configuration of the gated delta rule with its causal convolution.
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
    /// Activation of the convolution.
    pub activation: Activation,
    /// Norm of every value head, before the gate.
    pub norm: NormConfig,
    /// Layout of the projections.
    pub projections: DeltaNetProjections,
    /// Whether `A_log` already holds the decay `-exp(A_log)`.
    pub decay_stored: bool,
    /// Whether value head `h` belongs to key head `h % key_heads` (and not `h / (value_heads / key_heads)`).
    pub value_heads_tiled: bool,
}

/// Layout of the inward projections of the gated delta rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DeltaNetProjections {
    /// `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`
    Separate,
    /// `in_proj_qkv`, `in_proj_z` and `in_proj_ba`, the last as in `Grouped`
    GroupedSteps,
    /// `in_proj_qkvz` and `in_proj_ba`: one key head after the other, each with the value heads that belong to it.
    Grouped,
}

/// Configuration of a feed-forward network.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum FeedForwardConfig {
    /// `down(activation(gate(x)) * up(x))`
    Gated(GatedConfig),
    /// `down(activation(up(x)))`
    Plain(PlainConfig),
    /// Several gated networks, a few of which are chosen for each token.
    MixtureOfExperts(ExpertsConfig),
    /// Nothing: the layer is a mixer.
    Absent,
}

/// Configuration of a gated feed-forward network.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GatedConfig {
    /// Width of the hidden state.
    pub hidden_size: usize,
    /// Inner width.
    pub inner_size: usize,
    /// Activation of the gate.
    pub activation: Activation,
    /// Whether all three projections have a bias.
    pub bias: bool,
    /// Whether gate and up are stored as one `gate_up_proj`.
    pub fused: bool,
    /// Whether the outputs of that alternate, a gate before its up.
    pub interleaved: bool,
    /// Clamps gates from above and ups on both sides, and adds one to ups.
    pub limit: Option<f32>,
    /// Whether an expert has no gate: `down(activation(up(x)))`.
    pub ungated: bool,
}

/// Configuration of a feed-forward network of two matrices.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlainConfig {
    /// Width of the hidden state.
    pub hidden_size: usize,
    /// Inner width.
    pub inner_size: usize,
    /// The activation.
    pub activation: Activation,
    /// Whether both projections have a bias.
    pub bias: bool,
}

/// Configuration of a mixture of experts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ExpertsConfig {
    /// Configuration of an expert.
    pub expert: GatedConfig,
    /// Number of experts.
    pub experts: usize,
    /// Number of experts per token.
    pub chosen: usize,
    /// Whether the weights of the chosen experts are scaled to sum to one.
    pub normalised: bool,
    /// Whether the router has a bias.
    pub router_bias: bool,
    /// How experts are chosen and weighed.
    pub routing: RoutingConfig,
    /// A network that works on every token beside the chosen experts.
    pub shared: Option<SharedExpertConfig>,
    /// Norms of a mixture that is given the residual itself.
    pub norms: Option<MixtureNormsConfig>,
}

/// Norms of what the parts of a mixture read, and of what the shared network and the experts yield, before both are added.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MixtureNormsConfig {
    /// Before the shared network.
    pub shared: NormConfig,
    /// Of its output.
    pub shared_output: NormConfig,
    /// Before the experts.
    pub experts: NormConfig,
    /// Of the sum of their outputs.
    pub experts_output: NormConfig,
    /// Before the router. The name is that of a vector which its output is multiplied by.
    pub router: NormConfig,
}

/// How the router's products choose and weigh experts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RoutingConfig {
    /// Whether shares are the sigmoid of each product, not the softmax of all.
    pub sigmoid: bool,
    /// Name of a vector that is added to the shares for choosing, but not for weighing.
    pub correction: Option<String>,
    /// Number of equal groups of experts.
    pub groups: usize,
    /// Number of groups that experts are chosen from.
    pub chosen_groups: usize,
    /// Factor of the weights.
    pub scale: f32,
    /// Name of a vector with another factor for each expert.
    pub expert_scales: Option<String>,
}

impl Default for RoutingConfig {
    fn default() -> Self {
        Self {
            sigmoid: false,
            correction: None,
            groups: 1,
            chosen_groups: 1,
            scale: 1.0,
            expert_scales: None,
        }
    }
}

/// Configuration of a network that works on every token beside the chosen experts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SharedExpertConfig {
    /// Prefix of its tensors, such as `shared_expert.`
    pub prefix: String,
    /// The network.
    pub network: GatedConfig,
    /// Name of a row whose product, after a sigmoid, scales the result.
    pub gate: Option<String>,
}

/// Configuration of rotary position embeddings.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RopeConfig {
    /// Number of rotated elements of a head; rounded up to an even number.
    pub width: usize,
    /// Base of the frequencies.
    pub theta: f64,
    /// Scaling of the frequencies.
    pub scaling: RopeScaling,
    /// Pairing of the elements.
    pub layout: RopeLayout,
}

/// Pairing of the rotated elements of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeLayout {
    /// Element `i` with element `i + width / 2`.
    Half,
    /// Element `2i` with element `2i + 1`.
    Interleaved,
}

/// Scaling of rotary frequencies beyond the trained length.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// Positions divided by a factor.
    Linear {
        /// The divisor.
        factor: f32,
    },
    /// A base that grows with the sequence beyond the trained length.
    Dynamic {
        /// Growth factor.
        factor: f64,
        /// The trained length.
        original: usize,
    },
    /// Low frequencies are divided, high ones kept, with a ramp between.
    Yarn {
        /// The divisor.
        factor: f64,
        /// The trained length.
        original: usize,
        /// Rotations over the trained length above which a frequency is kept.
        beta_fast: f64,
        /// Rotations below which a frequency is divided.
        beta_slow: f64,
        /// Whether the ramp's ends are rounded to whole dimensions.
        truncate: bool,
        /// Factor of cosines and sines.
        attention_factor: f32,
    },
    /// Depends on the ratio of wavelength and trained length.
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
    /// A divisor for every frequency, one set for short and one for long sequences.
    LongRope {
        /// Divisors up to the trained length.
        short: Vec<f32>,
        /// Divisors beyond it.
        long: Vec<f32>,
        /// The trained length.
        original: usize,
        /// Factor of cosines and sines.
        attention_factor: f32,
    },
    /// Frequencies of the whole head, of which only the first rotate.
    Proportional {
        /// Number of pairs that rotate.
        pairs: usize,
        /// The divisor of their frequencies.
        factor: f32,
    },
    /// A divisor for every frequency.
    Factors {
        /// One divisor for each pair.
        factors: Vec<f32>,
    },
}
