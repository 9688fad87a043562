//! `firebox inspect`

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use clap::Args;
use firebox_model::config::DecoderConfig;
use firebox_model::{Architecture, EncoderConfig, MatrixUse};
use firebox_runtime::{Device, device, parse_bytes};
use firebox_store::{Checkpoint, SegmentId, SourceKind, TensorInfo, TokenizerSource};
use firebox_text::{ChatTemplate, TextError, Tokenizer};
use serde::Serialize;
use serde_json::Value;

use crate::columns::table;
use crate::compute::{CacheType, DeviceArgs};
use crate::console::{Console, Style, grouped, human_bytes};
use crate::fitting::PlanMode;
use crate::layers::{LayerRun, layer_runs, rope};
use crate::outcome::Outcome;
use crate::plan::Wanted;
use crate::{hub, plan};

/// As much of a chat template as tells one family from another.
const TEMPLATE_LINES: usize = 4;
const TEMPLATE_COLUMNS: usize = 90;

/// Options of `firebox inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// The model
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Also measure what to keep of it in so much memory, such as 800M or 1.5G, and say why
    #[arg(short, long, value_name = "SIZE", value_parser = parse_bytes)]
    memory: Option<u64>,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// A format's name, as manifests spell it.
pub fn source_name(source: SourceKind) -> &'static str {
    match source {
        SourceKind::HuggingFace => "huggingface",
        SourceKind::Gguf => "gguf",
        SourceKind::Bundle => "bundle",
    }
}

/// The contents of a model.
#[derive(Debug, Serialize)]
struct Contents {
    path: PathBuf,
    source: &'static str,
    family: Option<String>,
    /// Why it cannot be run, if it cannot.
    unsupported: Option<String>,
    parameters: u64,
    bytes: u64,
    encodings: BTreeMap<String, u64>,
    /// What becomes of the matrices of each format when the model is loaded.
    matrices: Vec<MatrixKind>,
    quantization: Option<String>,
    hash: Option<String>,
    shape: Option<Shape>,
    tokenizer: Option<TokenizerSummary>,
    chat_template: Option<TemplateSummary>,
    segments: Vec<SegmentSummary>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tensors: Vec<TensorSummary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    placement: Option<plan::Report>,
}

/// The matrices of one format.
#[derive(Debug, Serialize)]
struct MatrixKind {
    encoding: String,
    #[serde(rename = "use")]
    used: &'static str,
    tensors: usize,
    bytes: u64,
    /// Bytes in memory once they are loaded; none if they have to be imported first.
    loaded_bytes: Option<u64>,
}

/// Of the network.
#[derive(Debug, Serialize)]
struct Shape {
    kind: &'static str,
    context: usize,
    vocabulary: usize,
    hidden_size: usize,
    layers: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    tied_embeddings: Option<bool>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ropes: Vec<String>,
    layer_runs: Vec<LayerRun>,
    #[serde(skip_serializing_if = "Option::is_none")]
    encoder: Option<EncoderConfig>,
}

#[derive(Debug, Serialize)]
struct TokenizerSummary {
    kind: String,
    vocabulary: usize,
    bos: Option<u32>,
    eos: Vec<u32>,
    adds_bos: bool,
    error: Option<String>,
}

#[derive(Debug, Serialize)]
struct TemplateSummary {
    lines: usize,
    source: String,
    error: Option<String>,
}

#[derive(Debug, Serialize)]
struct SegmentSummary {
    id: String,
    tensors: usize,
    bytes: u64,
    encodings: Vec<String>,
    files: Vec<PathBuf>,
    hash: Option<String>,
}

#[derive(Debug, Serialize)]
struct TensorSummary {
    name: String,
    shape: Vec<usize>,
    encoding: String,
    segment: String,
    bytes: u64,
}

/// Shows what is in a model, without reading its weights unless their placement is asked for.
pub fn inspect(args: &InspectArgs, console: &Console) -> anyhow::Result<Outcome> {
    let checkpoint = Checkpoint::open_listing(hub::resolve(&args.model)?)?;
    let device = device(&args.device.device)?;
    let mut contents = Contents::of(&checkpoint, &device, args.tensors);
    if let Some(memory) = args.memory {
        let wanted = Wanted {
            memory,
            mode: PlanMode::default().into(),
            context: 0,
            cache_type: CacheType::default(),
            profile: None,
            device: &args.device,
        };
        contents.placement = Some(plan::Report::of(&checkpoint, args.model.clone(), &wanted)?);
    }
    if args.json {
        console.json(&contents)?
    } else {
        console.line(contents.readable(console))?
    }
    Ok(Outcome::Done)
}

