//! `firebox import`

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use firebox_model::InputMoments;
use firebox_runtime::{KvType, Model, device, peak_resident_bytes};
use firebox_store::{Bits, Checkpoint, ImportOptions, Importance, Quantization};
use serde_json::json;

use crate::console::{Console, human_bytes};
use crate::hub;
use crate::outcome::{Outcome, usage};
use crate::tokens::read_tokens;

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
    /// Weights that share a scale: a multiple of 32 up to 4096 [default: 32, or what --target-bits allows]
    #[arg(long, value_name = "N", requires = "quantize")]
    group: Option<usize>,
    /// A text from which to learn which inputs matter; what is multiplied with those loses less by q4
    #[arg(long, value_name = "FILE", requires = "quantize")]
    calibrate: Option<PathBuf>,
    /// Bits of a quantized weight on average, with its scale: what loses most by q4 is stored as q8
    #[arg(long, value_name = "BITS", requires = "calibrate")]
    target_bits: Option<f64>,
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

/// Weights that share a scale, if nothing is said: the first of them that an average of bits allows, because small groups lose less.
const GROUPS: [usize; 3] = [32, 64, 128];

/// Tokens that a model sees at a time of a text to learn from.
const CALIBRATION_CONTEXT: usize = 512;

impl ImportArgs {
    fn options(&self) -> anyhow::Result<ImportOptions> {
        let Some(width) = self.quantize else { return Ok(ImportOptions::default()) };
        let bits = match width {
            Width::Q8 => Bits::Q8,
            Width::Q4 => Bits::Q4,
        };
        let group = self.group.unwrap_or_else(|| default_group(self.target_bits));
        let quantization = Quantization { bits, group };
        quantization.check().map_err(|reason| usage(format!("--{reason}")))?;
        if bits == Bits::Q8 && self.target_bits.is_some() {
            return Err(usage("--target-bits stores as q8 what loses most by q4: give --quantize q4"));
        }
        let target_bits = self.target_bits;
        Ok(ImportOptions { quantize: Some(quantization), importance: None, target_bits })
    }
}

/// The smallest group whose q4 takes at most so many bits.
fn default_group(target_bits: Option<f64>) -> usize {
    let [first, .., last] = GROUPS;
    let Some(target_bits) = target_bits else { return first };
    GROUPS.into_iter().find(|group| 4.0 + 16.0 / *group as f64 <= target_bits).unwrap_or(last)
}

/// Learns from a text which inputs of a model's matrices matter.
fn importance(source: &Path, text: &Path, console: &Console) -> anyhow::Result<Importance> {
    let moments = InputMoments::default();
    let model = Model::measuring_inputs(Checkpoint::open(source)?, &device("cpu")?, &moments)?;
    let tokens = read_tokens(text, false, &model)?;
    let context = CALIBRATION_CONTEXT.min(model.decoder()?.config().max_positions);
    let waiting = console.waiting(format!("learning from {} tokens", tokens.len()));
    let found = firebox_eval::perplexity(&model, &tokens, context, KvType::F32, None);
    waiting.finish_and_clear();
    console.detail(format!("learned from {} tokens of perplexity {:.2}", tokens.len(), found?.perplexity));
    Ok(moments.means().into_iter().collect())
}

/// Writes a bundle.
pub fn import(args: &ImportArgs, console: &Console) -> anyhow::Result<Outcome> {
    let mut options = args.options()?;
    let source = hub::resolve(&args.source)?;
    if let Some(text) = &args.calibrate {
        options.importance = Some(Arc::new(importance(&source, text, console)?));
    }
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
            "calibrated": report.calibrated,
            "wide": report.wide,
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
        let wide = match report.wide {
            0 => String::new(),
            wide => format!(", {wide} of those q8"),
        };
        let calibrated = match (report.calibrated, &args.calibrate) {
            (_, None) => String::new(),
            (calibrated, Some(text)) => {
                format!(", {calibrated} by what {} says of their inputs", text.display())
            }
        };
        console.line(format!(
            "{}: {} tensors in {} segments{quantized}{wide}{calibrated}; {} read, {} written",
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
