//! Hugging Face's `rope_parameters`, derived from GGUF metadata.

use serde_json::{Map, Value, json};

use super::family::Family;
use super::keys::{Keys, tidy};
use super::object::set;
use super::tensor_summary::TensorSummary;
use super::windows::sliding_window;
use crate::error::Fault;
use crate::excerpt::Excerpt;

/// The context length before it was extended.
pub(super) fn original_context(keys: &Keys<'_>) -> Result<u64, Fault> {
    match keys.number("rope.scaling.original_context_length")? {
        Some(length) if length > 0 => Ok(length),
        _ => keys.dimension("context_length"),
    }
}

/// Adds `rope_parameters` to the configuration.
pub(super) fn rope(
    keys: &Keys<'_>,
    family: Family,
    seen: &TensorSummary,
    config: &mut Map<String, Value>,
) -> Result<(), Fault> {
    let default_theta = match family {
        Family::Gemma3 | Family::GemmaEmbedding => 1_000_000.0,
        Family::ModernBert => 160_000.0,
        _ => 10_000.0,
    };
    let theta = keys.float("rope.freq_base")?.unwrap_or(default_theta);
    if theta <= 0.0 {
        return Err(Fault::new(keys.key("rope.freq_base"), format!("{theta}; expected more than 0")));
    }
    let mut parameters = rope_scaling(keys, seen)?;
    parameters.insert("rope_theta".into(), json!(theta));
    // Its makers do not round the bounds between frequencies that are scaled and those that are not.
    if family == Family::GptOss && parameters.get("rope_type").is_some_and(|kind| kind == "yarn") {
        parameters.insert("truncate".into(), false.into());
    }
    let rotary = keys.number("rope.dimension_count")?;
    // A tenth of the weight, for llama.cpp's own reasons. The other weight is the same in all published models.
    if family == Family::DeepSeek2
        && let Some(weight) = keys.float("rope.scaling.yarn_log_multiplier")?
    {
        let weight = tidy(10.0 * weight);
        set(&mut parameters, json!({"mscale": weight, "mscale_all_dim": weight}));
    }
    let head_dim = match family {
        // The rotated part of a head rotates as a whole.
        Family::DeepSeek2 => keys.dimension("rope.dimension_count")?,
        _ => keys.head_dim()?,
    };
    let rotary = rotary.unwrap_or(head_dim);
    if rotary == 0 || rotary > head_dim {
        return Err(Fault::new(
            keys.key("rope.dimension_count"),
            format!("{rotary} of {head_dim} dimensions of a head"),
        ));
    }
    let partial = matches!(family, Family::Phi3 | Family::Glm4 | Family::Glm4Moe) || family.has_delta_nets();
    if rotary != head_dim || partial {
        parameters.insert("partial_rotary_factor".into(), json!(rotary as f64 / head_dim as f64));
    }
    let parameters = Value::Object(parameters);
    let own_base = match family {
        Family::Gemma3 | Family::GemmaEmbedding | Family::ModernBert => Some(10_000.0),
        Family::Olmo2 if sliding_window(keys)?.is_some() => Some(theta),
        _ => None,
    };
    let parameters = if let Some(own_base) = own_base {
        // Scaling applies to layers with full attention; the others keep their own frequencies.
        let local = keys.float("rope.freq_base_swa")?.unwrap_or(own_base);
        json!({
            "full_attention": parameters,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        })
    } else {
        parameters
    };
    config.insert("rope_parameters".into(), parameters);
    Ok(())
}

fn rope_scaling(keys: &Keys<'_>, seen: &TensorSummary) -> Result<Map<String, Value>, Fault> {
    let mut parameters = Map::new();
    let scaling = keys.text("rope.scaling.type")?.unwrap_or("none");
    let factor = || -> Result<f64, Fault> {
        let name = "rope.scaling.factor";
        keys.float(name)?
            .filter(|factor| *factor > 0.0)
            .ok_or_else(|| Fault::new(keys.key(name), format!("missing or not positive; {scaling} needs it")))
    };
    if let (Some(long), Some(short)) = (&seen.long_factors, &seen.short_factors) {
        set(
            &mut parameters,
            json!({
                "rope_type": "longrope",
                "long_factor": tidy_all(long),
                "short_factor": tidy_all(short),
                "original_max_position_embeddings": original_context(keys)?,
            }),
        );
        if let Some(attention) = keys.float("rope.scaling.attn_factor")? {
            parameters.insert("attention_factor".into(), json!(attention));
        }
        return Ok(parameters);
    }
    if let Some(factors) = &seen.rope_factors {
        // The factors result from a scaling whose parameters the file does not have.
        set(&mut parameters, json!({"rope_type": "firebox_factors", "factors": tidy_all(factors)}));
        return Ok(parameters);
    }
    match scaling {
        "none" | "" => set(&mut parameters, json!({"rope_type": "default"})),
        "linear" => set(&mut parameters, json!({"rope_type": "linear", "factor": factor()?})),
        "yarn" => {
            let factor = factor()?;
            set(
                &mut parameters,
                json!({
                    "rope_type": "yarn",
                    "factor": factor,
                    "original_max_position_embeddings": original_context(keys)?,
                }),
            );
            // The converter copies Hugging Face's factor to a key of its own. The other key is llama.cpp's, which multiplies it by
            // the factor that yarn implies.
            let attention = match keys.float("rope.scaling.yarn_attn_factor")? {
                Some(attention) => Some(attention),
                None => {
                    let implied = if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 };
                    keys.float("rope.scaling.attn_factor")?.map(|attention| attention * implied)
                }
            };
            if let Some(attention) = attention {
                parameters.insert("attention_factor".into(), json!(attention));
            }
            for (name, key) in [
                ("beta_fast", "yarn_beta_fast"),
                ("beta_slow", "yarn_beta_slow"),
                ("extrapolation_factor", "yarn_ext_factor"),
            ] {
                if let Some(value) = keys.float(&format!("rope.scaling.{key}"))? {
                    parameters.insert(name.into(), json!(value));
                }
            }
        }
        "longrope" => {
            return Err(Fault::new(
                keys.key("rope.scaling.type"),
                "longrope, but the tensors rope_factors_long and rope_factors_short are missing",
            ));
        }
        other => {
            return Err(Fault::unsupported(keys.key("rope.scaling.type"), format!("{:?}", Excerpt(other))));
        }
    }
    Ok(parameters)
}

fn tidy_all(values: &[f32]) -> Vec<f64> {
    values.iter().map(|value| tidy(f64::from(*value))).collect()
}
