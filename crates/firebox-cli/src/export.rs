//! `firebox export`

use std::path::PathBuf;

use clap::{ArgGroup, Args, ValueEnum};
use firebox_runtime::export;
use firebox_store::{Dtype, Progress};
use serde_json::json;

use crate::console::{Console, human_bytes};
use crate::hub;
use crate::outcome::Outcome;

/// Options of `firebox export`.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("format").required(true).args(["safetensors", "gguf"])))]
pub struct ExportArgs {
    /// The model
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Write a directory with config.json, tokenizer and model.safetensors, which does not exist yet
    #[arg(long, value_name = "FOLDER")]
    safetensors: Option<PathBuf>,
    /// Write a GGUF file, which does not exist yet; quantized weights stay so
    #[arg(long, value_name = "FILE")]
    gguf: Option<PathBuf>,
    /// What quantized weights become in safetensors, which keep other weights as they are [default: bf16]
    #[arg(long, value_name = "DTYPE", conflicts_with = "gguf")]
    dtype: Option<Float>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Number formats of unpacked weights.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Float {
    /// 32 bits
    F32,
    /// 16 bits, more of them for the mantissa
    F16,
    /// 16 bits, more of them for the exponent
    Bf16,
}

/// Writes a model for other engines.
pub fn export(args: &ExportArgs, console: &Console) -> anyhow::Result<Outcome> {
    let source = hub::resolve(&args.model)?;
    let bar = console.bar(0);
    let mut show = |progress: Progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.done);
        bar.set_message(progress.item);
    };
    let dtype = match args.dtype {
        Some(Float::F32) => Dtype::F32,
        Some(Float::F16) => Dtype::F16,
        Some(Float::Bf16) | None => Dtype::BF16,
    };
    let report = match (&args.safetensors, &args.gguf) {
        (Some(folder), _) => export::safetensors(&source, folder, dtype, &mut show),
        (None, Some(file)) => export::gguf(&source, file, &mut show),
        // The command line has one of them.
        (None, None) => return Ok(Outcome::Done),
    };
    bar.finish_and_clear();
    let report = report?;
    if args.json {
        console.json(&json!({
            "path": report.path,
            "tensors": report.tensors,
            "unpacked": report.unpacked,
            "bytes_read": report.bytes_read,
            "bytes_written": report.bytes_written,
            "notes": report.notes,
        }))?;
    } else {
        let unpacked = match report.unpacked {
            0 => String::new(),
            count => format!(", {count} of them unpacked"),
        };
        console.line(format!(
            "{}: {} tensors{unpacked}; {} read, {} written",
            report.path.display(),
            report.tensors,
            human_bytes(report.bytes_read),
            human_bytes(report.bytes_written),
        ))?;
    }
    for note in &report.notes {
        console.note(format!("note: {note}"));
    }
    Ok(Outcome::Done)
}