impl Contents {
    fn of(checkpoint: &Checkpoint, device: &Device, with_tensors: bool) -> Self {
        let architecture = Architecture::from_json(checkpoint.config());
        let mut encodings = BTreeMap::new();
        let mut parameters = 0;
        for tensor in checkpoint.tensors() {
            *encodings.entry(stored_as(checkpoint, tensor)).or_default() += tensor.bytes;
            parameters += elements(tensor);
        }
        let family = match &architecture {
            Ok(Architecture::Decoder(config)) => Some(config.family.to_owned()),
            _ => checkpoint.config().get("model_type").and_then(Value::as_str).map(str::to_owned),
        };
        let tokenizer = tokenizer(checkpoint);
        Self {
            path: checkpoint.path().to_owned(),
            source: source_name(checkpoint.source()),
            family,
            unsupported: architecture.as_ref().err().map(ToString::to_string),
            parameters,
            bytes: checkpoint.tensors().map(|tensor| tensor.bytes).sum(),
            encodings,
            matrices: matrices(checkpoint, device),
            quantization: checkpoint.quantization().map(|scheme| scheme.to_string()),
            hash: checkpoint.hash(),
            shape: architecture.ok().map(Shape::of),
            chat_template: template(checkpoint, tokenizer.as_ref().and_then(|(found, _)| found.as_ref())),
            tokenizer: tokenizer.map(|(_, summary)| summary),
            segments: segments(checkpoint),
            tensors: if with_tensors { tensors(checkpoint) } else { Vec::new() },
            placement: None,
        }
    }

    fn readable(&self, console: &Console) -> String {
        let mut facts = Vec::new();
        let mut fact = |name: &str, value: String| {
            facts.push([name.to_owned(), value]);
        };
        fact("model", self.path.display().to_string());
        fact("format", self.source.to_owned());
        fact("family", self.family.clone().unwrap_or_else(|| "not named".into()));
        if let Some(reason) = &self.unsupported {
            fact("cannot be run", reason.clone());
        }
        fact("parameters", format!("{} ({})", short(self.parameters), grouped(self.parameters)));
        fact("size", human_bytes(self.bytes));
        fact("stored as", shares(&self.encodings, self.bytes));
        for kind in &self.matrices {
            let size = |bytes: u64| format!(" of {}", human_bytes(bytes));
            let loaded =
                kind.loaded_bytes.filter(|loaded| *loaded != kind.bytes).map(size).unwrap_or_default();
            fact("matrices", format!("{} in {}: {}{loaded}", kind.tensors, kind.encoding, kind.used));
        }
        if let Some(quantization) = &self.quantization {
            fact("quantization", quantization.clone());
        }
        if let Some(shape) = &self.shape {
            fact("kind", shape.kind.into());
            fact("context", format!("{} tokens", grouped(shape.context as u64)));
            fact(
                "vocabulary",
                match shape.tied_embeddings {
                    Some(true) => {
                        format!("{} rows, embedding and unembedding tied", grouped(shape.vocabulary as u64))
                    }
                    _ => format!("{} rows", grouped(shape.vocabulary as u64)),
                },
            );
            fact("hidden size", shape.hidden_size.to_string());
            fact("layers", shape.layers.to_string());
            for (index, rope) in shape.ropes.iter().enumerate() {
                fact(&format!("rope {index}"), rope.clone());
            }
        }
        fact("tokenizer", self.tokenizer.as_ref().map_or_else(|| "none".into(), TokenizerSummary::readable));
        fact(
            "chat template",
            self.chat_template.as_ref().map_or_else(|| "none".into(), TemplateSummary::readable),
        );
        if let Some(hash) = &self.hash {
            fact("hash", hash.clone());
        }
        let mut parts = vec![table(None, &[], facts)];
        if let Some(shape) = self.shape.as_ref().filter(|shape| !shape.layer_runs.is_empty()) {
            parts.push(console.styled(Style::Strong, "Layers"));
            parts.push(layers_table(&shape.layer_runs));
        }
        parts.push(console.styled(Style::Strong, "Segments"));
        parts.push(segments_table(&self.segments));
        if let Some(placement) = &self.placement {
            parts.push(console.styled(Style::Strong, "Placement"));
            parts.push(table(None, &[], placement.choice()));
        }
        if !self.tensors.is_empty() {
            parts.push(console.styled(Style::Strong, "Tensors"));
            parts.push(tensors_table(&self.tensors));
        }
        parts.join("\n\n")
    }
}

impl Shape {
    fn of(architecture: Architecture) -> Self {
        match architecture {
            Architecture::Decoder(config) => Self::of_decoder(&config),
            Architecture::Encoder(config) => Self {
                kind: "sentence encoder",
                context: config.max_positions,
                vocabulary: config.vocab_size,
                hidden_size: config.hidden_size,
                layers: config.blocks.len(),
                tied_embeddings: None,
                ropes: config.ropes.iter().map(rope).collect(),
                layer_runs: layer_runs(&config.blocks),
                encoder: Some(config),
            },
        }
    }

