//! Exports: models in the formats of other engines.

use std::path::Path;

use firebox_model::{check_gguf, gguf_description};
use firebox_store::{
    Checkpoint, Dtype, ExportReport, GgufPlan, Progress, TokenizerSource, export_safetensors,
};
use firebox_text::{gguf_vocabulary, tokenizer_files};

use crate::error::RuntimeError;

/// Writes a model as a directory in the layout of the Hugging Face hub. Floats stay as they are stored, and quantized
/// weights become `dtype`.
pub fn safetensors(
    source: &Path,
    destination: &Path,
    dtype: Dtype,
    progress: &mut dyn FnMut(Progress),
) -> Result<ExportReport, RuntimeError> {
    let checkpoint = Checkpoint::open_listing(source)?;
    let tokenizer = match &checkpoint.text().tokenizer {
        Some(TokenizerSource::Gguf(vocabulary)) => Some(tokenizer_files(vocabulary)?),
        _ => None,
    };
    Ok(export_safetensors(&checkpoint, destination, dtype, tokenizer.as_ref(), progress)?)
}

/// Writes a model as a GGUF file. Nothing is written unless the file means the same network.
pub fn gguf(
    source: &Path,
    destination: &Path,
    progress: &mut dyn FnMut(Progress),
) -> Result<ExportReport, RuntimeError> {
    let checkpoint = Checkpoint::open_listing(source)?;
    let description = gguf_description(checkpoint.config())?;
    let vocabulary = match &checkpoint.text().tokenizer {
        Some(_) => Some(gguf_vocabulary(checkpoint.text(), checkpoint.config())?),
        None => None,
    };
    let plan = GgufPlan::new(&checkpoint, &description, vocabulary.as_ref())?;
    check_gguf(checkpoint.config(), plan.config())?;
    Ok(plan.write(destination, progress)?)
}
