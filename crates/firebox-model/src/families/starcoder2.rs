//! `starcoder2`: layer norms with biases, a feed-forward of two matrices, biases everywhere.

use super::common::Defaults;
use super::dense::{Dense, FeedForwardForm, Flag, Names, Window};
use crate::config::{Activation, NormKind};

const BIAS: Flag = Flag::Field("use_bias", true);

pub(super) const STARCODER2: Dense = Dense {
    family: "starcoder2",
    defaults: Defaults {
        kv_heads: Some(2),
        activation: Activation::GeluTanh,
        tied_embeddings: true,
        norm_epsilon: 1e-5,
        norm_epsilon_field: "norm_epsilon",
        norm_kind: NormKind::Layer { bias: true },
        ..Defaults::USUAL
    },
    input_bias: BIAS,
    output_bias: BIAS,
    feed_forward_bias: BIAS,
    feed_forward: FeedForwardForm::Plain,
    window: Window::Configured,
    names: Names {
        renamed: &[("mlp.up_proj.", "mlp.c_fc."), ("mlp.down_proj.", "mlp.c_proj.")],
        ..Names::USUAL
    },
    ..Dense::LLAMA
};
