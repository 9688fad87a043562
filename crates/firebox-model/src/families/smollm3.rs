//! `smollm3`: some layers without position embeddings.

use super::common::{Common, Defaults, LayerKind};
use crate::ModelError;
use crate::config::{AttentionConfig, DecoderConfig, FeedForwardConfig, GatedConfig};
use crate::fields::{Fields, shown};

pub(super) fn config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let defaults =
        Defaults { kv_heads: Some(4), tied_embeddings: true, rope_theta: 2_000_000.0, ..Defaults::default() };
    let common = Common::read(fields, "smollm3", defaults)?;
    let rotated = rotated_layers(&common)?;
    let slides =
        fields.flag("use_sliding_window")?.unwrap_or(false) && fields.count("sliding_window")?.is_some();
    let kinds = common
        .layer_kinds(|layer| if slides && !rotated[layer] { LayerKind::Sliding } else { LayerKind::Full })?;
    let gated = GatedConfig { bias: fields.flag("mlp_bias")?.unwrap_or(false), ..common.gated() };
    let blocks = kinds
        .into_iter()
        .zip(rotated)
        .map(|(kind, rotated)| {
            let attention = AttentionConfig {
                rope: rotated.then_some(0),
                window: if slides { common.window_of(kind)? } else { None },
                ..common.attention_with_configured_bias()?
            };
            Ok(common.block(attention, FeedForwardConfig::Gated(gated.clone())))
        })
        .collect::<Result<_, ModelError>>()?;
    Ok(common.model(vec![common.rope()?], blocks))
}

/// Returns which layers have position embeddings: as listed (1 means yes), or all but every n-th.
fn rotated_layers(common: &Common<'_>) -> Result<Vec<bool>, ModelError> {
    let fields = &common.fields;
    let Some(listed) = fields.list("no_rope_layers")? else {
        let interval = fields.count("no_rope_layer_interval")?.unwrap_or(4);
        return Ok((0..common.layers).map(|layer| (layer + 1) % interval != 0).collect());
    };
    if listed.len() != common.layers {
        return Err(fields.error(
            "no_rope_layers",
            format!("lists {} layers, but num_hidden_layers is {}", listed.len(), common.layers),
        ));
    }
    listed
        .iter()
        .map(|value| match (value.as_u64(), value.as_bool()) {
            (Some(number), _) => Ok(number != 0),
            (None, Some(flag)) => Ok(flag),
            _ => Err(fields.error("no_rope_layers", format!("{} is neither 0 nor 1", shown(value)))),
        })
        .collect()
}
