//! Configuration fields that most families share.

use super::rope;
use crate::ModelError;
use crate::config::{
    Activation, AttentionConfig, AttentionProjections, BlockConfig, DecoderConfig, FeedForwardConfig,
    GatedConfig, HeadNormPlace, MixerConfig, NormConfig, NormKind, PlainConfig, RopeConfig, RopeLayout,
    TensorNames,
};
use crate::encoder_config::EncoderConfig;
use crate::fields::{Fields, shown};

/// Upper bound on layers, above every published model; larger counts are rejected.
const MAX_LAYERS: usize = 4096;

/// Window of mistral, gemma and the qwen families if the configuration does not mention one.
pub(super) const DEFAULT_WINDOW: Option<usize> = Some(4096);

/// A family's defaults for absent fields.
#[derive(Debug, Clone, Copy)]
pub(super) struct Defaults {
    /// `None` if the configuration must give it, or if it follows from other fields.
    pub head_dim: Option<usize>,
    pub kv_heads: Option<usize>,
    /// Number of layers, if other fields tell.
    pub layers: Option<usize>,
    /// Inner width of families whose configuration need not give one.
    pub inner_size: Option<usize>,
    pub activation: Activation,
    /// Rotated fraction of a head. `None` in families that rotate all of it unless frequencies are scaled,
    /// whatever the configuration says.
    pub rotary_fraction: Option<f64>,
    pub tied_embeddings: bool,
    pub rope_theta: f64,
    pub norm_epsilon: f64,
    /// The field that has the epsilon.
    pub norm_epsilon_field: &'static str,
    pub norm_kind: NormKind,
    pub norm_weight_offset: f32,
    pub rope_layout: RopeLayout,
    /// The feed-forward's inner width over the hidden width, where the configuration may leave it out.
    pub inner_factor: Option<usize>,
}

impl Defaults {
    /// What most families leave out means.
    pub const USUAL: Self = Self {
        head_dim: None,
        kv_heads: None,
        layers: None,
        inner_size: None,
        activation: Activation::Silu,
        rotary_fraction: None,
        tied_embeddings: false,
        rope_theta: 10_000.0,
        norm_epsilon: 1e-6,
        norm_epsilon_field: "rms_norm_eps",
        norm_kind: NormKind::Rms,
        norm_weight_offset: 0.0,
        rope_layout: RopeLayout::Half,
        inner_factor: None,
    };
}

impl Default for Defaults {
    fn default() -> Self {
        Self::USUAL
    }
}

/// Fields that nearly every decoder has, under their usual names in `config.json`, and the llama-shaped block
/// they describe. Families start from it and change what differs.
#[derive(Debug, Clone)]
pub(super) struct Common<'a> {
    pub fields: Fields<'a>,
    pub family: &'static str,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub inner_size: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub max_positions: usize,
    pub activation: Activation,
    pub tied_embeddings: bool,
    pub defaults: Defaults,
    pub norm_epsilon: f64,
    norm_weight_offset: f32,
    rope_layout: RopeLayout,
}

impl<'a> Common<'a> {
    pub fn read(fields: &Fields<'a>, family: &'static str, defaults: Defaults) -> Result<Self, ModelError> {
        let hidden_size = fields.required_count("hidden_size")?;
        let heads = fields.required_count("num_attention_heads")?;
        let kv_heads = fields.count_or("num_key_value_heads", defaults.kv_heads)?.unwrap_or(heads);
        if heads % kv_heads != 0 {
            return Err(fields.error(
                "num_key_value_heads",
                format!("{kv_heads} does not divide num_attention_heads {heads}"),
            ));
        }
        let head_dim = match fields.count_or("head_dim", defaults.head_dim)? {
            Some(head_dim) => head_dim,
            None if hidden_size % heads == 0 => hidden_size / heads,
            None => {
                return Err(fields.error(
                    "head_dim",
                    format!("is missing, and {heads} heads do not divide hidden_size {hidden_size}"),
                ));
            }
        };
        let inner_size =
            match (fields.count_or("intermediate_size", defaults.inner_size)?, defaults.inner_factor) {
                (Some(inner_size), _) => inner_size,
                (None, Some(factor)) => factor * hidden_size,
                (None, None) => return Err(fields.error("intermediate_size", "is missing")),
            };
        let layers = match (fields.count("num_hidden_layers")?, defaults.layers) {
            (Some(layers), _) | (None, Some(layers)) => layers,
            (None, None) => return Err(fields.error("num_hidden_layers", "is missing")),
        };
        if layers > MAX_LAYERS {
            return Err(fields.error("num_hidden_layers", format!("is {layers}, more than {MAX_LAYERS}")));
        }
        let hints = fields.object("firebox")?;
        let hint_flag = |name: &str| hints.as_ref().map_or(Ok(None), |hints| hints.flag(name));
        let hint_number = |name: &str| hints.as_ref().map_or(Ok(None), |hints| hints.number(name));
        let activation = match fields.text("hidden_activation")? {
            Some(name) => activation(fields, "hidden_activation", name)?,
            None => match fields.text("hidden_act")? {
                Some(name) => activation(fields, "hidden_act", name)?,
                None => defaults.activation,
            },
        };
        Ok(Self {
            family,
            vocab_size: fields.required_count("vocab_size")?,
            hidden_size,
            inner_size,
            layers,
            heads,
            kv_heads,
            head_dim,
            max_positions: fields.count("max_position_embeddings")?.unwrap_or(2048),
            activation,
            tied_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(defaults.tied_embeddings),
            norm_epsilon: fields.positive(defaults.norm_epsilon_field)?.unwrap_or(defaults.norm_epsilon),
            norm_weight_offset: hint_number("norm_weight_offset")?
                .map_or(defaults.norm_weight_offset, |offset| offset as f32),
            rope_layout: match hint_flag("rope_interleaved")? {
                Some(true) => RopeLayout::Interleaved,
                Some(false) => RopeLayout::Half,
                None => defaults.rope_layout,
            },
            defaults,
            fields: fields.clone(),
        })
    }

