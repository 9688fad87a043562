//! A GGUF file to be written from a checkpoint: names, metadata, and what becomes of the weights.
//!
//! Names come from the tables that the reader has, and what has to be done to the weights from the configuration that the
//! reader derives from the metadata: what it says that the converter changed is changed here.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;

use serde_json::Value as Json;

use super::family::Family;
use super::keys::Keys;
use super::metadata::{List, Metadata, Value};
use super::vocabulary::{self, GgufVocabulary};
use super::writer::{ALIGNMENT, head};
use super::{Entry, Model, SAMPLING, names};
use crate::checkpoint::Checkpoint;
use crate::encoding::{Dtype, Encoding};
use crate::error::{Fault, StoreError};
use crate::export_report::ExportReport;
use crate::partial::PartialFile;
use crate::progress::Progress;
use crate::tensor_index::TensorInfo;
use crate::tensor_rows::{Conversion, RowOrder, TensorRows, holding, lossless_block};

/// What GGUF says of a network beside its tensors.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufDescription {
    /// `general.architecture`.
    pub architecture: &'static str,
    /// Metadata of the architecture, whose name is left out of the keys.
    pub keys: Vec<(&'static str, Value)>,
    /// Divisors of rotary frequencies, with the names of their tensors.
    pub factors: Vec<(&'static str, Vec<f32>)>,
    /// Whether the unembedding is the embedding.
    pub tied: bool,
    /// What readers other than Firebox are known to make something else of.
    pub notes: Vec<String>,
}

/// A tensor to be written. Its entry's `start` counts from the beginning of the data.
#[derive(Debug)]
struct Planned {
    /// Its name in the checkpoint, or those of the experts that it is a stack of; none for frequency factors.
    sources: Vec<String>,
    entry: Entry,
    conversion: Conversion,
}

impl Planned {
    /// Plans a tensor of a checkpoint, or a stack of equal ones. `rounded` gets the names of those that lose something.
    fn new<'a>(
        checkpoint: &Checkpoint,
        name: String,
        infos: &[&'a TensorInfo],
        rounded: &mut Vec<&'a str>,
    ) -> Result<Self, Fault> {
        let info = infos[0];
        let stored = checkpoint.packed(&info.name).map_or(info.encoding, |packed| packed.encoding());
        // What chooses experts is F32 in every file.
        let encoding = match name.ends_with(".ffn_gate_inp.weight") {
            true => Encoding::Plain(Dtype::F32),
            false => target(info, stored),
        };
        if matches!((stored, encoding), (Encoding::Grouped(_), Encoding::Plain(Dtype::F16))) {
            rounded.extend(infos.iter().map(|info| info.name.as_str()));
        }
        let mut shape = info.shape.clone();
        if name.ends_with("_exps.weight") {
            shape.insert(0, infos.len());
        }
        let len = encoding
            .data_bytes(&shape)
            .map_err(|reason| Fault::new(format!("tensor {:?}: shape", info.name), reason))?;
        let entry = Entry { name, shape, encoding, start: 0, len };
        let sources = infos.iter().map(|info| info.name.clone()).collect();
        Ok(Self { sources, entry, conversion: Conversion::none(encoding) })
    }
}

/// A GGUF file to be written.
pub struct GgufPlan<'a> {
    checkpoint: &'a Checkpoint,
    metadata: Metadata,
    tensors: Vec<Planned>,
    /// The bytes of all frequency factors.
    factors: Vec<u8>,
    /// What the reader makes of it.
    model: Model,
    notes: Vec<String>,
}

impl std::fmt::Debug for GgufPlan<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GgufPlan").field("tensors", &self.tensors.len()).field("notes", &self.notes).finish()
    }
}

impl<'a> GgufPlan<'a> {
    /// Plans the file of a checkpoint that is described so. Writes nothing.
    pub fn new(
        checkpoint: &'a Checkpoint,
        description: &GgufDescription,
        vocabulary: Option<&GgufVocabulary>,
    ) -> Result<Self, StoreError> {
        Self::planned(checkpoint, description, vocabulary)
            .map_err(|fault| fault.in_file(checkpoint.path()))?
            .arranged()
    }

