//! What GGUF says of a decoder, and whether that means the same network.

use std::f64::consts::TAU;

use firebox_store::GgufDescription;
use firebox_store::gguf::{List, Value};
use serde_json::Value as Json;

use crate::ModelError;
use crate::config::{
    AttentionConfig, BlockConfig, DecoderConfig, FeedForwardConfig, MixerConfig, NormKind, RopeConfig,
    RopeScaling,
};
use crate::families::Architecture;

/// Families that can be described, and the architectures that GGUF has for them.
const ARCHITECTURES: [(&str, &str); 18] = [
    ("llama", "llama"),
    ("mistral", "llama"),
    ("smollm3", "smollm3"),
    ("qwen2", "qwen2"),
    ("qwen3", "qwen3"),
    ("qwen3_moe", "qwen3moe"),
    ("gemma3_text", "gemma3"),
    ("phi3", "phi3"),
    ("olmo2", "olmo2"),
    ("olmo3", "olmo2"),
    ("granite", "granite"),
    ("glm4", "glm4"),
    ("seed_oss", "seed_oss"),
    ("ernie4_5", "ernie4_5"),
    ("exaone4", "exaone4"),
    ("hunyuan_v1_dense", "hunyuan-dense"),
    ("cohere2", "cohere2"),
    ("starcoder2", "starcoder2"),
];

/// Architectures whose files say nothing about which layers have a window, and every how many-th has none.
const PATTERNS: [(&str, usize); 2] = [("gemma3", 6), ("cohere2", 4)];

/// Architectures whose windows only Firebox reads.
const WINDOWLESS: [&str; 5] = ["llama", "qwen2", "qwen3", "qwen3moe", "starcoder2"];

/// Layers of the only Exaone 4 whose windows llama.cpp reads.
const EXAONE4_LAYERS: usize = 64;

/// Returns what GGUF says of the model of a `config.json`, or refuses it by name.
pub fn gguf_description(config: &Json) -> Result<GgufDescription, ModelError> {
    let model = decoder(config)?;
    let described = ARCHITECTURES.iter().find(|(family, _)| *family == model.family);
    let &(_, architecture) = described.ok_or_else(|| refused(model.family))?;
    let attention = attentions(&model)?;
    let first = attention.first().ok_or_else(|| refused(model.family))?;
    let kind = |block: &BlockConfig| std::mem::discriminant(&block.feed_forward);
    if model.blocks.iter().any(|block| kind(block) != kind(&model.blocks[0])) {
        return Err(unspeakable("mlp_only_layers"));
    }
    let mut description = Description { width: first.head_dim, ..Description::default() };
    let inner = match model.blocks.first().map(|block| &block.feed_forward) {
        Some(FeedForwardConfig::Gated(network)) => network.inner_size,
        Some(FeedForwardConfig::Plain(network)) => network.inner_size,
        Some(FeedForwardConfig::MixtureOfExperts(mixture)) => {
            description.count("expert_count", mixture.experts);
            description.count("expert_used_count", mixture.chosen);
            description.count("expert_feed_forward_length", mixture.expert.inner_size);
            description.keys.push(("expert_weights_norm", Value::Bool(mixture.normalised)));
            if !mixture.normalised {
                description.notes.push(ignored("that weights of experts do not sum to one"));
            }
            // No layer has it, and files have it nevertheless.
            let dense = config.get("intermediate_size").and_then(Json::as_u64);
            dense.map_or(mixture.expert.inner_size, |dense| dense as usize)
        }
        _ => return Err(refused(model.family)),
    };
    for (key, count) in [
        ("block_count", model.blocks.len()),
        ("context_length", model.max_positions),
        ("embedding_length", model.hidden_size),
        ("feed_forward_length", inner),
        ("vocab_size", model.vocab_size),
        ("attention.head_count", first.heads),
        ("attention.head_count_kv", first.kv_heads),
        ("attention.key_length", first.head_dim),
        ("attention.value_length", first.head_dim),
    ] {
        description.count(key, count);
    }
    let epsilon = match model.final_norm.kind {
        NormKind::Layer { .. } => "attention.layer_norm_epsilon",
        _ => "attention.layer_norm_rms_epsilon",
    };
    description.number(epsilon, model.final_norm.epsilon);
    describe_windows(&mut description, architecture, &attention);
    describe_ropes(&mut description, &model, &attention)?;
    let usual = (first.head_dim as f32).powf(-0.5);
    match architecture {
        "granite" => {
            let factor = |factor: Option<f32>| f64::from(factor.unwrap_or(1.0));
            description.number("attention.scale", first.scale.into());
            description.number("embedding_scale", factor(model.embedding_scale));
            description.number("residual_scale", factor(model.blocks[0].residual_scale));
            description.number("logit_scale", factor(model.logit_scale).recip());
        }
        "cohere2" => description.number("logit_scale", model.logit_scale.unwrap_or(1.0).into()),
        "gemma3" if (first.scale / usual - 1.0).abs() > 1e-6 => {
            description.number("attention.scale", first.scale.into());
            description.notes.push(ignored("the scale of attention"));
        }
        _ => {}
    }
    if let Some(cap) = model.logit_softcap {
        description.number("final_logit_softcapping", cap.into());
    }
    let Description { keys, factors, notes, .. } = description;
    Ok(GgufDescription { architecture, keys, factors, tied: model.tied_embeddings, notes })
}