    /// Returns a norm without a weight offset, whatever the family's other norms have.
    pub fn plain_norm(&self, name: &str, width: usize) -> NormConfig {
        NormConfig {
            kind: self.defaults.norm_kind,
            name: name.into(),
            width,
            epsilon: self.norm_epsilon,
            weight_offset: 0.0,
        }
    }

    pub fn norm(&self, name: &str, width: usize) -> NormConfig {
        NormConfig { weight_offset: self.norm_weight_offset, ..self.plain_norm(name, width) }
    }

    /// Returns the position scheme of a model that has a single one.
    pub fn rope(&self) -> Result<RopeConfig, ModelError> {
        rope::read(&self.fields, self.rope_head(), self.defaults.rope_theta)
    }

    pub fn rope_head(&self) -> rope::Head {
        rope::Head {
            head_dim: self.head_dim,
            max_positions: self.max_positions,
            layout: self.rope_layout,
            default_fraction: self.defaults.rotary_fraction,
        }
    }

    /// Returns attention over all positions, rotated by the first position scheme, without biases.
    pub fn attention(&self) -> AttentionConfig {
        AttentionConfig {
            hidden_size: self.hidden_size,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            scale: (self.head_dim as f32).powf(-0.5),
            window: None,
            softcap: None,
            rope: Some(0),
            head_norm: None,
            head_norm_place: HeadNormPlace::Heads,
            query_growth: None,
            gated: false,
            projections: AttentionProjections::Separate,
            input_bias: false,
            output_bias: false,
            sinks: false,
            keys_as_values: false,
            value_norm: None,
            kv_layer: None,
        }
    }

    /// Returns attention whose projections all have biases if `attention_bias` is set.
    pub fn attention_with_configured_bias(&self) -> Result<AttentionConfig, ModelError> {
        let bias = self.fields.flag("attention_bias")?.unwrap_or(false);
        Ok(AttentionConfig { input_bias: bias, output_bias: bias, ..self.attention() })
    }

    pub fn gated(&self) -> GatedConfig {
        GatedConfig {
            hidden_size: self.hidden_size,
            inner_size: self.inner_size,
            activation: self.activation,
            bias: false,
            fused: false,
            interleaved: false,
            limit: None,
            ungated: false,
        }
    }

    pub fn plain(&self) -> PlainConfig {
        PlainConfig {
            hidden_size: self.hidden_size,
            inner_size: self.inner_size,
            activation: self.activation,
            bias: false,
        }
    }

    /// Returns the usual block with two norms, named as in llama.
    pub fn block(&self, attention: AttentionConfig, feed_forward: FeedForwardConfig) -> BlockConfig {
        BlockConfig {
            mixer_norm: self.norm("input_layernorm", self.hidden_size),
            mixer: MixerConfig::Attention(attention),
            mixer_output_norm: None,
            feed_forward_norm: self.norm("post_attention_layernorm", self.hidden_size),
            feed_forward,
            feed_forward_output_norm: None,
            residual_scale: None,
            parallel: false,
            layer_input: None,
            output_scale: None,
            norms_sums: false,
        }
    }

