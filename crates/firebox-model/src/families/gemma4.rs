//! `gemma4` and `gemma4_text`: windows and full attention with a head width and a position scheme each, inputs of their own for
//! every layer, last layers that read the keys and values of earlier ones, and mixtures beside the feed-forward. Only the
//! language model of the multimodal wrapper runs.

use super::common::{Common, Defaults, LayerKind};
use super::mixture::Mixture;
use super::rope;
use crate::ModelError;
use crate::config::{
    Activation, AttentionConfig, BlockConfig, DecoderConfig, ExpertsConfig, FeedForwardConfig, GatedConfig,
    LayerInputConfig, LayerInputsConfig, MixtureNormsConfig, NormConfig, NormKind, RopeConfig, RopeLayout,
    RopeScaling, RoutingConfig, SharedExpertConfig, TensorNames,
};
use crate::fields::Fields;

/// Reads the wrapper: its text configuration is under `text_config`, and its tensor names have one more prefix.
pub(super) fn wrapper_config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let text = fields.object("text_config")?.ok_or_else(|| fields.error("text_config", "is missing"))?;
    let model = config(&text)?;
    let foreign = ["vision_tower", "embed_vision", "audio_tower", "embed_audio"];
    Ok(DecoderConfig {
        family: "gemma4",
        tied_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(model.tied_embeddings),
        names: TensorNames {
            prefix: "model.language_model.".into(),
            foreign: foreign.map(|part| format!("model.{part}.")).into(),
            ..model.names
        },
        ..model
    })
}

/// What mixtures call their router and their norms, and what the checkpoint does.
const RENAMED: [(&str, &str); 4] = [
    ("mlp.gate.weight", "router.proj.weight"),
    ("mlp.gate.", "router."),
    ("mlp.pre_", "pre_"),
    ("mlp.post_", "post_"),
];

/// Returns the mixture that works beside the dense network.
fn mixture_beside(common: &Common<'_>, dense: GatedConfig) -> Result<ExpertsConfig, ModelError> {
    let fields = &common.fields;
    let mixture = Mixture {
        experts: fields.required_count("num_experts")?,
        chosen: fields.required_count("top_k_experts")?,
        inner_size: fields.required_count("moe_intermediate_size")?,
        normalised: true,
    };
    let routing =
        RoutingConfig { expert_scales: Some("gate.per_expert_scale".into()), ..RoutingConfig::default() };
    let norm = |name| common.norm(name, common.hidden_size);
    Ok(ExpertsConfig {
        shared: Some(SharedExpertConfig { prefix: String::new(), network: dense, gate: None }),
        norms: Some(MixtureNormsConfig {
            shared: norm("pre_feedforward_layernorm"),
            shared_output: norm("post_feedforward_layernorm_1"),
            experts: norm("pre_feedforward_layernorm_2"),
            experts_output: norm("post_feedforward_layernorm_2"),
            router: norm("gate.scale"),
        }),
        ..mixture.config(common, routing)?
    })
}

/// Heads of a layer.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Heads {
    width: usize,
    key_values: usize,
}