    fn planned(
        checkpoint: &'a Checkpoint,
        description: &GgufDescription,
        vocabulary: Option<&GgufVocabulary>,
    ) -> Result<Self, Fault> {
        let architecture = description.architecture;
        let metadata = metadata(checkpoint, description, vocabulary)?;
        let family = Family::of(architecture)?;
        let layers = Keys { metadata: &metadata, architecture }.layers()?;
        let (mut tensors, mut factors, mut rounded) = (Vec::new(), Vec::new(), Vec::new());
        for (name, divisors) in &description.factors {
            let encoding = Encoding::Plain(Dtype::F32);
            let (start, len) = (factors.len(), divisors.len() * size_of::<f32>());
            factors.extend(divisors.iter().flat_map(|divisor| divisor.to_le_bytes()));
            let entry = Entry { name: (*name).to_owned(), shape: vec![divisors.len()], encoding, start, len };
            tensors.push(Planned { sources: Vec::new(), entry, conversion: Conversion::none(encoding) });
        }
        let mut stacks: BTreeMap<String, BTreeMap<usize, &TensorInfo>> = BTreeMap::new();
        for info in checkpoint.tensors().filter(|info| !is_left_out(info, description.tied)) {
            if let Some((stack, expert)) = names::gguf_stack(family, layers, &info.name) {
                stacks.entry(stack).or_default().insert(expert, info);
                continue;
            }
            let name = names::gguf_name(family, layers, &info.name).ok_or_else(|| {
                let reason = format!(
                    "GGUF files of {architecture} have no name for it that is known; export the model with --safetensors"
                );
                Fault::unsupported(format!("tensor {:?}", info.name), reason)
            })?;
            tensors.push(Planned::new(checkpoint, name, &[info], &mut rounded)?);
        }
        for (name, experts) in stacks {
            let is_whole = experts.keys().copied().eq(0..experts.len());
            let all: Vec<&TensorInfo> = experts.into_values().collect();
            let form = |info: &&TensorInfo| (info.shape.clone(), info.encoding);
            if !is_whole || all.iter().any(|info| form(info) != form(&all[0])) {
                let reason = format!(
                    "{} matrices of experts are no stack; export the model with --safetensors",
                    all.len()
                );
                return Err(Fault::unsupported(format!("tensor {:?}", all[0].name), reason));
            }
            tensors.push(Planned::new(checkpoint, name, &all, &mut rounded)?);
        }
        let entries = tensors.iter().map(|tensor| (0, tensor.entry.clone())).collect();
        let model = Model::translate(&metadata, entries, &[&factors])?;
        let mut notes = description.notes.clone();
        if let Some(first) = rounded.first() {
            notes.push(format!(
                "{} quantized tensors have rows that are no whole blocks of 32 and are written as F16, rounded, such as \
                 {first}",
                rounded.len()
            ));
        }
        if vocabulary.is_none() {
            notes.push(
                "the model has no tokenizer, so the file has none, and other engines will not open it".into(),
            );
        }
        let mut plan = Self { checkpoint, metadata, tensors, factors, model, notes };
        plan.convert()?;
        Ok(plan)
    }

    /// Changes the weights where those of such files differ from the checkpoint's.
    fn convert(&mut self) -> Result<(), Fault> {
        let (wanted, given) = (conventions(&self.model.config), conventions(self.checkpoint.config()));
        let keys = wanted.into_iter().chain(given).flat_map(|conventions| conventions.keys());
        for key in keys.filter(|key| !["source", "pooling", ROPE, NORM].contains(&key.as_str())) {
            if wanted.and_then(|wanted| wanted.get(key)) != given.and_then(|given| given.get(key)) {
                let reason = "weights in another order than the checkpoint's, which this version cannot write; export the \
                              model with --safetensors";
                return Err(Fault::unsupported(format!("firebox.{key}"), reason));
            }
        }
        let flag = |of: Option<&serde_json::Map<String, Json>>| {
            of.and_then(|of| of.get(ROPE)).and_then(Json::as_bool).unwrap_or(false)
        };
        let head = self.model.config.get("head_dim").and_then(Json::as_u64).unwrap_or(0) as usize;
        let order = match (flag(wanted), flag(given)) {
            (true, false) => RowOrder::Interleaved { head },
            (false, true) => RowOrder::Halved { head },
            _ => RowOrder::Stored,
        };
        let offset = |of: Option<&serde_json::Map<String, Json>>| of.is_some_and(|of| of.contains_key(NORM));
        // Zero instead of the family's own one.
        let added = match (offset(wanted), offset(given)) {
            (true, false) => 1.0,
            (false, true) => -1.0,
            _ => 0.0,
        };
        for tensor in &mut self.tensors {
            for name in &tensor.sources {
                if is_rotated(name) {
                    tensor.conversion.order = order;
                }
                if name.ends_with("norm.weight") {
                    tensor.conversion.added = added;
                }
            }
        }
        Ok(())
    }