/// Refuses a file from whose metadata another network would be read than a `config.json` describes. `derived` is the
/// configuration that the reader makes of the metadata.
pub fn check_gguf(config: &Json, derived: &Json) -> Result<(), ModelError> {
    let [given, found] = [comparable(&decoder(config)?), comparable(&decoder(derived)?)];
    match difference("", &given, &found) {
        None => Ok(()),
        Some(field) => Err(unspeakable(&field)),
    }
}

fn unspeakable(field: &str) -> ModelError {
    let reason = "is nothing that GGUF files of this family can say; export the model with --safetensors";
    ModelError::Config { field: field.into(), reason: reason.into() }
}

/// A note on what llama.cpp does not read.
fn ignored(what: &str) -> String {
    format!("llama.cpp does not read {what} of this architecture, and computes something else")
}

fn decoder(config: &Json) -> Result<DecoderConfig, ModelError> {
    match Architecture::from_json(config)? {
        Architecture::Decoder(model) => Ok(model),
        Architecture::Encoder(model) => Err(refused(model.family)),
    }
}

fn refused(family: &str) -> ModelError {
    let families: Vec<&str> = ARCHITECTURES.iter().map(|(family, _)| *family).collect();
    ModelError::Config {
        field: "model_type".into(),
        reason: format!(
            "{family} cannot be written as GGUF yet, only {}; export the model with --safetensors, and convert that",
            families.join(", ")
        ),
    }
}

fn attentions(model: &DecoderConfig) -> Result<Vec<&AttentionConfig>, ModelError> {
    let attention = model.blocks.iter().map(|block| match &block.mixer {
        MixerConfig::Attention(attention) => Ok(attention),
        _ => Err(refused(model.family)),
    });
    attention.collect()
}