pub(super) fn config(fields: &Fields<'_>) -> Result<DecoderConfig, ModelError> {
    let defaults = Defaults {
        head_dim: Some(256),
        kv_heads: Some(4),
        activation: Activation::GeluTanh,
        tied_embeddings: true,
        ..Defaults::default()
    };
    let common = Common::read(fields, "gemma4_text", defaults)?;
    // Images attend to themselves in both directions, text does not.
    if let Some(other) = fields.text("use_bidirectional_attention")?.filter(|kind| *kind != "vision") {
        let reason = format!("is {other:?}; only causal models generate text");
        return Err(fields.error("use_bidirectional_attention", reason));
    }
    let mut kinds = common
        .layer_kinds(|layer| if (layer + 1) % 6 == 0 { LayerKind::Full } else { LayerKind::Sliding })?;
    // The reference makes it so, whatever is listed.
    if let Some(last) = kinds.last_mut().filter(|last| **last == LayerKind::Sliding) {
        *last = LayerKind::Full;
    }
    let heads: Vec<Heads> = kinds
        .iter()
        .enumerate()
        .map(|(layer, kind)| heads_of(&common, layer, *kind))
        .collect::<Result<_, _>>()?;
    let sources = sources(&common, &kinds, &heads)?;
    let (mut ropes, mut rope_kinds) = (Vec::new(), Vec::new());
    let mut blocks = Vec::with_capacity(common.layers);
    let inputs = layer_inputs(&common)?;
    for (layer, ((kind, heads), source)) in kinds.into_iter().zip(heads).zip(sources).enumerate() {
        let rope = match rope_kinds.iter().position(|of| *of == kind) {
            Some(index) => index,
            None => {
                rope_kinds.push(kind);
                ropes.push(rope(&common, kind, heads.width)?);
                ropes.len() - 1
            }
        };
        if ropes[rope].width != heads.width {
            let reason = format!("gives layer {layer} heads of {}, unlike others of its kind", heads.width);
            return Err(fields.error("per_layer_config", reason));
        }
        let attention = AttentionConfig {
            kv_heads: heads.key_values,
            head_dim: heads.width,
            scale: 1.0,
            window: common.window_of(kind)?,
            rope: Some(rope),
            head_norm: Some(common.norm("", heads.width)),
            value_norm: Some(common.norm_epsilon),
            keys_as_values: kind == LayerKind::Full && keys_as_values(fields)?,
            kv_layer: source,
            ..common.attention_with_configured_bias()?
        };
        let doubled = source.is_some() && fields.flag("use_double_wide_mlp")?.unwrap_or(false);
        let inner_size = common.inner_size * if doubled { 2 } else { 1 };
        let dense = GatedConfig { inner_size, ..common.gated() };
        let mixture = fields.flag("enable_moe_block")?.unwrap_or(false);
        let norm = |name| common.norm(name, common.hidden_size);
        blocks.push(BlockConfig {
            mixer_output_norm: Some(norm("post_attention_layernorm")),
            feed_forward_norm: match mixture {
                // The mixture has norms of its own.
                true => NormConfig { kind: NormKind::Absent, ..norm("") },
                false => norm("pre_feedforward_layernorm"),
            },
            feed_forward_output_norm: Some(norm("post_feedforward_layernorm")),
            layer_input: inputs.as_ref().map(|inputs| LayerInputConfig {
                layer,
                hidden_size: common.hidden_size,
                width: inputs.width,
                activation: common.activation,
                norm: norm("post_per_layer_input_norm"),
            }),
            output_scale: Some("layer_scalar".into()),
            ..common.block(
                attention,
                match mixture {
                    true => FeedForwardConfig::MixtureOfExperts(mixture_beside(&common, dense)?),
                    false => FeedForwardConfig::Gated(dense),
                },
            )
        });
    }
    Ok(DecoderConfig {
        embedding_scale: Some((common.hidden_size as f32).sqrt()),
        logit_softcap: fields.positive("final_logit_softcapping")?.map(|cap| cap as f32),
        layer_inputs: inputs,
        names: TensorNames { renamed: &RENAMED, ..TensorNames::default() },
        ..common.model(ropes, blocks)
    })
}

fn keys_as_values(fields: &Fields<'_>) -> Result<bool, ModelError> {
    Ok(fields.flag("attention_k_eq_v")?.unwrap_or(false))
}

/// Returns the heads of a layer: as `per_layer_config` says, or else by its kind.
fn heads_of(common: &Common<'_>, layer: usize, kind: LayerKind) -> Result<Heads, ModelError> {
    let fields = &common.fields;
    let usual = Heads { width: common.head_dim, key_values: common.kv_heads };
    let heads = match fields.object("per_layer_config")? {
        Some(listed) => {
            let known = |name: &str| name.parse::<usize>().is_ok_and(|listed| listed < common.layers);
            if let Some(other) = listed.names().find(|name| !known(name)) {
                return Err(listed.error(other, format!("is not one of {} layers", common.layers)));
            }
            let Some(own) = listed.object(&layer.to_string())? else { return Ok(usual) };
            if let Some(other) = own.names().find(|name| !["head_dim", "num_key_value_heads"].contains(name))
            {
                return Err(own.error(other, "is not known to differ between layers"));
            }
            Heads {
                width: own.count("head_dim")?.unwrap_or(usual.width),
                key_values: own.count("num_key_value_heads")?.unwrap_or(usual.key_values),
            }
        }
        None if kind != LayerKind::Full => usual,
        None => Heads {
            width: fields.count("global_head_dim")?.unwrap_or(512),
            key_values: match fields.count("num_global_key_value_heads")? {
                Some(key_values) if keys_as_values(fields)? => key_values,
                _ => usual.key_values,
            },
        },
    };
    if !common.heads.is_multiple_of(heads.key_values) {
        let reason = format!(
            "layer {layer} has {} key heads, which do not divide num_attention_heads {}",
            heads.key_values, common.heads
        );
        return Err(fields.error("num_key_value_heads", reason));
    }
    Ok(heads)
}

