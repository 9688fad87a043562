//! The configuration of Gemma 4.

use serde_json::{Map, Value, json};

use super::keys::Keys;
use super::mixtures;
use super::object::set;
use super::tensor_summary::TensorSummary;
use super::windows;
use crate::error::Fault;

/// Factors from which on frequencies stand for pairs that do not rotate. The converter writes 1e30.
const UNROTATED: f32 = 1e29;

pub(super) fn config(
    keys: &Keys<'_>,
    seen: &TensorSummary,
    config: &mut Map<String, Value>,
) -> Result<(), Fault> {
    keys.require_rms_norm()?;
    let layers = keys.layers()?;
    let shared = keys.number("attention.shared_kv_layers")?.unwrap_or(0);
    let own =
        usize::try_from(shared).ok().and_then(|shared| layers.checked_sub(shared)).ok_or_else(|| {
            Fault::new(keys.key("attention.shared_kv_layers"), format!("{shared} of {layers} layers"))
        })?;
    let windows = windows::gemma4(keys)?;
    let (inner_size, doubled) = inner_sizes(keys, own)?;
    let full_width = keys.head_dim()?;
    let width = match keys.number("attention.key_length_swa")? {
        Some(_) => keys.dimension("attention.key_length_swa")?,
        None => full_width,
    };
    let key_heads = keys.each_layer("attention.head_count_kv")?;
    let slides = |layer: usize| windows["layer_types"][layer] == windows::SLIDING;
    let first = (0..layers).find(|layer| slides(*layer)).unwrap_or(0);
    let per_layer: Map<String, Value> = (0..layers)
        .map(|layer| (layer, if slides(layer) { width } else { full_width }, key_heads[layer]))
        .filter(|(_, own_width, own_heads)| (*own_width, *own_heads) != (width, key_heads[first]))
        .map(|(layer, head_dim, heads)| {
            (layer.to_string(), json!({"head_dim": head_dim, "num_key_value_heads": heads}))
        })
        .collect();
    set(
        config,
        json!({
            "model_type": "gemma4_text",
            "architectures": ["Gemma4ForCausalLM"],
            "hidden_activation": "gelu_pytorch_tanh",
            "intermediate_size": inner_size,
            "use_double_wide_mlp": doubled,
            "head_dim": width,
            "num_key_value_heads": key_heads[first],
            "per_layer_config": per_layer,
            "num_kv_shared_layers": shared,
            // Layers with full attention then have no values of their own.
            "attention_k_eq_v": seen.value_projections < seen.key_projections,
            "hidden_size_per_layer_input": keys.number("embedding_length_per_layer_input")?.unwrap_or(0),
            "vocab_size_per_layer_input": seen.layer_rows.unwrap_or(seen.vocab_size),
            "final_logit_softcapping": keys.float("final_logit_softcapping")?,
            "use_bidirectional_attention": null,
            "rope_parameters": rope(keys, seen, [full_width, width])?,
        }),
    );
    set(config, windows);
    config.remove("hidden_act");
    set(config, mixtures::gemma4(keys)?);
    Ok(())
}

/// Returns the width of feed-forward networks, and whether those of layers that share keys and values are twice as wide.
fn inner_sizes(keys: &Keys<'_>, own: usize) -> Result<(u64, bool), Fault> {
    const NAME: &str = "feed_forward_length";
    let sizes = keys.each_layer(NAME)?;
    let usual = sizes[0];
    let doubled = sizes.iter().any(|size| *size != usual);
    let fits = |(layer, size): (usize, &u64)| {
        let factor = if doubled && layer >= own { 2 } else { 1 };
        usual.checked_mul(factor) == Some(*size)
    };
    if !sizes.iter().enumerate().all(fits) {
        let reason = "differs between layers, and not by twice for those that share keys and values";
        return Err(Fault::unsupported(keys.key(NAME), reason));
    }
    Ok((usual, doubled))
}

/// Returns `rope_parameters` for heads of these widths, in layers with full attention and with a window.
fn rope(keys: &Keys<'_>, seen: &TensorSummary, [full_width, width]: [u64; 2]) -> Result<Value, Fault> {
    let base = |name: &str, usual: f64| match keys.float(name)? {
        Some(base) if base <= 0.0 => Err(Fault::new(keys.key(name), format!("{base}; expected more than 0"))),
        base => Ok(base.unwrap_or(usual)),
    };
    let factors = seen.rope_factors.as_deref().unwrap_or_default();
    let rotated = factors.iter().take_while(|factor| **factor == 1.0).count();
    if !factors[rotated..].iter().all(|factor| *factor >= UNROTATED) {
        let reason = "expected ones for pairs that rotate, and 1e30 for those behind them";
        return Err(Fault::unsupported("tensor \"rope_freqs.weight\"", reason));
    }
    let part = if factors.is_empty() { 1.0 } else { rotated as f64 / factors.len() as f64 };
    if !factors.is_empty() && (factors.len() as u64 != full_width / 2 || rotated == 0) {
        let reason = format!("{} factors, {rotated} of them ones, for heads of {full_width}", factors.len());
        return Err(Fault::new("tensor \"rope_freqs.weight\"", reason));
    }
    let name = "rope.dimension_count_swa";
    let turned = keys.number(name)?.unwrap_or(width);
    if turned != width {
        return Err(Fault::unsupported(keys.key(name), format!("{turned} of {width} dimensions of a head")));
    }
    Ok(json!({
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": part,
            "rope_theta": base("rope.freq_base", 1_000_000.0)?,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": base("rope.freq_base_swa", 10_000.0)?},
    }))
}
