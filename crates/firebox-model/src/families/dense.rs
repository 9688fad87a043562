//! Dense families as data: what a family's blocks are made of, how its tensors are named, and what absent fields mean.

use super::common::{Common, Defaults, LayerKind};
use super::rope;
use crate::ModelError;
use crate::config::{
    AttentionConfig, AttentionProjections, BlockConfig, DecoderConfig, FeedForwardConfig, GatedConfig,
    HeadNormPlace, PlainConfig, RopeConfig, TensorNames,
};
use crate::fields::Fields;

/// A dense family. Families start from [`LLAMA`](Self::LLAMA) and say what differs.
#[derive(Clone, Copy)]
pub(super) struct Dense {
    /// The `model_type`.
    pub family: &'static str,
    /// What absent fields mean.
    pub defaults: Defaults,
    /// Fields under another name: the usual one, and the family's.
    pub fields: &'static [(&'static str, &'static str)],
    pub norms: Norms,
    /// What the norm of queries and keys covers, if there is one.
    pub head_norm: Option<HeadNormPlace>,
    /// Biases of queries, keys and values.
    pub input_bias: Flag,
    /// Bias of the attention's output.
    pub output_bias: Flag,
    /// Biases of the feed-forward.
    pub feed_forward_bias: Flag,
    pub projections: AttentionProjections,
    pub feed_forward: FeedForwardForm,
    pub window: Window,
    pub rotated: Rotated,
    /// Whether mixer and feed-forward read the same input.
    pub parallel: bool,
    /// Names of tensors.
    pub names: Names,
    /// Changes what the description has no word for.
    pub finish: fn(&Common<'_>, &mut DecoderConfig) -> Result<(), ModelError>,
}

/// Names of a block's norms. An empty name means that there is none.
#[derive(Clone, Copy)]
pub(super) struct Norms {
    pub mixer: &'static str,
    pub mixer_output: &'static str,
    pub feed_forward: &'static str,
    pub feed_forward_output: &'static str,
    /// The norm before the unembedding.
    pub last: &'static str,
}

impl Norms {
    /// Before mixer and feed-forward.
    pub const BEFORE: Self = Self {
        mixer: "input_layernorm",
        mixer_output: "",
        feed_forward: "post_attention_layernorm",
        feed_forward_output: "",
        last: "norm",
    };
    /// Of their outputs.
    pub const AFTER: Self = Self {
        mixer: "",
        mixer_output: "post_attention_layernorm",
        feed_forward: "",
        feed_forward_output: "post_feedforward_layernorm",
        last: "norm",
    };
}

/// Whether something is there.
#[derive(Clone, Copy)]
pub(super) enum Flag {
    Always,
    Never,
    /// As the field says, or as given where it is absent.
    Field(&'static str, bool),
}

/// Form of the feed-forward network.
#[derive(Clone, Copy)]
pub(super) enum FeedForwardForm {
    /// `gate_proj`, `up_proj`, `down_proj`
    Gated,
    /// `gate_up_proj`, `down_proj`
    GatedFused,
    /// `up_proj`, `down_proj`
    Plain,
}

/// Layers that attend to a window.
#[derive(Clone, Copy)]
pub(super) enum Window {
    Never,
    /// All of them, if `sliding_window` is there.
    Configured,
    /// As `layer_types` lists; all but every n-th where it is absent, n being `sliding_window_pattern` or the number
    /// here.
    AllBut(usize),
}

/// Layers whose queries and keys are rotated.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Rotated {
    Never,
    All,
    /// Those that attend to a window, or all if there is no window.
    Sliding,
}

/// Names of tensors.
#[derive(Clone, Copy)]
pub(super) struct Names {
    pub prefix: &'static str,
    pub embedding: &'static str,
    pub layers: &'static str,
    /// Parts of names in a layer: the usual ones, and the family's.
    pub renamed: &'static [(&'static str, &'static str)],
    /// Whether the matrices of layers lie as `[inputs, outputs]`.
    pub transposed: bool,
    /// Prefixes of tensors that are not used.
    pub foreign: &'static [&'static str],
}

impl Names {
    pub const USUAL: Self = Self {
        prefix: "model.",
        embedding: "embed_tokens",
        layers: "layers",
        renamed: &[],
        transposed: false,
        foreign: &[],
    };
}

impl Dense {
    /// The plain decoder.
    pub const LLAMA: Self = Self {
        family: "llama",
        defaults: Defaults::USUAL,
        fields: &[],
        norms: Norms::BEFORE,
        head_norm: None,
        input_bias: Flag::Field("attention_bias", false),
        output_bias: Flag::Field("attention_bias", false),
        feed_forward_bias: Flag::Field("mlp_bias", false),
        projections: AttentionProjections::Separate,
        feed_forward: FeedForwardForm::Gated,
        window: Window::Never,
        rotated: Rotated::All,
        parallel: false,
        names: Names::USUAL,
        finish: |_, _| Ok(()),
    };

