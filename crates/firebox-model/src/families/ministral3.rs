//! `ministral3`: queries that grow with their position; and `mistral3`, which has it or `mistral` as its text model.

use super::common::{Common, Defaults};
use super::dense::{Dense, Flag, Window};
use super::mistral;
use crate::ModelError;
use crate::config::{DecoderConfig, MixerConfig, QueryGrowth, TensorNames};
use crate::fields::Fields;

pub(super) const MINISTRAL3: Dense = Dense {
    family: "ministral3",
    defaults: Defaults {
        head_dim: Some(128),
        kv_heads: Some(8),
        rope_theta: 1_000_000.0,
        norm_epsilon: 1e-5,
        ..Defaults::USUAL
    },
    input_bias: Flag::Never,
    output_bias: Flag::Never,
    feed_forward_bias: Flag::Never,
    window: Window::Configured,
    finish: grow_queries,
    ..Dense::LLAMA
};

fn grow_queries(common: &Common<'_>, model: &mut DecoderConfig) -> Result<(), ModelError> {
    let Some(scheme) = common.fields.object("rope_parameters")? else { return Ok(()) };
    let Some(rate) = scheme.number("llama_4_scaling_beta")?.filter(|&rate| rate != 0.0) else {
        return Ok(());
    };
    let original = scheme.required_count("original_max_position_embeddings")?;
    for block in &mut model.blocks {
        if let MixerConfig::Attention(attention) = &mut block.mixer {
            attention.query_growth = Some(QueryGrowth { rate: rate as f32, original });
        }
    }
    Ok(())
}

/// Reads the multimodal model, of which the text model runs.
pub(super) fn wrapper_config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let text = fields.object("text_config")?.ok_or_else(|| fields.error("text_config", "is missing"))?;
    let model = match text.text("model_type")?.unwrap_or("mistral") {
        "mistral" => mistral::config(&text)?,
        "ministral3" => MINISTRAL3.read(&text)?,
        other => {
            let reason = format!("is {other:?}; the text model should be mistral or ministral3");
            return Err(text.error("model_type", reason));
        }
    };
    // Either flag of a published file may be missing.
    let tied = match fields.flag("tie_word_embeddings")? {
        Some(tied) => tied,
        None => model.tied_embeddings,
    };
    Ok(DecoderConfig {
        family: "mistral3",
        tied_embeddings: tied,
        names: TensorNames {
            prefix: "model.language_model.".into(),
            foreign: vec!["model.vision_tower.".into(), "model.multi_modal_projector.".into()],
            ..TensorNames::default()
        },
        ..model
    })
}
