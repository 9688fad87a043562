//! GGUF files, as llama.cpp's converter writes them.
//!
//! Names, shapes and metadata are translated to Hugging Face's. The weights stay mapped and unchanged; where the converter
//! changed their values or their order, the derived configuration says so in its object `firebox`:
//!
//! | key | meaning |
//! |---|---|
//! | `source` | always `"gguf"` |
//! | `rope_interleaved` | the rows of `q_proj` and `k_proj`, weights and biases, are in the order of interleaved rotary positions: pairs are neighbours, not halves |
//! | `norm_weight_offset` | the number to add to a norm's weight, if the family's own offset is another (Gemma, Qwen3.5 and Qwen3-Next: 0 instead of 1) |
//! | `a_log_negated_exp` | `A_log` holds `-exp(A_log)` |
//! | `shared_separate` | gate and rows of the network beside experts are matrices of their own, where the family's are one (granitemoehybrid) |
//! | `v_heads_tiled` | the value heads of linear attention iterate over the key heads first |
//! | `qkvz_separate` | queries, keys and values of linear attention are one matrix and gates another, all heads of a kind side by side, where the family's are grouped by key head |
//! | `factors_separate` | what heads of latent attention multiply latents by is a matrix for keys, `[heads * rank, width]`, and one for values, where the family's is one |
//! | `experts_separate` | gates and rows of each expert are matrices of their own, where the family's are one, alternating (gpt-oss) |
//! | `transposed` | whether matrices of layers lie as `[inputs, outputs]`, if the family's usually do (GPT-2: false) |
//! | `pooling` | how tokens become one vector, if the file says so or the model is an encoder: `"mean"`, `"first"` or `"last"` |
//!
//! Frequency factors stored as tensors become `rope_parameters`: `rope_freqs` as `{"rope_type": "firebox_factors",
//! "factors": […]}`, by which the frequencies are divided, and `rope_factors_long` and `_short` as `longrope`.

mod block_bits;
mod config;
mod dense;
pub(crate) mod dequant;
mod family;
mod gemma4;
mod grid_blocks;
mod hybrid;
mod keys;
pub(crate) mod low_bits;
mod metadata;
mod mixtures;
mod names;
mod object;
pub(crate) mod opening;
mod outside;
pub(crate) mod plan;
mod reader;
mod rope;
mod split_name;
mod state_space;
mod tensor_summary;
pub(crate) mod vocabulary;
mod windows;
mod writer;

use self::family::Family;
use self::keys::Keys;
pub use self::metadata::{List, Metadata, Value};
use self::names::{Role, RopeFactors};
pub use self::reader::{Entry, Header};
use self::tensor_summary::TensorSummary;
use self::vocabulary::GgufVocabulary;
use crate::encoding::{Dtype, Encoding};
use crate::error::Fault;
use crate::segment::SegmentId;
use crate::tensor_index::{Place, Span, TensorInfo};
use crate::text::{TextAssets, TokenizerSource};

/// A translated GGUF file: everything that opening yields except the mapping.
pub struct Model {
    config: serde_json::Value,
    text: TextAssets,
    tensors: Vec<(TensorInfo, Place)>,
}

impl Model {
    /// Parses the header of a whole GGUF file and translates it.
    pub fn parse(file: &[u8]) -> Result<Self, Fault> {
        let Header { metadata, entries, .. } = Header::parse(file)?;
        if metadata.uniform("split.count")?.is_some_and(|count| count > 1) {
            return Err(Fault::unsupported(
                "split.count",
                "one part of a split model; open it by its path, with the others beside it",
            ));
        }
        let entries = entries.into_iter().map(|entry| (0, entry)).collect();
        Self::translate(&metadata, entries, &[file])
    }