    /// Gives every tensor its place.
    fn arranged(mut self) -> Result<Self, StoreError> {
        let mut end = 0usize;
        for Planned { entry, .. } in &mut self.tensors {
            let overflow = || StoreError::Malformed {
                file: self.checkpoint.path().to_owned(),
                field: format!("tensor {:?}", entry.name),
                reason: "the file is larger than the address space".into(),
            };
            let start = end.checked_next_multiple_of(ALIGNMENT).ok_or_else(overflow)?;
            end = start.checked_add(entry.len).ok_or_else(overflow)?;
            entry.start = start;
        }
        Ok(self)
    }

    /// The configuration that a reader will derive from the file.
    pub fn config(&self) -> &Json {
        self.model.config()
    }

    /// Writes the file beside the destination, makes it durable, and renames it.
    pub fn write(
        mut self,
        destination: &Path,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<ExportReport, StoreError> {
        if destination.symlink_metadata().is_ok() {
            return Err(StoreError::DestinationExists { path: destination.to_owned() });
        }
        let entries: Vec<Entry> = self.tensors.iter().map(|tensor| tensor.entry.clone()).collect();
        let head = head(&self.metadata, &entries)
            .map_err(|reason| Fault::unsupported("header", reason).in_file(self.checkpoint.path()))?;
        let (partial, mut file) = PartialFile::create(destination)?;
        let path = partial.path.clone();
        let failed = |error| StoreError::io(&path, "write", error);
        file.write_all(&head).map_err(failed)?;
        let total: u64 =
            self.tensors.iter().flat_map(|tensor| self.infos(tensor)).map(|info| info.bytes).sum();
        let (mut at, mut done, mut unpacked) = (0, 0, 0);
        let mut factors = self.factors.as_slice();
        for tensor in &self.tensors {
            let Entry { start, len, .. } = tensor.entry;
            file.write_all(&vec![0; start - at]).map_err(failed)?;
            at = start + len;
            if tensor.sources.is_empty() {
                let (own, rest) = factors.split_at(len);
                file.write_all(own).map_err(failed)?;
                factors = rest;
                continue;
            }
            let mut written = 0;
            for info in self.infos(tensor) {
                let rows = TensorRows::new(self.checkpoint, &info.name, tensor.conversion)?;
                rows.for_each_part(|bytes, stored| {
                    file.write_all(bytes).map_err(failed)?;
                    written += bytes.len();
                    done += stored;
                    progress(Progress { item: info.name.clone(), done, total });
                    Ok(())
                })?;
                let is_float = |encoding| matches!(encoding, Encoding::Plain(_));
                unpacked += usize::from(!is_float(info.encoding) && is_float(tensor.conversion.encoding));
            }
            if written != len {
                let reason = format!("{written} bytes, planned were {len}");
                return Err(StoreError::Decode { tensor: tensor.entry.name.clone(), reason });
            }
        }
        // Readers of other programs count on the last tensor's padding.
        file.write_all(&vec![0; at.next_multiple_of(ALIGNMENT) - at]).map_err(failed)?;
        file.sync_all().map_err(|error| StoreError::io(&path, "make durable", error))?;
        drop(file);
        partial.publish()?;
        Ok(ExportReport {
            path: destination.to_owned(),
            tensors: self.tensors.len(),
            unpacked,
            bytes_read: done,
            bytes_written: at as u64,
            notes: std::mem::take(&mut self.notes),
        })
    }

    /// The tensors of the checkpoint that one is made of.
    fn infos<'t>(&self, tensor: &'t Planned) -> impl Iterator<Item = &'a TensorInfo> + use<'a, 't> {
        let checkpoint = self.checkpoint;
        tensor.sources.iter().filter_map(move |name| checkpoint.info(name))
    }
}

