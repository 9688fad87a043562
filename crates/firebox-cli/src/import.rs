//! `firebox import`

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use firebox_runtime::peak_resident_bytes;
use firebox_store::{Bits, ImportOptions, Quantization};
use serde_json::json;

use crate::console::{Console, human_bytes};
use crate::hub;
use crate::outcome::{Outcome, usage};

/// Options of `firebox import`.
#[derive(Debug, Args)]
pub struct ImportArgs {
    /// The model to read: a Hugging Face directory, a GGUF file or a bundle
    #[arg(value_name = "SRC")]
    source: PathBuf,
    /// The bundle to write, a directory that does not exist yet
    #[arg(value_name = "DST")]
    destination: PathBuf,
    /// Store projections and embeddings as small integers
    #[arg(long, value_name = "BITS")]
    quantize: Option<Width>,
    /// Weights that share a scale: a multiple of 32 up to 4096 [default: 32]
    #[arg(long, value_name = "N", requires = "quantize")]
    group: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Bits per weight.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Width {
    /// Eight
    Q8,
    /// Four
    Q4,
}

/// Without a group size.
const GROUP: usize = 32;

impl ImportArgs {
    fn options(&self) -> anyhow::Result<ImportOptions> {
        let Some(width) = self.quantize else { return Ok(ImportOptions::default()) };
        let bits = match width {
            Width::Q8 => Bits::Q8,
            Width::Q4 => Bits::Q4,
        };
        let quantization = Quantization { bits, group: self.group.unwrap_or(GROUP) };
        quantization.check().map_err(|reason| usage(format!("--{reason}")))?;
        Ok(ImportOptions { quantize: Some(quantization) })
    }
}

/// Writes a bundle.
pub fn import(args: &ImportArgs, console: &Console) -> anyhow::Result<Outcome> {
    let options = args.options()?;
    let source = hub::resolve(&args.source)?;
    let bar = console.bar(0);
    let report = firebox_store::import(&source, &args.destination, &options, &mut |progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.done);
        bar.set_message(progress.item);
    });
    bar.finish_and_clear();
    let report = report?;
    if args.json {
        console.json(&json!({
            "path": report.path,
            "segments": report.segments,
            "tensors": report.tensors,
            "quantized": report.quantized,
            "quantization": options.quantize,
            "bytes_read": report.bytes_read,
            "bytes_written": report.bytes_written,
            "hash": report.hash,
            "heads_left": report.heads_left,
            "peak_rss_mib": peak_resident_bytes().map(|bytes| bytes as f64 / f64::from(1 << 20)),
        }))?;
    } else {
        let quantized = match options.quantize {
            Some(scheme) => format!(", {} of them now {scheme}", report.quantized),
            None => String::new(),
        };
        console.line(format!(
            "{}: {} tensors in {} segments{quantized}; {} read, {} written",
            report.path.display(),
            report.tensors,
            report.segments,
            human_bytes(report.bytes_read),
            human_bytes(report.bytes_written),
        ))?;
    }
    if !report.heads_left.is_empty() {
        let rebind = if options.quantize.is_some() { " --rebind" } else { "" };
        console.note(format!(
            "note: heads stay with the source: {}; `firebox head add{rebind}` takes one over, from its folder below \
             {}",
            report.heads_left.join(", "),
            source.join("heads").display()
        ));
    }
    Ok(Outcome::Done)
}
