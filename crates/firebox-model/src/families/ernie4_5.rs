//! `ernie4_5`: heads rotated in interleaved pairs, one flag for all biases.

use super::common::Defaults;
use super::dense::{Dense, Flag};
use crate::config::RopeLayout;

const BIAS: Flag = Flag::Field("use_bias", false);

pub(super) const ERNIE4_5: Dense = Dense {
    family: "ernie4_5",
    defaults: Defaults {
        head_dim: Some(128),
        kv_heads: Some(4),
        tied_embeddings: true,
        rope_theta: 500_000.0,
        norm_epsilon: 1e-5,
        rope_layout: RopeLayout::Interleaved,
        ..Defaults::USUAL
    },
    input_bias: BIAS,
    output_bias: BIAS,
    feed_forward_bias: BIAS,
    ..Dense::LLAMA
};