/// Metadata under construction.
#[derive(Default)]
struct Description {
    keys: Vec<(&'static str, Value)>,
    factors: Vec<(&'static str, Vec<f32>)>,
    /// Width of a head.
    width: usize,
    notes: Vec<String>,
}

impl Description {
    fn count(&mut self, key: &'static str, count: usize) {
        self.keys.push((key, Value::Unsigned(count as u64)));
    }

    fn number(&mut self, key: &'static str, number: f64) {
        // As wide as files have it.
        self.keys.push((key, Value::Float(f64::from(number as f32))));
    }

    fn text(&mut self, key: &'static str, text: &str) {
        self.keys.push((key, Value::Text(text.to_owned())));
    }
}

fn describe_windows(description: &mut Description, architecture: &str, attention: &[&AttentionConfig]) {
    let key = "attention.sliding_window";
    let Some(window) = attention.iter().find_map(|attention| attention.window) else {
        // Without the key, llama.cpp takes the window of the first models of this family.
        if architecture == "phi3" {
            description.count(key, 0);
        }
        return;
    };
    description.count(key, window);
    if WINDOWLESS.contains(&architecture) || architecture == "exaone4" && attention.len() != EXAONE4_LAYERS {
        let what = format!("the window of {window} tokens");
        description.notes.push(ignored(&what));
    }
    let slides: Vec<bool> = attention.iter().map(|attention| attention.window.is_some()).collect();
    let every = PATTERNS.iter().find(|(known, _)| *known == architecture).map(|(_, every)| *every);
    let is_usual = |(layer, slides): (usize, &bool)| match every {
        Some(every) => *slides != (layer + 1).is_multiple_of(every),
        None => *slides,
    };
    if !slides.iter().enumerate().all(is_usual) {
        description.keys.push(("attention.sliding_window_pattern", Value::List(List::Bools(slides))));
    }
}

fn describe_ropes(
    description: &mut Description,
    model: &DecoderConfig,
    attention: &[&AttentionConfig],
) -> Result<(), ModelError> {
    let of = |attention: &&AttentionConfig| attention.rope.and_then(|rope| model.ropes.get(rope));
    let full = attention.iter().filter(|attention| attention.window.is_none()).find_map(of);
    let sliding = attention.iter().filter(|attention| attention.window.is_some()).find_map(of);
    let Some(rope) = full.or(sliding) else { return Ok(()) };
    description.number("rope.freq_base", rope.theta);
    description.count("rope.dimension_count", rope.width);
    if let (Some(_), Some(sliding)) = (full, sliding) {
        description.number("rope.freq_base_swa", sliding.theta);
    }
    describe_scaling(description, rope)
}

fn describe_scaling(description: &mut Description, rope: &RopeConfig) -> Result<(), ModelError> {
    match &rope.scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { factor } => {
            description.text("rope.scaling.type", "linear");
            description.number("rope.scaling.factor", (*factor).into());
        }
        RopeScaling::Yarn { factor, original, beta_fast, beta_slow, attention_factor, .. } => {
            description.text("rope.scaling.type", "yarn");
            description.number("rope.scaling.factor", *factor);
            description.count("rope.scaling.original_context_length", *original);
            description.number("rope.scaling.yarn_attn_factor", (*attention_factor).into());
            description.number("rope.scaling.yarn_beta_fast", *beta_fast);
            description.number("rope.scaling.yarn_beta_slow", *beta_slow);
        }
        RopeScaling::Llama3 { .. } | RopeScaling::Factors { .. } => {
            // llama.cpp multiplies by one factor for each pair of a head.
            if let Some(factors) = divisors(rope).filter(|_| rope.width == description.width) {
                description.factors.push(("rope_freqs.weight", factors));
            }
        }
        RopeScaling::LongRope { short, long, original, attention_factor } => {
            description.count("rope.scaling.original_context_length", *original);
            description.number("rope.scaling.attn_factor", (*attention_factor).into());
            description.factors.push(("rope_factors_long.weight", long.clone()));
            description.factors.push(("rope_factors_short.weight", short.clone()));
        }
        RopeScaling::Dynamic { .. } | RopeScaling::Proportional { .. } => {
            return Err(unspeakable("rope_parameters"));
        }
    }
    Ok(())
}

/// Returns what each frequency is divided by, whatever the length of a sequence.
fn divisors(rope: &RopeConfig) -> Option<Vec<f32>> {
    match &rope.scaling {
        RopeScaling::Factors { factors } => Some(factors.clone()),
        RopeScaling::Llama3 { factor, low_frequency, high_frequency, original } => {
            let [factor, low, high] = [*factor, *low_frequency, *high_frequency].map(f64::from);
            let divisor = |at: usize| {
                let wavelength = TAU * rope.theta.powf(at as f64 / rope.width as f64);
                let share = ((*original as f64 / wavelength - low) / (high - low)).clamp(0.0, 1.0);
                ((1.0 - share) / factor + share).recip() as f32
            };
            Some((0..rope.width).step_by(2).map(divisor).collect())
        }
        _ => None,
    }
}

/// What differs between files of one network: its name, and the order and the offsets of weights.
const FORMS: [&str; 3] = ["family", "layout", "weight_offset"];

/// Returns a network in a form that is the same for whatever computes the same.
fn comparable(model: &DecoderConfig) -> Json {
    let mut model = model.clone();
    let mut ropes = std::mem::take(&mut model.ropes);
    for rope in &mut ropes {
        if let Some(factors) = divisors(rope) {
            rope.scaling = RopeScaling::Factors { factors };
        }
    }
    let mut of_layers = Vec::new();
    for block in &mut model.blocks {
        let MixerConfig::Attention(attention) = &mut block.mixer else { continue };
        of_layers.push(attention.rope.take().and_then(|rope| ropes.get(rope).cloned()));
    }
    serde_json::json!({ "network": model, "ropes": of_layers })
}

/// Returns the first field in which two networks differ by more than the rounding of a number.
fn difference(field: &str, one: &Json, other: &Json) -> Option<String> {
    match (one, other) {
        (Json::Object(fields), Json::Object(others)) if fields.len() == others.len() => fields
            .iter()
            .filter(|(name, _)| !FORMS.contains(&name.as_str()))
            .find_map(|(name, value)| difference(name, value, others.get(name).unwrap_or(&Json::Null))),
        (Json::Array(values), Json::Array(others)) if values.len() == others.len() => {
            values.iter().zip(others).find_map(|(value, other)| difference(field, value, other))
        }
        (Json::Number(number), Json::Number(other)) => {
            let (number, other) = (number.as_f64()?, other.as_f64()?);
            let is_near = (number - other).abs() <= 1e-6 * number.abs().max(other.abs());
            (!is_near).then(|| field.to_owned())
        }
        _ => (one != other).then(|| field.to_owned()),
    }
}