    /// Reads a `config.json` of the family.
    pub fn read(&self, fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
        let fields = &fields.with_names(self.fields);
        let common = Common::read(fields, self.family, self.defaults)?;
        let kinds = self.layer_kinds(&common)?;
        let slides = kinds.contains(&LayerKind::Sliding);
        let ropes = match self.rotated {
            Rotated::Never => Vec::new(),
            Rotated::All | Rotated::Sliding => ropes(&common)?,
        };
        let block = self.block(&common)?;
        let blocks = kinds
            .into_iter()
            .map(|kind| {
                let sliding = kind == LayerKind::Sliding;
                let rope = match self.rotated {
                    Rotated::Sliding if slides && !sliding => None,
                    Rotated::All | Rotated::Sliding if sliding => Some(ropes.len() - 1),
                    Rotated::All | Rotated::Sliding => Some(0),
                    Rotated::Never => None,
                };
                let mut block = block.clone();
                if let crate::config::MixerConfig::Attention(attention) = &mut block.mixer {
                    attention.rope = rope;
                    attention.window = common.window_of(kind)?;
                }
                Ok(block)
            })
            .collect::<Result<_, ModelError>>()?;
        let names = self.names;
        let mut model = DecoderConfig {
            final_norm: common.norm(self.norms.last, common.hidden_size),
            names: TensorNames {
                prefix: names.prefix.into(),
                embedding: names.embedding.into(),
                layers: names.layers.into(),
                renamed: names.renamed,
                transposed: names.transposed,
                foreign: names.foreign.iter().map(|prefix| (*prefix).into()).collect(),
                ..TensorNames::default()
            },
            ..common.model(ropes, blocks)
        };
        (self.finish)(&common, &mut model)?;
        Ok(model)
    }

    fn block(&self, common: &Common<'_>) -> Result<BlockConfig, ModelError> {
        let flag = |flag| match flag {
            Flag::Always => Ok(true),
            Flag::Never => Ok(false),
            Flag::Field(name, absent) => common.fields.flag(name).map(|flag| flag.unwrap_or(absent)),
        };
        let attention = AttentionConfig {
            head_norm: self.head_norm.map(|_| common.norm("", common.head_dim)),
            head_norm_place: self.head_norm.unwrap_or(HeadNormPlace::Heads),
            projections: self.projections,
            input_bias: flag(self.input_bias)?,
            output_bias: flag(self.output_bias)?,
            ..common.attention()
        };
        let bias = flag(self.feed_forward_bias)?;
        let feed_forward = match self.feed_forward {
            FeedForwardForm::Gated => FeedForwardConfig::Gated(GatedConfig { bias, ..common.gated() }),
            FeedForwardForm::GatedFused => {
                FeedForwardConfig::Gated(GatedConfig { bias, fused: true, ..common.gated() })
            }
            FeedForwardForm::Plain => FeedForwardConfig::Plain(PlainConfig { bias, ..common.plain() }),
        };
        let norm = |name: &str| common.norm(name, common.hidden_size);
        let present = |name: &str| (!name.is_empty()).then(|| norm(name));
        Ok(BlockConfig {
            mixer_norm: present(self.norms.mixer).unwrap_or_else(|| common.no_norm()),
            mixer_output_norm: present(self.norms.mixer_output),
            feed_forward_norm: present(self.norms.feed_forward).unwrap_or_else(|| common.no_norm()),
            feed_forward_output_norm: present(self.norms.feed_forward_output),
            parallel: self.parallel,
            ..common.block(attention, feed_forward)
        })
    }

    fn layer_kinds(&self, common: &Common<'_>) -> Result<Vec<LayerKind>, ModelError> {
        let fields = &common.fields;
        let all = |kind| Ok(vec![kind; common.layers]);
        match self.window {
            Window::Never => all(LayerKind::Full),
            Window::Configured if fields.count("sliding_window")?.is_some() => all(LayerKind::Sliding),
            Window::Configured => all(LayerKind::Full),
            Window::AllBut(_) if fields.count_or("sliding_window", Some(1))?.is_none() => {
                all(LayerKind::Full)
            }
            Window::AllBut(usual) => {
                // A listed pattern makes the other fields moot; older configurations write the pattern as "LLLG".
                let every = match fields.get("sliding_window_pattern").and_then(|value| value.as_str()) {
                    Some(letters) if !letters.is_empty() => letters.len(),
                    Some(_) => usual,
                    None => fields.count("sliding_window_pattern")?.unwrap_or(usual),
                };
                let rule =
                    |layer| if (layer + 1) % every == 0 { LayerKind::Full } else { LayerKind::Sliding };
                common.layer_kinds(rule)
            }
        }
    }
}

/// Returns the position scheme of full layers, and that of sliding ones if the configuration has one for each.
fn ropes(common: &Common<'_>) -> Result<Vec<RopeConfig>, ModelError> {
    let fields = &common.fields;
    let Some(both) = fields.object("rope_parameters")? else { return Ok(vec![common.rope()?]) };
    let (full, sliding) = (both.object("full_attention")?, both.object("sliding_attention")?);
    if full.is_none() && sliding.is_none() {
        return Ok(vec![common.rope()?]);
    }
    let read = |scheme: Option<Fields<'_>>| {
        rope::read_scheme(fields, scheme.as_ref(), common.rope_head(), common.defaults.rope_theta)
    };
    Ok(vec![read(full)?, read(sliding)?])
}
