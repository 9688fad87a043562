//! `gpt2`: learned positions, layer norms with biases, matrices that lie as `[inputs, outputs]`.

use super::common::{Common, Defaults};
use super::dense::{Dense, FeedForwardForm, Flag, Names, Norms, Rotated};
use crate::ModelError;
use crate::config::{Activation, AttentionProjections, DecoderConfig, MixerConfig, NormKind};

pub(super) const GPT2: Dense = Dense {
    family: "gpt2",
    defaults: Defaults {
        activation: Activation::GeluTanh,
        tied_embeddings: true,
        norm_epsilon: 1e-5,
        norm_epsilon_field: "layer_norm_epsilon",
        norm_kind: NormKind::Layer { bias: true },
        inner_factor: Some(4),
        ..Defaults::USUAL
    },
    fields: &[
        ("hidden_size", "n_embd"),
        ("num_attention_heads", "n_head"),
        ("num_hidden_layers", "n_layer"),
        ("intermediate_size", "n_inner"),
        ("max_position_embeddings", "n_positions"),
        ("hidden_act", "activation_function"),
    ],
    norms: Norms { mixer: "ln_1", feed_forward: "ln_2", last: "ln_f", ..Norms::BEFORE },
    input_bias: Flag::Always,
    output_bias: Flag::Always,
    feed_forward_bias: Flag::Always,
    projections: AttentionProjections::Fused,
    feed_forward: FeedForwardForm::Plain,
    rotated: Rotated::Never,
    names: Names {
        prefix: "transformer.",
        embedding: "wte",
        layers: "h",
        renamed: &[
            ("self_attn.qkv_proj.", "attn.c_attn."),
            ("self_attn.o_proj.", "attn.c_proj."),
            ("mlp.up_proj.", "mlp.c_fc."),
            ("mlp.down_proj.", "mlp.c_proj."),
        ],
        transposed: true,
        ..Names::USUAL
    },
    finish: learned_positions,
    ..Dense::LLAMA
};

fn learned_positions(common: &Common<'_>, model: &mut DecoderConfig) -> Result<(), ModelError> {
    let fields = &common.fields;
    let flag = |name: &str, absent| fields.flag(name).map(|flag| flag.unwrap_or(absent));
    if flag("add_cross_attention", false)? {
        return Err(fields.error("add_cross_attention", "is set; only models without an encoder run"));
    }
    model.learned_positions = Some("wpe".into());
    let scaled = flag("scale_attn_weights", true)?;
    let by_layer = flag("scale_attn_by_inverse_layer_idx", false)?;
    for (layer, block) in model.blocks.iter_mut().enumerate() {
        if let MixerConfig::Attention(attention) = &mut block.mixer {
            let scale = if scaled { attention.scale } else { 1.0 };
            attention.scale = if by_layer { scale / (layer + 1) as f32 } else { scale };
        }
    }
    let hints = fields.object("firebox")?;
    if let Some(hints) = hints
        && hints.flag("transposed")? == Some(false)
    {
        model.names.transposed = false;
    }
    Ok(())
}
