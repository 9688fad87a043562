//! `seed_oss`: biases on queries, keys and values.

use super::common::Defaults;
use super::dense::{Dense, Flag};

pub(super) const SEED_OSS: Dense = Dense {
    family: "seed_oss",
    defaults: Defaults { head_dim: Some(128), kv_heads: Some(8), ..Defaults::USUAL },
    input_bias: Flag::Field("attention_bias", true),
    output_bias: Flag::Field("attention_out_bias", false),
    ..Dense::LLAMA
};
