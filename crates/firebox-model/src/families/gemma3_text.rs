//! `gemma3_text`: local and global layers with a position scheme each, norms around mixer and
//! feed-forward, scaled embeddings.

use super::common::{Common, Defaults, LayerKind};
use super::rope;
use crate::ModelError;
use crate::config::{Activation, AttentionConfig, BlockConfig, DecoderConfig, FeedForwardConfig};
use crate::encoder_config::EncoderConfig;
use crate::fields::Fields;

const LOCAL_ROPE: usize = 0;
const GLOBAL_ROPE: usize = 1;

/// Returns whether every token attends to those behind it as well, as in models that embed texts.
pub(super) fn sees_both_ways(fields: &Fields<'_>) -> Result<bool, ModelError> {
    fields.flag("use_bidirectional_attention").map(|flag| flag.unwrap_or(false))
}

/// Reads a `config.json` of a model that [sees both ways](sees_both_ways).
pub(super) fn encoder_config(fields: &Fields<'_>) -> Result<EncoderConfig, ModelError> {
    let DecoderConfig {
        family,
        vocab_size,
        hidden_size,
        max_positions,
        embedding_scale,
        ropes,
        blocks,
        final_norm,
        names,
        ..
    } = config(fields)?;
    Ok(EncoderConfig {
        family,
        vocab_size,
        hidden_size,
        max_positions,
        embedding_scale,
        first_position: None,
        token_types: 0,
        embedding_norm: None,
        ropes,
        blocks,
        final_norm: Some(final_norm),
        classifier: None,
        names,
    })
}

pub(super) fn config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let defaults = Defaults {
        head_dim: Some(256),
        kv_heads: Some(4),
        activation: Activation::GeluTanh,
        tied_embeddings: true,
        rope_theta: 1_000_000.0,
        norm_weight_offset: 1.0,
        ..Defaults::default()
    };
    let common = Common::read(fields, "gemma3_text", defaults)?;
    // The window covers both sides of a token then.
    let sees_both_ways = sees_both_ways(fields)?;
    let window = |window: usize| if sees_both_ways { window / 2 + 1 } else { window };
    let pattern = match fields.count("sliding_window_pattern")? {
        Some(pattern) => pattern,
        None => fields.count("_sliding_window_pattern")?.unwrap_or(6),
    };
    let kinds = common
        .layer_kinds(|layer| if (layer + 1) % pattern == 0 { LayerKind::Full } else { LayerKind::Sliding })?;
    // `attn_logit_softcapping` remains from an earlier family; the reference does not apply it.
    let query_scalar = fields.positive("query_pre_attn_scalar")?.unwrap_or(256.0);
    let blocks = kinds
        .into_iter()
        .map(|kind| {
            let attention = AttentionConfig {
                scale: query_scalar.powf(-0.5) as f32,
                window: common.window_of(kind)?.map(window),
                rope: Some(if kind == LayerKind::Full { GLOBAL_ROPE } else { LOCAL_ROPE }),
                head_norm: Some(common.norm("", common.head_dim)),
                ..common.attention_with_configured_bias()?
            };
            let block = common.block(attention, FeedForwardConfig::Gated(common.gated()));
            let norm = |name| common.norm(name, common.hidden_size);
            Ok(BlockConfig {
                mixer_output_norm: Some(norm("post_attention_layernorm")),
                feed_forward_norm: norm("pre_feedforward_layernorm"),
                feed_forward_output_norm: Some(norm("post_feedforward_layernorm")),
                ..block
            })
        })
        .collect::<Result<_, ModelError>>()?;
    Ok(DecoderConfig {
        embedding_scale: Some((common.hidden_size as f32).sqrt()),
        logit_softcap: fields.positive("final_logit_softcapping")?.map(|cap| cap as f32),
        ..common.model(ropes(&common)?, blocks)
    })
}

/// Returns the local position scheme and the global one. Newer configurations list both under
/// `rope_parameters`; older ones have `rope_local_base_freq`, and `rope_theta` with `rope_scaling` for the
/// global scheme.
fn ropes(common: &Common<'_>) -> Result<Vec<crate::config::RopeConfig>, ModelError> {
    let fields = &common.fields;
    let local_theta = fields.positive("rope_local_base_freq")?.unwrap_or(10_000.0);
    let head = common.rope_head();
    let (local, global) = match fields.object("rope_parameters")? {
        Some(both) => (both.object("sliding_attention")?, both.object("full_attention")?),
        None => (None, fields.object("rope_scaling")?),
    };
    // The model's `rope_theta` belongs to the global scheme, so the local one must not fall back on it.
    let local = match local {
        Some(local) => rope::read_scheme(&local, Some(&local), head, local_theta)?,
        None => rope::plain(fields, head, local_theta)?,
    };
    Ok(vec![local, rope::read_scheme(fields, global.as_ref(), head, common.defaults.rope_theta)?])
}
