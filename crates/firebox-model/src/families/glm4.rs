//! `glm4`: norms before and after mixer and feed-forward, half of every head rotated in interleaved pairs.

use super::common::Defaults;
use super::dense::{Dense, FeedForwardForm, Flag, Norms};
use crate::config::RopeLayout;

pub(super) const GLM4: Dense = Dense {
    family: "glm4",
    defaults: Defaults {
        head_dim: Some(128),
        kv_heads: Some(2),
        rotary_fraction: Some(0.5),
        norm_epsilon: 1.5625e-7,
        rope_layout: RopeLayout::Interleaved,
        ..Defaults::USUAL
    },
    norms: Norms {
        mixer_output: "post_self_attn_layernorm",
        feed_forward_output: "post_mlp_layernorm",
        ..Norms::BEFORE
    },
    output_bias: Flag::Never,
    feed_forward_bias: Flag::Never,
    feed_forward: FeedForwardForm::GatedFused,
    ..Dense::LLAMA
};
