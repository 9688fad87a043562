//! Export of any checkpoint as a directory in the layout of the Hugging Face hub, with all weights in one file.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use crate::checkpoint::Checkpoint;
use crate::encoding::{Dtype, Encoding};
use crate::error::{Fault, StoreError};
use crate::export_report::ExportReport;
use crate::folder::{Folder, MAX_JSON, MAX_TOKENIZER};
use crate::gguf::plan::is_rotated;
use crate::import::{COPIED_FILES, remove_packing, write_below, write_json};
use crate::partial::PartialFolder;
use crate::parts::SourceKind;
use crate::progress::Progress;
use crate::safetensors_writer::{FileLayout, TensorWriter};
use crate::tensor_index::TensorInfo;
use crate::tensor_rows::{Conversion, RowOrder, TensorRows};
use crate::text::{CHAT_TEMPLATE, GENERATION_CONFIG, GGUF_VOCABULARY, TOOLS_TEMPLATE};
use crate::{expert_stacks, own_names};

/// The files of a tokenizer that was made from a GGUF vocabulary.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenizerFiles {
    /// `tokenizer.json`.
    pub tokenizer: Value,
    /// `tokenizer_config.json`.
    pub config: Value,
    /// Ids that end an answer, for `generation_config.json`.
    pub ends: Vec<u32>,
}

/// Writes the new directory `destination`. Floats stay as they are stored, and quantized tensors become `dtype`.
/// `tokenizer` is written for a checkpoint whose tokenizer is a GGUF vocabulary.
pub fn export_safetensors(
    checkpoint: &Checkpoint,
    destination: &Path,
    dtype: Dtype,
    tokenizer: Option<&TokenizerFiles>,
    progress: &mut dyn FnMut(Progress),
) -> Result<ExportReport, StoreError> {
    let in_file = |fault: Fault| fault.in_file(checkpoint.path());
    check_names(checkpoint).map_err(in_file)?;
    let (config, changes) = configuration(checkpoint).map_err(in_file)?;
    let mut tensors: Vec<(&TensorInfo, Conversion)> =
        checkpoint.tensors().map(|info| (info, changes.of(checkpoint, info, dtype))).collect();
    if tensors.is_empty() {
        let reason = "a vocabulary without weights; export the model's own file".to_owned();
        return Err(StoreError::NotAModel { path: checkpoint.path().to_owned(), reason });
    }
    // The widest first, so that every element is aligned without padding, which other engines would take for weights.
    tensors.sort_by_key(|(_, conversion)| std::cmp::Reverse(conversion.encoding.align()));
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let mut layout = FileLayout::new("").with_metadata(&metadata).without_padding();
    for (info, conversion) in &tensors {
        layout
            .push_encoded(&info.name, &info.shape, conversion.encoding)
            .map_err(|reason| StoreError::Decode { tensor: info.name.clone(), reason })?;
    }
    let partial = PartialFolder::create(destination)?;
    let mut writer = TensorWriter::create(&partial.path.join("model.safetensors"), layout)?;
    let total: u64 = checkpoint.tensors().map(|info| info.bytes).sum();
    let mut done = 0;
    for (info, conversion) in &tensors {
        writer.next_tensor()?;
        TensorRows::new(checkpoint, &info.name, *conversion)?.for_each_part(|bytes, stored| {
            writer.write(bytes)?;
            done += stored;
            progress(Progress { item: info.name.clone(), done, total });
            Ok(())
        })?;
    }
    let (bytes_written, _) = writer.finish()?;
    write_config(checkpoint, &config, &partial.path)?;
    write_text(checkpoint, tokenizer, &partial.path)?;
    partial.publish(destination)?;
    Ok(ExportReport {
        path: destination.to_owned(),
        tensors: tensors.len(),
        unpacked: tensors.iter().filter(|(info, _)| !matches!(info.encoding, Encoding::Plain(_))).count(),
        bytes_read: done,
        bytes_written,
        notes: Vec::new(),
    })
}

