//! The layers of a model, described: runs of equal ones together.

use firebox_model::config::{
    Activation, BlockConfig, FeedForwardConfig, MixerConfig, RopeConfig, RopeLayout, RopeScaling,
};
use serde::Serialize;

/// Layers that are built alike.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerRun {
    /// The first of them.
    pub first: usize,
    /// The last of them.
    pub last: usize,
    #[serde(flatten)]
    pub layer: Layer,
}

/// One layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Layer {
    /// The kind of the mixer, which moves information between positions.
    pub mixer: String,
    /// Query heads; value heads of a delta net; heads of a mamba.
    pub heads: usize,
    /// Key and value heads; key heads of a delta net; groups of a mamba.
    pub kv_heads: usize,
    /// Width of a head; of a value head of a delta net.
    pub head_dim: usize,
    /// The number of visible positions, if not all are.
    pub window: Option<usize>,
    /// Which position scheme.
    pub rope: Option<usize>,
    /// The kind of the feed-forward, which works on each position alone.
    pub feed_forward: String,
}

/// Groups consecutive layers that are equal.
pub fn layer_runs(blocks: &[BlockConfig]) -> Vec<LayerRun> {
    let mut runs: Vec<LayerRun> = Vec::new();
    for (index, block) in blocks.iter().enumerate() {
        let layer = describe(block);
        match runs.last_mut() {
            Some(run) if run.layer == layer => run.last = index,
            _ => runs.push(LayerRun { first: index, last: index, layer }),
        }
    }
    runs
}

fn describe(block: &BlockConfig) -> Layer {
    let feed_forward = match &block.feed_forward {
        FeedForwardConfig::Gated(gated) => {
            format!("gated {}, {}", activation(gated.activation), gated.inner_size)
        }
        FeedForwardConfig::Plain(plain) => {
            format!("plain {}, {}", activation(plain.activation), plain.inner_size)
        }
        FeedForwardConfig::MixtureOfExperts(experts) => format!(
            "{} of {} experts{}, {} {}, {}",
            experts.chosen,
            experts.experts,
            if experts.shared.is_some() { " and a shared one" } else { "" },
            if experts.expert.ungated { "plain" } else { "gated" },
            activation(experts.expert.activation),
            experts.expert.inner_size
        ),
        FeedForwardConfig::Absent => "none".into(),
    };
    match &block.mixer {
        MixerConfig::Attention(attention) => Layer {
            mixer: match attention.kv_layer {
                Some(layer) => format!("attention to layer {layer}"),
                None if attention.gated => "gated attention".into(),
                None => "attention".into(),
            },
            heads: attention.heads,
            kv_heads: attention.kv_heads,
            head_dim: attention.head_dim,
            window: attention.window,
            rope: attention.rope,
            feed_forward,
        },
        MixerConfig::LatentAttention(attention) => Layer {
            mixer: format!("attention over latents of {}", attention.rank),
            heads: attention.heads,
            kv_heads: 1,
            head_dim: attention.width(),
            window: None,
            rope: Some(attention.rope),
            feed_forward,
        },
        MixerConfig::ShortConvolution(convolution) => Layer {
            mixer: format!("convolution of {}", convolution.kernel),
            heads: 1,
            kv_heads: 1,
            head_dim: convolution.hidden_size,
            window: None,
            rope: None,
            feed_forward,
        },
        MixerConfig::GatedDeltaNet(net) => Layer {
            mixer: "gated delta net".into(),
            heads: net.value_heads,
            kv_heads: net.key_heads,
            head_dim: net.value_dim,
            window: None,
            rope: None,
            feed_forward,
        },
        MixerConfig::Mamba(mamba) => Layer {
            mixer: "mamba".into(),
            heads: mamba.heads,
            kv_heads: mamba.groups,
            head_dim: mamba.head_dim,
            window: None,
            rope: None,
            feed_forward,
        },
        MixerConfig::Absent => Layer {
            mixer: "none".into(),
            heads: 0,
            kv_heads: 0,
            head_dim: 0,
            window: None,
            rope: None,
            feed_forward,
        },
    }
}

/// The name of a nonlinearity.
pub fn activation(activation: Activation) -> &'static str {
    match activation {
        Activation::Silu => "silu",
        Activation::Gelu => "gelu",
        Activation::GeluTanh => "gelu-tanh",
        Activation::GeluQuick => "gelu-quick",
        Activation::Relu => "relu",
        Activation::ReluSquared => "relu²",
        Activation::Tanh => "tanh",
    }
}

/// A position scheme in words.
pub fn rope(rope: &RopeConfig) -> String {
    let scaling = match &rope.scaling {
        RopeScaling::None => String::new(),
        RopeScaling::Linear { factor } => format!(", linear × {factor}"),
        RopeScaling::Dynamic { factor, original } => format!(", dynamic × {factor} beyond {original}"),
        RopeScaling::Yarn { factor, original, .. } => format!(", yarn × {factor} of {original}"),
        RopeScaling::Llama3 { factor, original, .. } => format!(", llama3 × {factor} of {original}"),
        RopeScaling::LongRope { original, .. } => format!(", longrope beyond {original}"),
        RopeScaling::Proportional { pairs, .. } => format!(", {pairs} pairs rotate"),
        RopeScaling::Factors { .. } => ", a factor for every frequency".into(),
    };
    let layout = match rope.layout {
        RopeLayout::Half => "",
        RopeLayout::Interleaved => ", interleaved",
    };
    format!("base {}, {} elements of a head{scaling}{layout}", rope.theta, rope.width)
}
