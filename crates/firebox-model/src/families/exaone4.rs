//! `exaone4`: norms of the outputs, norms of heads, positions in layers with a window only.

use super::common::Defaults;
use super::dense::{Dense, Flag, Norms, Rotated, Window};
use crate::config::HeadNormPlace;

pub(super) const EXAONE4: Dense = Dense {
    family: "exaone4",
    defaults: Defaults { kv_heads: Some(32), norm_epsilon: 1e-5, ..Defaults::USUAL },
    norms: Norms::AFTER,
    head_norm: Some(HeadNormPlace::Heads),
    input_bias: Flag::Never,
    output_bias: Flag::Never,
    feed_forward_bias: Flag::Never,
    window: Window::AllBut(4),
    rotated: Rotated::Sliding,
    ..Dense::LLAMA
};