    /// Translates the tensors of one or several files, each given with the index of its file.
    fn translate(metadata: &Metadata, entries: Vec<(usize, Entry)>, files: &[&[u8]]) -> Result<Self, Fault> {
        let architecture = metadata
            .text("general.architecture")?
            .ok_or_else(|| Fault::new("general.architecture", "missing"))?;
        let family = Family::of(architecture)?;
        let layers = Keys { metadata, architecture }.layers()?;

        let mut seen = TensorSummary::default();
        let mut tensors: Vec<(TensorInfo, Place)> = Vec::with_capacity(entries.len());
        for (file, entry) in entries {
            let before = tensors.len();
            match names::role(family, layers, &entry.name) {
                Role::Tensor(name) => tensors.push(tensor(name, entry, &mut seen)?),
                Role::Experts { prefix, projections } => {
                    let count = metadata.unsigned(&format!("{architecture}.expert_count"))?;
                    tensors.extend(experts(&entry, &prefix, projections, count)?);
                }
                Role::ExpertBiases { prefix, projection } => {
                    let count = metadata.unsigned(&format!("{architecture}.expert_count"))?;
                    tensors.extend(expert_biases(&entry, &prefix, projection, count)?);
                }
                Role::RopeFactors(which) => {
                    let factors = Some(rope_factors(files[file], &entry)?);
                    match which {
                        RopeFactors::All => seen.rope_factors = factors,
                        RopeFactors::Long => seen.long_factors = factors,
                        RopeFactors::Short => seen.short_factors = factors,
                    }
                }
                Role::Redundant => {}
            }
            tensors[before..].iter_mut().for_each(|(_, place)| place.data.file = file);
        }
        if seen.vocab_size == 0 {
            return Err(Fault::new("tensor \"token_embd.weight\"", "missing, or not of two dimensions"));
        }
        let config = config::config(metadata, architecture, family, &seen)?;
        let text = text(metadata)?;
        Ok(Self { config, text, tensors })
    }

    /// The derived configuration.
    pub fn config(&self) -> &serde_json::Value {
        &self.config
    }

    /// The vocabulary, if the file has one.
    pub fn vocabulary(&self) -> Option<&GgufVocabulary> {
        match &self.text.tokenizer {
            Some(TokenizerSource::Gguf(vocabulary)) => Some(vocabulary),
            _ => None,
        }
    }

    /// The tensors under their Hugging Face names.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.tensors.iter().map(|(info, _)| info)
    }
}