/// Refuses families whose tensors other engines know by other names.
fn check_names(checkpoint: &Checkpoint) -> Result<(), Fault> {
    let config = checkpoint.config();
    let own = own_names::has_own(config);
    let stacked = expert_stacks::is_published_stacked(config)
        && checkpoint.tensors().any(|info| info.name.contains(".experts."));
    if !own && !stacked {
        return Ok(());
    }
    let family = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let reason = if own { "tensors with names of its own" } else { "experts in stacks" };
    Err(Fault::unsupported(
        "model_type",
        format!(
            "{family} is published with {reason}, which this version cannot write; use the published directory"
        ),
    ))
}

/// What is changed back in the weights of a GGUF file.
#[derive(Debug, Clone, Copy, Default)]
struct Changes {
    /// Rows of a head whose pairs are neighbours.
    interleaved_head: Option<usize>,
    /// A number that the converter added to the weights of norms.
    norm_offset: f32,
}

impl Changes {
    fn of(self, checkpoint: &Checkpoint, info: &TensorInfo, dtype: Dtype) -> Conversion {
        let stored = checkpoint.packed(&info.name).map_or(info.encoding, |packed| packed.encoding());
        let encoding = match stored {
            Encoding::Plain(_) => stored,
            _ => Encoding::Plain(dtype),
        };
        let order = match self.interleaved_head {
            Some(head) if is_rotated(&info.name) => RowOrder::Halved { head },
            _ => RowOrder::Stored,
        };
        let added = if info.name.ends_with("norm.weight") { -self.norm_offset } else { 0.0 };
        Conversion { encoding, order, added }
    }
}

/// Returns the configuration as Hugging Face has it, and what is to be changed in the weights for it.
fn configuration(checkpoint: &Checkpoint) -> Result<(Value, Changes), Fault> {
    let (mut config, mut changes) = (checkpoint.config().clone(), Changes::default());
    remove_packing(&mut config);
    let Some(Value::Object(conventions)) = config.as_object_mut().and_then(|config| config.remove("firebox"))
    else {
        return Ok((config, changes));
    };
    for (name, value) in conventions {
        match name.as_str() {
            "source" => {}
            "rope_interleaved" if value == true => {
                let head = config.get("head_dim").and_then(Value::as_u64);
                changes.interleaved_head = head.map(|head| head as usize);
            }
            // Zero, where the family's own offset is one.
            "norm_weight_offset" if value == 0.0 => changes.norm_offset = 1.0,
            _ => {
                let reason = format!(
                    "{value}, as a GGUF file has the weights, which this version cannot turn back; use the published directory"
                );
                return Err(Fault::unsupported(format!("firebox.{name}"), reason));
            }
        }
    }
    let theta = |parameters: &Value| parameters.get("rope_theta").and_then(Value::as_f64);
    let width = config.get("head_dim").and_then(Value::as_u64).unwrap_or(0) as usize;
    if let Some(parameters) = config.get_mut("rope_parameters")
        && parameters.get("rope_type").is_some_and(|kind| kind == "firebox_factors")
    {
        let factors = parameters.get("factors").and_then(Value::as_array);
        let factors: Vec<f64> = factors.into_iter().flatten().filter_map(Value::as_f64).collect();
        let found = theta(parameters).and_then(|theta| llama3(&factors, theta, width));
        *parameters = found.ok_or_else(|| {
            let reason = "divisors of frequencies that are not those of llama3; use the published directory";
            Fault::unsupported("rope_parameters", reason)
        })?;
    }
    Ok((config, changes))
}

/// The bounds of the wavelengths between which divisors grow, as parts of the trained length, in every published model.
const LOW: f64 = 1.0;
const HIGH: f64 = 4.0;