const ROPE: &str = "rope_interleaved";
const NORM: &str = "norm_weight_offset";

/// What a configuration says about the order and the values of weights.
fn conventions(config: &Json) -> Option<&serde_json::Map<String, Json>> {
    config.get("firebox").and_then(Json::as_object)
}

/// Whether the rows of a tensor are those of heads that rotate.
pub(crate) fn is_rotated(name: &str) -> bool {
    [".self_attn.q_proj.", ".self_attn.k_proj."].iter().any(|part| name.contains(part))
}

/// Whether a tensor is computed, or the same as another.
fn is_left_out(info: &TensorInfo, tied: bool) -> bool {
    info.name.ends_with(".rotary_emb.inv_freq") || tied && info.name == "lm_head.weight"
}

/// The format of a tensor in the file.
fn target(info: &TensorInfo, stored: Encoding) -> Encoding {
    match (stored, info.shape.as_slice()) {
        // What is added or multiplied element by element has to be F32.
        (_, [] | [_]) => Encoding::Plain(Dtype::F32),
        (Encoding::Plain(dtype), _) => Encoding::Plain(holding(dtype)),
        (Encoding::Grouped(quantization), [.., inputs]) => {
            lossless_block(quantization, *inputs).map_or(Encoding::Plain(Dtype::F16), Encoding::Block)
        }
        (Encoding::Block(_), _) => stored,
    }
}

fn metadata(
    checkpoint: &Checkpoint,
    description: &GgufDescription,
    vocabulary: Option<&GgufVocabulary>,
) -> Result<Metadata, Fault> {
    let mut metadata = Metadata::default();
    let mut insert = |key: &str, value: Value| metadata.insert(key.to_owned(), value);
    insert("general.architecture", Value::Text(description.architecture.to_owned()))?;
    insert("general.type", Value::Text("model".to_owned()))?;
    insert("general.quantization_version", Value::Unsigned(2))?;
    // Without a name: llama.cpp takes some names for promises about the vocabulary.
    for (key, value) in &description.keys {
        insert(&format!("{}.{key}", description.architecture), value.clone())?;
    }
    let text = checkpoint.text();
    if let Some(recommended) = &text.generation_config {
        for (name, usual) in SAMPLING {
            let number = recommended.get(usual).and_then(Json::as_f64);
            number
                .map_or(Ok(()), |number| insert(&format!("general.sampling.{name}"), Value::Float(number)))?;
        }
        let top_k = recommended.get("top_k").and_then(Json::as_i64);
        top_k.map_or(Ok(()), |top_k| insert("general.sampling.top_k", Value::Signed(top_k)))?;
    }
    let Some(vocabulary) = vocabulary else {
        for (role, key) in [("bos", "bos"), ("eos", "eos"), ("pad", "padding")] {
            let id = checkpoint.config().get(format!("{role}_token_id"));
            // The first, where there are several.
            let id = id.and_then(|id| id.as_u64().or_else(|| id.get(0)?.as_u64()));
            id.map_or(Ok(()), |id| insert(&format!("tokenizer.ggml.{key}_token_id"), Value::Unsigned(id)))?;
        }
        return Ok(metadata);
    };
    let rows = checkpoint
        .info("model.embed_tokens.weight")
        .and_then(|info| info.shape.first().copied())
        .unwrap_or(vocabulary.tokens.len());
    for (key, value) in vocabulary::keys(&vocabulary::padded(vocabulary, rows)?) {
        insert(&key, value)?;
    }
    if let Some(template) = &text.chat_template {
        insert("tokenizer.chat_template", Value::Text(template.clone()))?;
    }
    if let Some(template) = &text.tools_template {
        insert("tokenizer.chat_template.tool_use", Value::Text(template.clone()))?;
        insert("tokenizer.chat_templates", Value::List(List::Texts(vec!["tool_use".into()])))?;
    }
    Ok(metadata)
}