/// Returns for every layer the one whose keys and values it reads, if it has none of its own.
fn sources(
    common: &Common<'_>,
    kinds: &[LayerKind],
    heads: &[Heads],
) -> Result<Vec<Option<usize>>, ModelError> {
    let shared = common.fields.whole("num_kv_shared_layers")?.unwrap_or(0);
    let own = common.layers.saturating_sub(shared);
    let source = |layer: usize| {
        if layer < own {
            return Ok(None);
        }
        let source = (0..own).rev().find(|&earlier| kinds[earlier] == kinds[layer]);
        match source.filter(|&source| heads[source] == heads[layer]) {
            Some(source) => Ok(Some(source)),
            None => {
                let reason =
                    format!("is {shared}, but layer {layer} has no earlier layer with heads like its own");
                Err(common.fields.error("num_kv_shared_layers", reason))
            }
        }
    };
    (0..common.layers).map(source).collect()
}

fn layer_inputs(common: &Common<'_>) -> Result<Option<LayerInputsConfig>, ModelError> {
    const WIDTH: &str = "hidden_size_per_layer_input";
    let fields = &common.fields;
    if fields.whole(WIDTH)? == Some(0) {
        return Ok(None);
    }
    let Some(width) = fields.count_or(WIDTH, Some(256))? else { return Ok(None) };
    let vocab_size = fields.count("vocab_size_per_layer_input")?.unwrap_or(262_144);
    if vocab_size < common.vocab_size {
        let reason = format!("is {vocab_size}, fewer than vocab_size {}", common.vocab_size);
        return Err(fields.error("vocab_size_per_layer_input", reason));
    }
    Ok(Some(LayerInputsConfig { width, vocab_size, norm: common.norm("per_layer_projection_norm", width) }))
}

/// Returns the position scheme of a kind of layer.
fn rope(common: &Common<'_>, kind: LayerKind, head_dim: usize) -> Result<RopeConfig, ModelError> {
    let fields = &common.fields;
    let head = rope::Head { head_dim, ..common.rope_head() };
    let (name, theta) = match kind {
        LayerKind::Full => ("full_attention", 1_000_000.0),
        _ => ("sliding_attention", 10_000.0),
    };
    let scheme = match fields.object("rope_parameters")? {
        Some(both) => both.object(name)?.ok_or_else(|| both.error(name, "is missing"))?,
        None if kind == LayerKind::Full => return proportional(fields, head_dim, theta, 0.25, 1.0),
        None => return rope::plain(fields, head, theta),
    };
    if scheme.text("rope_type")? != Some("proportional") {
        return rope::read_scheme(&scheme, Some(&scheme), head, theta);
    }
    let theta = scheme.positive("rope_theta")?.unwrap_or(theta);
    let part = scheme.positive("partial_rotary_factor")?.unwrap_or(1.0);
    proportional(&scheme, head_dim, theta, part, scheme.positive("factor")?.unwrap_or(1.0))
}

/// Returns a scheme with the frequencies of whole heads, of which only the first `part` rotate.
fn proportional(
    fields: &Fields<'_>,
    head_dim: usize,
    theta: f64,
    part: f64,
    factor: f64,
) -> Result<RopeConfig, ModelError> {
    if part > 1.0 || !head_dim.is_multiple_of(2) {
        let reason = format!("{part} of heads of {head_dim} does not leave whole pairs");
        return Err(fields.error("partial_rotary_factor", reason));
    }
    let pairs = (part * head_dim as f64 / 2.0) as usize;
    let scaling = RopeScaling::Proportional { pairs, factor: factor as f32 };
    Ok(RopeConfig { width: head_dim, theta, scaling, layout: RopeLayout::Half })
}