/// Returns the parameters that these divisors of frequencies result from.
fn llama3(factors: &[f64], theta: f64, width: usize) -> Option<Value> {
    let factor = factors.iter().copied().fold(1.0, f64::max);
    let divisor = |pair: usize, original: f64| {
        let wavelength = std::f64::consts::TAU * theta.powf(2.0 * pair as f64 / width as f64);
        let share = ((original / wavelength - LOW) / (HIGH - LOW)).clamp(0.0, 1.0);
        ((1.0 - share) / factor + share).recip()
    };
    let fits = |original: &u64| {
        let is_near =
            |(pair, found): (usize, &f64)| (divisor(pair, *original as f64) / found - 1.0).abs() < 1e-4;
        factors.iter().enumerate().all(is_near)
    };
    let original = (5..=20).map(|power| 1u64 << power).find(fits)?;
    (factors.len() * 2 == width).then(|| {
        json!({
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": LOW,
            "high_freq_factor": HIGH,
            "original_max_position_embeddings": original,
        })
    })
}

/// Writes `config.json`, unchanged if it says what the weights are.
fn write_config(checkpoint: &Checkpoint, config: &Value, folder: &Path) -> Result<(), StoreError> {
    if checkpoint.source() != SourceKind::Gguf
        && config == checkpoint.config()
        && let Some(bytes) = Folder::open(checkpoint.path())?.read("config.json", MAX_JSON)?
    {
        return write_below(folder, "config.json", &bytes);
    }
    write_json(&folder.join("config.json"), config)
}

fn write_text(
    checkpoint: &Checkpoint,
    tokenizer: Option<&TokenizerFiles>,
    folder: &Path,
) -> Result<(), StoreError> {
    let text = checkpoint.text();
    let mut generation = text.generation_config.clone();
    if let Some(TokenizerFiles { tokenizer, config, ends }) = tokenizer {
        write_json(&folder.join("tokenizer.json"), tokenizer)?;
        write_json(&folder.join("tokenizer_config.json"), config)?;
        let recommended = generation.get_or_insert_with(|| json!({}));
        if recommended.get("eos_token_id").is_none() && !ends.is_empty() {
            recommended["eos_token_id"] = json!(ends);
        }
    }
    let of_gguf = checkpoint.source() == SourceKind::Gguf;
    if !of_gguf {
        let source = Folder::open(checkpoint.path())?;
        let made = |name: &str| name == GGUF_VOCABULARY || tokenizer.is_some() && name == GENERATION_CONFIG;
        for name in COPIED_FILES.into_iter().filter(|name| !made(name)) {
            let Some(bytes) = source.read(name, MAX_TOKENIZER)? else { continue };
            write_below(folder, name, &bytes)?;
        }
    }
    if let Some(recommended) = generation.filter(|_| of_gguf || tokenizer.is_some()) {
        write_json(&folder.join(GENERATION_CONFIG), &recommended)?;
    }
    if of_gguf {
        for (name, template) in [(CHAT_TEMPLATE, &text.chat_template), (TOOLS_TEMPLATE, &text.tools_template)]
        {
            template.as_ref().map_or(Ok(()), |template| write_below(folder, name, template.as_bytes()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_of_llama3_are_found_by_their_divisors() {
        let (theta, width) = (500_000.0, 128);
        let factors: Vec<f64> = (0..64)
            .map(|pair| {
                let wavelength = std::f64::consts::TAU * f64::powf(theta, f64::from(pair) / 64.0);
                let share = ((8192.0 / wavelength - 1.0) / 3.0).clamp(0.0, 1.0);
                f64::from((1.0 / ((1.0 - share) / 32.0 + share)) as f32)
            })
            .collect();
        let found = llama3(&factors, theta, width).unwrap();
        assert_eq!(found["factor"], 32.0);
        assert_eq!(found["original_max_position_embeddings"], 8192);
        let other: Vec<f64> = factors.iter().enumerate().map(|(at, f)| f + at as f64 * 0.1).collect();
        assert_eq!(llama3(&other, theta, width), None);
    }
}
