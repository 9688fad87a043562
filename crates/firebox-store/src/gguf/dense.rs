//! The configurations of dense families that differ in few entries.

use serde_json::{Map, Value, json};

use super::family::Family;
use super::keys::Keys;
use super::object::set;
use super::tensor_summary::TensorSummary;
use super::windows::{alternating, sliding_window};
use crate::error::Fault;

/// Every fourth layer of these families has full attention, unless the metadata says otherwise.
const FULL_EVERY: u64 = 4;

/// Adds the entries of one of these families.
pub(super) fn dense(
    keys: &Keys<'_>,
    family: Family,
    seen: &TensorSummary,
    config: &mut Map<String, Value>,
    notes: &mut Map<String, Value>,
) -> Result<(), Fault> {
    let windowed = sliding_window(keys)?.is_some();
    let (model_type, class) = match family {
        Family::Olmo2 if windowed => ("olmo3", "Olmo3ForCausalLM"),
        Family::Olmo2 => ("olmo2", "Olmo2ForCausalLM"),
        Family::Granite => ("granite", "GraniteForCausalLM"),
        Family::Glm4 => ("glm4", "Glm4ForCausalLM"),
        Family::SeedOss => ("seed_oss", "SeedOssForCausalLM"),
        Family::Ernie45 => ("ernie4_5", "Ernie4_5ForCausalLM"),
        Family::Exaone4 => ("exaone4", "Exaone4ForCausalLM"),
        Family::HunyuanDense => ("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
        Family::Cohere2 => ("cohere2", "Cohere2ForCausalLM"),
        Family::Starcoder2 => ("starcoder2", "Starcoder2ForCausalLM"),
        Family::Gpt2 => ("gpt2", "GPT2LMHeadModel"),
        _ => ("ministral3", "Ministral3ForCausalLM"),
    };
    set(config, json!({"model_type": model_type, "architectures": [class]}));
    let epsilon = match family {
        Family::Cohere2 => Some("layer_norm_eps"),
        Family::Starcoder2 => Some("norm_epsilon"),
        Family::Gpt2 => Some("layer_norm_epsilon"),
        _ => None,
    };
    match epsilon {
        Some(name) => {
            config.insert(name.into(), json!(keys.layer_norm_epsilon()?));
        }
        // It was added to what all families have.
        None => keys.require_rms_norm()?,
    }
    match family {
        Family::Granite => granite(keys, config)?,
        Family::SeedOss => set(config, json!({"attention_out_bias": seen.has_attention_output_bias})),
        Family::Ernie45 => set(config, json!({"use_bias": seen.has_attention_bias})),
        Family::Olmo2 if windowed => set(config, alternating(keys, FULL_EVERY)?),
        Family::Exaone4 => set(config, alternating(keys, FULL_EVERY)?),
        Family::Cohere2 => {
            set(config, alternating(keys, FULL_EVERY)?);
            let scale = keys.float("logit_scale")?;
            config.insert("logit_scale".into(), json!(scale.unwrap_or(0.0625)));
        }
        Family::Starcoder2 => set(
            config,
            json!({
                "hidden_act": "gelu_pytorch_tanh",
                "use_bias": seen.has_attention_bias,
                "sliding_window": sliding_window(keys)?,
            }),
        ),
        Family::Gpt2 => gpt2(config, notes),
        _ => {}
    }
    if matches!(family, Family::Granite | Family::Mistral3) {
        // Converted by the same code as llama.
        notes.insert("rope_interleaved".into(), true.into());
    }
    Ok(())
}

/// Adds the factors of Granite.
pub(super) fn granite(keys: &Keys<'_>, config: &mut Map<String, Value>) -> Result<(), Fault> {
    // Zero stands for a factor that is not used.
    let factor = |name: &str| keys.float(name).map(|factor| factor.filter(|factor| *factor > 0.0));
    let usual = (keys.head_dim()? as f64).powf(-0.5);
    set(
        config,
        json!({
            "attention_multiplier": factor("attention.scale")?.unwrap_or(usual),
            "embedding_multiplier": factor("embedding_scale")?.unwrap_or(1.0),
            "residual_multiplier": factor("residual_scale")?.unwrap_or(1.0),
            "logits_scaling": factor("logit_scale")?.unwrap_or(1.0),
        }),
    );
    Ok(())
}

/// Adds the names that this family has for the usual entries.
fn gpt2(config: &mut Map<String, Value>, notes: &mut Map<String, Value>) {
    for (usual, own) in [
        ("hidden_size", "n_embd"),
        ("num_attention_heads", "n_head"),
        ("num_hidden_layers", "n_layer"),
        ("intermediate_size", "n_inner"),
        ("max_position_embeddings", "n_positions"),
    ] {
        let value = config.get(usual).cloned().unwrap_or_default();
        config.insert(own.into(), value);
    }
    config.insert("activation_function".into(), "gelu_new".into());
    // The converter transposes the matrices, which the checkpoint has as [inputs, outputs].
    notes.insert("transposed".into(), false.into());
}

/// Adds to `rope_parameters` what Mistral 3 has beyond others.
pub(super) fn mistral3_rope(keys: &Keys<'_>, config: &mut Map<String, Value>) -> Result<(), Fault> {
    let Some(Value::Object(parameters)) = config.get_mut("rope_parameters") else { return Ok(()) };
    if let Some(factor) = keys.float("rope.scaling.yarn_log_multiplier")?.filter(|factor| *factor != 0.0) {
        parameters.insert("mscale".into(), json!(1.0));
        parameters.insert("mscale_all_dim".into(), json!(factor));
    }
    if let Some(rate) = keys.float("attention.temperature_scale")?.filter(|rate| *rate != 0.0) {
        parameters.insert("llama_4_scaling_beta".into(), json!(rate));
        let original = super::rope::original_context(keys)?;
        let name = "attention.temperature_length";
        if let Some(length) = keys.number(name)?.filter(|length| ![0, original].contains(length)) {
            let reason = format!("{length}, where positions are scaled beyond {original}");
            return Err(Fault::unsupported(keys.key(name), reason));
        }
        parameters.insert("original_max_position_embeddings".into(), json!(original));
    }
    Ok(())
}