    pub fn model(&self, ropes: Vec<RopeConfig>, blocks: Vec<BlockConfig>) -> DecoderConfig {
        DecoderConfig {
            family: self.family,
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            max_positions: self.max_positions,
            embedding_scale: None,
            ropes,
            blocks,
            final_norm: self.norm("norm", self.hidden_size),
            tied_embeddings: self.tied_embeddings,
            logit_scale: None,
            logit_softcap: None,
            learned_positions: None,
            layer_inputs: None,
            names: TensorNames::default(),
        }
    }

    /// Returns what stands where a block has no norm.
    pub fn no_norm(&self) -> NormConfig {
        NormConfig { kind: NormKind::Absent, ..self.norm("", self.hidden_size) }
    }

    /// Returns an encoder without tables of positions and token types, and without norms around its layers.
    pub fn encoder(&self, ropes: Vec<RopeConfig>, blocks: Vec<BlockConfig>) -> EncoderConfig {
        EncoderConfig {
            family: self.family,
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            max_positions: self.max_positions,
            embedding_scale: None,
            first_position: None,
            token_types: 0,
            embedding_norm: None,
            ropes,
            blocks,
            final_norm: None,
            classifier: None,
            names: TensorNames::default(),
        }
    }

    /// Returns whether the checkpoint was saved as a classifier of texts.
    pub fn classifies(&self) -> Result<bool, ModelError> {
        let classes = self.fields.list("architectures")?.unwrap_or_default();
        Ok(classes
            .iter()
            .filter_map(|class| class.as_str())
            .any(|class| class.ends_with("ForSequenceClassification")))
    }

    /// Returns the kind of every layer: from `layer_types`, or by the family's rule.
    pub fn layer_kinds(&self, rule: impl Fn(usize) -> LayerKind) -> Result<Vec<LayerKind>, ModelError> {
        let Some(listed) = self.fields.list("layer_types")? else {
            return Ok((0..self.layers).map(rule).collect());
        };
        if listed.len() != self.layers {
            return Err(self.fields.error(
                "layer_types",
                format!("lists {} layers, but num_hidden_layers is {}", listed.len(), self.layers),
            ));
        }
        listed
            .iter()
            .map(|kind| match kind.as_str() {
                Some("full_attention" | "attention") => Ok(LayerKind::Full),
                Some("sliding_attention") => Ok(LayerKind::Sliding),
                Some("linear_attention" | "mamba") => Ok(LayerKind::Recurrent),
                _ => {
                    let kind = shown(kind);
                    Err(self
                        .fields
                        .error("layer_types", format!("{kind} is not a kind of layer that is known")))
                }
            })
            .collect()
    }

    /// Returns the window of a sliding layer, which the configuration must then give.
    pub fn window_of(&self, kind: LayerKind) -> Result<Option<usize>, ModelError> {
        match kind {
            LayerKind::Full => Ok(None),
            LayerKind::Sliding => match self.fields.count_or("sliding_window", DEFAULT_WINDOW)? {
                Some(window) => Ok(Some(window)),
                None => {
                    Err(self.fields.error("sliding_window", "is missing, but layer_types has sliding layers"))
                }
            },
            LayerKind::Recurrent => Err(self
                .fields
                .error("layer_types", format!("{} has no linear_attention layers", self.family))),
        }
    }

    /// Returns the layer kinds of the qwen families. Without `layer_types`, layers from `max_window_layers`
    /// on slide.
    pub fn qwen_layer_kinds(&self) -> Result<Vec<LayerKind>, ModelError> {
        let slides = self.fields.flag("use_sliding_window")?.unwrap_or(false)
            && self.fields.count_or("sliding_window", DEFAULT_WINDOW)?.is_some();
        let first = self.fields.whole("max_window_layers")?.unwrap_or(28);
        self.layer_kinds(|layer| if slides && layer >= first { LayerKind::Sliding } else { LayerKind::Full })
    }
}

/// Positions that a layer attends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LayerKind {
    Full,
    Sliding,
    Recurrent,
}

pub(super) fn activation(fields: &Fields<'_>, field: &str, name: &str) -> Result<Activation, ModelError> {
    Ok(match name {
        "silu" | "swish" => Activation::Silu,
        "gelu" => Activation::Gelu,
        "gelu_pytorch_tanh" | "gelu_new" | "gelu_fast" => Activation::GeluTanh,
        "quick_gelu" => Activation::GeluQuick,
        "relu" => Activation::Relu,
        "relu2" => Activation::ReluSquared,
        "tanh" => Activation::Tanh,
        _ => return Err(fields.error(field, format!("{name:?} is not an activation that is known"))),
    })
}