fn tensor(name: String, entry: Entry, seen: &mut TensorSummary) -> Result<(TensorInfo, Place), Fault> {
    let mut shape = entry.shape;
    match (name.as_str(), shape.as_slice()) {
        (
            "model.embed_tokens.weight"
            | "embeddings.word_embeddings.weight"
            | "embeddings.tok_embeddings.weight"
            | "transformer.wte.weight"
            | "backbone.embeddings.weight",
            [vocabulary, _],
        ) => {
            seen.vocab_size = *vocabulary;
        }
        ("model.embed_tokens_per_layer.weight", [rows, _]) => seen.layer_rows = Some(*rows),
        ("embeddings.token_type_embeddings.weight", [types, _]) => seen.token_types = Some(*types),
        // A vector if there is only one type, because the converter drops dimensions of 1.
        ("embeddings.token_type_embeddings.weight", [width]) => {
            seen.token_types = Some(1);
            shape = vec![1, *width];
        }
        ("lm_head.weight", _) => seen.has_output = true,
        // The converter drops the middle dimension of 1.
        (name, [channels, kernel])
            if name.ends_with(".conv1d.weight") || name.ends_with(".conv.conv.weight") =>
        {
            shape = vec![*channels, 1, *kernel];
        }
        // What every head or group has is a row of its own.
        (name, [rows, width])
            if name
                .rsplit_once(".mamba.")
                .or(name.rsplit_once(".mixer."))
                .is_some_and(|(_, part)| ["A_log", "D", "norm.weight"].contains(&part)) =>
        {
            shape = vec![rows.saturating_mul(*width)];
        }
        // A matrix for each head.
        (name, [heads, outputs, inputs])
            if name.ends_with(".self_attn.k_b_proj.weight")
                || name.ends_with(".self_attn.v_b_proj.weight") =>
        {
            let rows = heads.checked_mul(*outputs).ok_or_else(|| {
                Fault::new(
                    format!("tensor {name:?}: dimensions"),
                    format!("{:?} are too many", [heads, outputs]),
                )
            })?;
            shape = vec![rows, *inputs];
        }
        // A vector in files that were quantized after their conversion.
        (name, [width]) if name.ends_with(".shared_expert_gate.weight") => shape = vec![1, *width],
        _ => {}
    }
    seen.has_attention_bias |= name.ends_with("self_attn.q_proj.bias");
    seen.key_projections += usize::from(name.ends_with("self_attn.k_proj.weight"));
    seen.value_projections += usize::from(name.ends_with("self_attn.v_proj.weight"));
    seen.has_joined_factors |= name.ends_with("self_attn.kv_b_proj.weight");
    seen.has_mixer_convolution_bias |= name.ends_with(".conv1d.bias");
    seen.has_query_norm |= name.ends_with("self_attn.q_norm.weight");
    seen.has_convolution_bias |= name.ends_with("conv.in_proj.bias");
    seen.has_expert_bias |= name.ends_with("mlp.expert_bias");
    seen.has_grouped_projections |= name.ends_with("linear_attn.in_proj_qkvz.weight");
    seen.has_attention_output_bias |= name.ends_with("self_attn.o_proj.bias");
    seen.has_mlp_bias |= ["gate", "up", "down"]
        .iter()
        .any(|projection| name.ends_with(&format!("mlp.{projection}_proj.bias")));
    let info = TensorInfo {
        segment: SegmentId::from_tensor_name(&name),
        name,
        shape,
        encoding: entry.encoding,
        bytes: entry.len as u64,
    };
    Ok((info, Place { data: Span { file: 0, start: entry.start, len: entry.len }, scales: None }))
}

/// More experts than any model has.
const MAX_EXPERTS: usize = 65_536;

/// The smallest size of an expert. Each becomes a tensor of its own: without this bound, the names of four-byte experts
/// would take fifty times the file's size.
const MIN_EXPERT: usize = 64;

/// Splits the stack of all experts into a tensor for each matrix of an expert.
fn experts(
    entry: &Entry,
    prefix: &str,
    projections: &[&str],
    expected: Option<u64>,
) -> Result<Vec<(TensorInfo, Place)>, Fault> {
    let field = format!("tensor {:?}: dimensions", entry.name);
    let [count, out, inputs] = *entry.shape else {
        return Err(Fault::new(field, format!("{:?}; expected [experts, out, in]", entry.shape)));
    };
    check_count(&field, count, expected)?;
    let parts = projections.len();
    if out % parts != 0 {
        return Err(Fault::new(field, format!("{out} rows; expected as many for each of {parts} matrices")));
    }
    let shape = vec![out / parts, inputs];
    let len = entry.encoding.data_bytes(&shape).map_err(|reason| Fault::new(&field, reason))?;
    if len < MIN_EXPERT {
        return Err(Fault::new(field, format!("experts of {len} bytes; expected {MIN_EXPERT} or more")));
    }
    let matrices =
        (0..count).flat_map(|expert| projections.iter().map(move |projection| (expert, projection)));
    // The stack lies within the file, and its matrices are equal parts of it.
    let slices = matrices.enumerate().map(|(at, (expert, projection))| {
        part(entry, at, len, format!("{prefix}experts.{expert}.{projection}.weight"), shape.clone())
    });
    Ok(slices.collect())
}