    fn of_decoder(config: &DecoderConfig) -> Self {
        Self {
            kind: "decoder",
            context: config.max_positions,
            vocabulary: config.vocab_size,
            hidden_size: config.hidden_size,
            layers: config.blocks.len(),
            tied_embeddings: Some(config.tied_embeddings),
            ropes: config.ropes.iter().map(rope).collect(),
            layer_runs: layer_runs(&config.blocks),
            encoder: None,
        }
    }
}

impl TokenizerSummary {
    fn readable(&self) -> String {
        if let Some(error) = &self.error {
            return format!("{}, not usable: {error}", self.kind);
        }
        let begins = match self.bos {
            Some(bos) if self.adds_bos => format!("begins every text with {bos}"),
            Some(bos) => format!("begin token {bos}, not added"),
            None => "no begin token".into(),
        };
        format!("{}, {} tokens, {begins}, ends at {:?}", self.kind, grouped(self.vocabulary as u64), self.eos)
    }
}

impl TemplateSummary {
    fn readable(&self) -> String {
        let mut text = format!("{} lines, {} characters", self.lines, self.source.chars().count());
        if let Some(error) = &self.error {
            text.push_str(&format!(", not usable: {error}"));
        }
        for line in self.source.lines().take(TEMPLATE_LINES) {
            let shown: String =
                line.chars().take(TEMPLATE_COLUMNS).map(|c| if c.is_control() { ' ' } else { c }).collect();
            let rest = if line.chars().count() > TEMPLATE_COLUMNS { "…" } else { "" };
            text.push_str(&format!("\n  {shown}{rest}"));
        }
        text
    }
}

fn tokenizer(checkpoint: &Checkpoint) -> Option<(Option<Tokenizer>, TokenizerSummary)> {
    let assets = checkpoint.text();
    let kind = match assets.tokenizer.as_ref()? {
        TokenizerSource::Json(bytes) => {
            let parsed: Option<Value> = serde_json::from_slice(bytes).ok();
            let model = parsed.as_ref().and_then(|json| json.get("model")?.get("type")?.as_str());
            format!("tokenizer.json, {}", model.unwrap_or("unknown kind"))
        }
        TokenizerSource::Gguf(vocabulary) => {
            let pre = vocabulary.pre.as_ref().map(|pre| format!(", pre-tokenizer {pre}")).unwrap_or_default();
            format!("GGUF vocabulary, {}{pre}", vocabulary.model)
        }
    };
    match Tokenizer::new(assets, checkpoint.config()) {
        Ok(tokenizer) => {
            let summary = TokenizerSummary {
                kind,
                vocabulary: tokenizer.vocab_size(),
                bos: tokenizer.bos_id(),
                eos: tokenizer.eos_ids().to_vec(),
                adds_bos: tokenizer.adds_bos(),
                error: None,
            };
            Some((Some(tokenizer), summary))
        }
        Err(error) => {
            let error = Some(error.to_string());
            let (vocabulary, bos, eos, adds_bos) = (0, None, Vec::new(), false);
            Some((None, TokenizerSummary { kind, vocabulary, bos, eos, adds_bos, error }))
        }
    }
}

fn template(checkpoint: &Checkpoint, tokenizer: Option<&Tokenizer>) -> Option<TemplateSummary> {
    let summary = |source: &str, error: Option<String>| TemplateSummary {
        lines: source.lines().count(),
        source: source.to_owned(),
        error,
    };
    let written = checkpoint.text().chat_template.as_deref();
    let Some(tokenizer) = tokenizer else { return written.map(|source| summary(source, None)) };
    match ChatTemplate::new(checkpoint.text(), tokenizer) {
        Ok(template) => Some(summary(template.source(), None)),
        Err(TextError::MissingChatTemplate) => None,
        Err(error) => Some(summary(written.unwrap_or_default(), Some(error.to_string()))),
    }
}

fn segments(checkpoint: &Checkpoint) -> Vec<SegmentSummary> {
    let encodings = |names: &[String]| {
        let infos = names.iter().filter_map(|name| checkpoint.info(name));
        let distinct: BTreeSet<String> = infos.map(|info| stored_as(checkpoint, info)).collect();
        distinct.into_iter().collect()
    };
    let of_segment = checkpoint.segments().into_iter().map(|segment| SegmentSummary {
        id: segment.id.to_string(),
        tensors: segment.tensors.len(),
        bytes: segment.bytes,
        encodings: encodings(&segment.tensors),
        files: segment.files,
        hash: segment.hash,
    });
    of_segment.collect()
}

/// The name of a tensor's format.
fn stored_as(checkpoint: &Checkpoint, info: &TensorInfo) -> String {
    checkpoint.packed_as(&info.name).map_or_else(|| info.encoding.to_string(), str::to_owned)
}

