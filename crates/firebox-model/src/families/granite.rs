//! `granite`: factors of embeddings, scores, outputs and logits.

use super::common::Common;
use super::dense::Dense;
use crate::ModelError;
use crate::config::{DecoderConfig, MixerConfig};

pub(super) const GRANITE: Dense = Dense { family: "granite", finish: read_factors, ..Dense::LLAMA };

/// Reads the factors, each of which is 1 where it is absent.
pub(super) fn read_factors(common: &Common<'_>, model: &mut DecoderConfig) -> Result<(), ModelError> {
    let factor = |name: &str| common.fields.positive(name).map(|factor| factor.unwrap_or(1.0) as f32);
    let other_than_one = |factor: f32| (factor != 1.0).then_some(factor);
    model.embedding_scale = other_than_one(factor("embedding_multiplier")?);
    model.logit_scale = other_than_one(1.0 / factor("logits_scaling")?);
    let (scale, residual_scale) = (factor("attention_multiplier")?, factor("residual_multiplier")?);
    for block in &mut model.blocks {
        block.residual_scale = other_than_one(residual_scale);
        if let MixerConfig::Attention(attention) = &mut block.mixer {
            attention.scale = scale;
        }
    }
    Ok(())
}