/// Splits the stack of the biases of all experts into a tensor for each.
fn expert_biases(
    entry: &Entry,
    prefix: &str,
    projection: &str,
    expected: Option<u64>,
) -> Result<Vec<(TensorInfo, Place)>, Fault> {
    let field = format!("tensor {:?}: dimensions", entry.name);
    let [count, width] = *entry.shape else {
        return Err(Fault::new(field, format!("{:?}; expected [experts, out]", entry.shape)));
    };
    check_count(&field, count, expected)?;
    let len = entry.encoding.data_bytes(&[width]).map_err(|reason| Fault::new(&field, reason))?;
    if len < MIN_EXPERT {
        return Err(Fault::new(field, format!("biases of {len} bytes; expected {MIN_EXPERT} or more")));
    }
    let slices = (0..count).map(|expert| {
        part(entry, expert, len, format!("{prefix}experts.{expert}.{projection}.bias"), vec![width])
    });
    Ok(slices.collect())
}

/// Refuses a stack that has not as many experts as the metadata says.
fn check_count(field: &str, count: usize, expected: Option<u64>) -> Result<(), Fault> {
    if count <= MAX_EXPERTS && expected == Some(count as u64) {
        return Ok(());
    }
    let expected = expected.unwrap_or(0);
    Err(Fault::new(field, format!("{count} experts, but the metadata's expert_count is {expected}")))
}

/// The tensor that is one of the equal parts of a stack, each of `len` bytes.
fn part(entry: &Entry, at: usize, len: usize, name: String, shape: Vec<usize>) -> (TensorInfo, Place) {
    let info = TensorInfo {
        segment: SegmentId::from_tensor_name(&name),
        name,
        shape,
        encoding: entry.encoding,
        bytes: len as u64,
    };
    (info, Place { data: Span { file: 0, start: entry.start + at * len, len }, scales: None })
}

/// More than half of any head's dimensions.
const MAX_FACTORS: usize = 65_536;

fn rope_factors(file: &[u8], entry: &Entry) -> Result<Vec<f32>, Fault> {
    let field = format!("tensor {:?}", entry.name);
    let [count] = *entry.shape else {
        return Err(Fault::new(field, format!("shape {:?}; expected a vector", entry.shape)));
    };
    if entry.encoding != Encoding::Plain(Dtype::F32) || count > MAX_FACTORS {
        return Err(Fault::new(
            field,
            format!("{count} elements of {}; expected up to {MAX_FACTORS} of F32", entry.encoding),
        ));
    }
    let bytes = &file[entry.start..entry.start + entry.len];
    let factors: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    if factors.iter().any(|factor| !factor.is_finite() || *factor <= 0.0) {
        return Err(Fault::new(field, "a factor is not a positive number"));
    }
    Ok(factors)
}

fn text(metadata: &Metadata) -> Result<TextAssets, Fault> {
    Ok(TextAssets {
        tokenizer: vocabulary::vocabulary(metadata)?.map(TokenizerSource::Gguf),
        chat_template: metadata.text("tokenizer.chat_template")?.map(str::to_owned),
        tools_template: metadata.text("tokenizer.chat_template.tool_use")?.map(str::to_owned),
        generation_config: sampling(metadata)?,
        ..TextAssets::default()
    })
}

/// Names of recommended numbers, and those that `generation_config.json` has for them.
const SAMPLING: [(&str, &str); 4] = [
    ("temp", "temperature"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("penalty_repeat", "repetition_penalty"),
];

/// The sampling that the file recommends, as `generation_config.json` would.
fn sampling(metadata: &Metadata) -> Result<Option<serde_json::Value>, Fault> {
    let mut said = serde_json::Map::new();
    for (name, usual) in SAMPLING {
        let number = metadata.float(&format!("general.sampling.{name}"))?;
        said.extend(number.map(|number| (usual.into(), keys::tidy(number).into())));
    }
    // Negative for all.
    let top_k = metadata.float("general.sampling.top_k")?;
    said.extend(top_k.map(|top_k| ("top_k".into(), (top_k.max(0.0) as u64).into())));
    if said.is_empty() {
        return Ok(None);
    }
    said.insert("do_sample".into(), true.into());
    Ok(Some(said.into()))
}