fn matrices(checkpoint: &Checkpoint, device: &Device) -> Vec<MatrixKind> {
    let mut kinds: BTreeMap<String, MatrixKind> = BTreeMap::new();
    // Tables are not multiplied, and not loaded.
    let is_matrix = |info: &&TensorInfo| info.shape.len() > 1 && info.segment != SegmentId::Rows;
    for info in checkpoint.tensors().filter(is_matrix) {
        let inputs = info.shape.last().copied().unwrap_or_default();
        let (used, loaded) = match MatrixUse::of(info.encoding, inputs, device) {
            _ if checkpoint.packed_as(&info.name).is_some() => {
                ("to be unpacked by `firebox import` first", None)
            }
            MatrixUse::InPlace => ("multiplied where they lie", Some(info.bytes)),
            MatrixUse::Unpacked => {
                ("unpacked on load, to f32", Some(elements(info).saturating_mul(size_of::<f32>() as u64)))
            }
        };
        let encoding = stored_as(checkpoint, info);
        let kind = kinds.entry(encoding.clone()).or_insert(MatrixKind {
            encoding,
            used,
            tensors: 0,
            bytes: 0,
            loaded_bytes: loaded.map(|_| 0),
        });
        kind.tensors += 1;
        kind.bytes += info.bytes;
        kind.loaded_bytes = kind.loaded_bytes.zip(loaded).map(|(sum, loaded)| sum + loaded);
    }
    kinds.into_values().collect()
}

fn tensors(checkpoint: &Checkpoint) -> Vec<TensorSummary> {
    let summary = |info: &TensorInfo| TensorSummary {
        name: info.name.clone(),
        shape: info.shape.clone(),
        encoding: stored_as(checkpoint, info),
        segment: info.segment.to_string(),
        bytes: info.bytes,
    };
    checkpoint.tensors().map(summary).collect()
}

/// Numbers in a tensor. A count that overflows has been refused when the model was opened.
fn elements(tensor: &TensorInfo) -> u64 {
    tensor.shape.iter().fold(1u64, |count, &size| count.saturating_mul(size as u64))
}

fn layers_table(runs: &[LayerRun]) -> String {
    let header = ["layers", "mixer", "heads", "kv", "width", "window", "rope", "feed-forward"];
    let optional = |value: Option<usize>| value.map_or_else(|| "–".into(), |value| value.to_string());
    let row = |LayerRun { first, last, layer }: &LayerRun| {
        [
            if first == last { first.to_string() } else { format!("{first}–{last}") },
            layer.mixer.clone(),
            layer.heads.to_string(),
            layer.kv_heads.to_string(),
            layer.head_dim.to_string(),
            optional(layer.window),
            optional(layer.rope),
            layer.feed_forward.clone(),
        ]
    };
    table(Some(header), &[2, 3, 4, 5, 6], runs.iter().map(row))
}

fn segments_table(segments: &[SegmentSummary]) -> String {
    let header = ["segment", "tensors", "size", "stored as", "file", "hash"];
    let row = |segment: &SegmentSummary| {
        let names = segment.files.iter().filter_map(|file| file.file_name()?.to_str());
        [
            segment.id.clone(),
            segment.tensors.to_string(),
            human_bytes(segment.bytes),
            segment.encodings.join(", "),
            names.collect::<Vec<_>>().join(", "),
            segment.hash.as_deref().map_or("–", |hash| hash.get(..16).unwrap_or(hash)).to_owned(),
        ]
    };
    table(Some(header), &[1, 2], segments.iter().map(row))
}

fn tensors_table(tensors: &[TensorSummary]) -> String {
    let header = ["tensor", "shape", "stored as", "segment", "size"];
    let row = |tensor: &TensorSummary| {
        [
            tensor.name.clone(),
            tensor.shape.iter().map(ToString::to_string).collect::<Vec<_>>().join(" × "),
            tensor.encoding.clone(),
            tensor.segment.clone(),
            human_bytes(tensor.bytes),
        ]
    };
    table(Some(header), &[4], tensors.iter().map(row))
}

fn shares(encodings: &BTreeMap<String, u64>, total: u64) -> String {
    let mut by_size: Vec<_> = encodings.iter().collect();
    by_size.sort_by_key(|(_, bytes)| std::cmp::Reverse(**bytes));
    let share = |bytes: u64| 100.0 * bytes as f64 / total.max(1) as f64;
    by_size
        .iter()
        .map(|(name, bytes)| format!("{name} {:.1} %", share(**bytes)))
        .collect::<Vec<_>>()
        .join(", ")
}

/// A number of parameters as people speak of it.
fn short(count: u64) -> String {
    match count {
        0..1_000_000 => format!("{:.1} K", count as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} M", count as f64 / 1e6),
        _ => format!("{:.2} B", count as f64 / 1e9),
    }
}
