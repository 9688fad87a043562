//! `firebox verify`

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use firebox_eval::{DeviceComparison, Prefill, Verification, compare_devices, verify_against};
use firebox_runtime::Model;
use firebox_store::{SourceKind, StoreError};
use serde::Serialize;
use serde_json::json;

use crate::compute::DeviceArgs;
use crate::console::{Console, Style, human_bytes};
use crate::hub;
use crate::inspect::source_name;
use crate::opening::{open, opened_device};
use crate::outcome::{Outcome, usage};

/// Single precision keeps about seven digits; a wrong formula loses far more than what rounding may add up to here.
const LOGIT_TOLERANCE: f64 = 1e-4;
const EMBEDDING_TOLERANCE: f64 = 1e-5;
/// Bits of a mean divergence. Activations that the CPU rounds for quantized weights cost less, and a wrong kernel far more.
const DEVICE_TOLERANCE: f64 = 1e-2;
/// Tokens that devices are compared over without a text.
const COMPARED: usize = 128;
/// The device that others are compared with, and another name of it.
const CPU: [&str; 2] = ["cpu", "flex"];

/// Options of `firebox verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// The model
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Expected numbers to hold the model's against, a safetensors file
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
    /// How the prompt goes through the layers
    #[arg(long, value_name = "HOW", requires = "against", default_value = "whole")]
    prefill: PrefillArg,
    /// Try every way
    #[arg(long, requires = "against", conflicts_with = "prefill")]
    all_prefills: bool,
    /// The largest difference that passes, for decoders as a share of the logit range, of another device than the CPU the mean
    /// divergence in bits [default: 1e-4 for decoders, 1e-5 for encoders, 1e-2 bits for devices]
    #[arg(long, value_name = "X")]
    tolerance: Option<f64>,
    /// A text over which a decoder's predictions on --device are compared with those on the CPU [default: arbitrary tokens]
    #[arg(long, value_name = "FILE", conflicts_with = "against")]
    text: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// How the prompt goes through the layers.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum PrefillArg {
    /// All at once
    Whole,
    /// In pieces of seven tokens
    Chunked,
    /// Token by token
    Stepwise,
}

impl From<PrefillArg> for Prefill {
    fn from(arg: PrefillArg) -> Self {
        match arg {
            PrefillArg::Whole => Self::Whole,
            PrefillArg::Chunked => Self::Chunked,
            PrefillArg::Stepwise => Self::Stepwise,
        }
    }
}

/// One way through the layers, and what came of it.
#[derive(Debug, Serialize)]
struct Check<'a> {
    passed: bool,
    tolerance: f64,
    prefill: Prefill,
    device: &'a str,
    #[serde(flatten)]
    found: Verification,
}

/// A comparison of a device with the CPU.
#[derive(Debug, Serialize)]
struct Compared<'a> {
    passed: bool,
    tolerance: f64,
    device: &'a str,
    #[serde(flatten)]
    found: DeviceComparison,
}

/// Checks a model's files, or its numbers.
pub fn verify(args: &VerifyArgs, console: &Console) -> anyhow::Result<Outcome> {
    if args.tolerance.is_some_and(|tolerance| tolerance.is_nan() || tolerance < 0.0) {
        return Err(usage("--tolerance: should be 0 or more"));
    }
    if args.against.is_none() && is_cpu(args) && (args.tolerance.is_some() || args.text.is_some()) {
        return Err(usage(
            "--tolerance and --text compare numbers: name a file of them with --against, or with --device a device to \
             compare with the CPU; `firebox devices` lists them",
        ));
    }
    match &args.against {
        Some(expected) => verify_numbers(args, expected, console),
        None => verify_files(args, console),
    }
}

fn verify_numbers(args: &VerifyArgs, expected: &Path, console: &Console) -> anyhow::Result<Outcome> {
    let model = open(&args.model, &args.device, console)?;
    let every = [Prefill::Whole, Prefill::Chunked, Prefill::Stepwise];
    let chosen = [args.prefill.into()];
    let ways = if args.all_prefills && model.decoder().is_ok() { &every[..] } else { &chosen[..] };
    let mut checks = Vec::new();
    for &prefill in ways {
        let found = verify_against(&model, expected, prefill)?;
        let tolerance = args.tolerance.unwrap_or(match found {
            Verification::Logits(_) => LOGIT_TOLERANCE,
            Verification::Embedding(_) => EMBEDDING_TOLERANCE,
        });
        let passed = found.passes(tolerance);
        let check = Check { passed, tolerance, prefill, device: &args.device.device, found };
        if !args.json {
            print_check(&check, console)?;
        }
        checks.push(check);
    }
    let passed = checks.iter().all(|check| check.passed);
    if args.json {
        match &checks[..] {
            [check] if !args.all_prefills => console.json(check)?,
            checks => console.json(&json!({"passed": passed, "prefills": checks}))?,
        }
    }
    Ok(if passed { Outcome::Done } else { Outcome::CheckFailed })
}

fn print_check(check: &Check<'_>, console: &Console) -> anyhow::Result<()> {
    let verdict = verdict(check.passed, console);
    let prefill = match check.prefill {
        Prefill::Whole => "whole prompt at once",
        Prefill::Chunked => "prompt in pieces of seven",
        Prefill::Stepwise => "prompt token by token",
    };
    match &check.found {
        Verification::Logits(found) => {
            console.line(format!("{verdict}  {prefill}, on {}", check.device))?;
            console.line(format!(
                "  logits  max |Δ| {:.3e}, {:.3e} of the range of {:.4} (tolerance {:e}), worst at position {}",
                found.max_difference,
                found.max_fraction,
                found.logit_range,
                check.tolerance,
                found.worst_position
            ))?;
            let equal =
                found.greedy_ids.iter().zip(&found.expected_greedy_ids).take_while(|(a, b)| a == b).count();
            let of = found.expected_greedy_ids.len();
            console.line(match found.greedy_equal {
                None => "  greedy  none expected".into(),
                Some(true) => format!("  greedy  all {of} tokens equal"),
                Some(false) => format!(
                    "  greedy  differs at token {} of {of}: {:?} instead of {:?}",
                    equal + 1,
                    found.greedy_ids.get(equal),
                    found.expected_greedy_ids.get(equal)
                ),
            })
        }
        Verification::Embedding(found) => {
            console.line(format!("{verdict}  on {}", check.device))?;
            console.line(format!(
                "  embedding  max |Δ| {:.3e} (tolerance {:e}); of the hidden states {:.3e}",
                found.max_difference, check.tolerance, found.max_hidden_difference
            ))
        }
    }
}

fn verify_files(args: &VerifyArgs, console: &Console) -> anyhow::Result<Outcome> {
    let path = hub::resolve(&args.model)?;
    let bar = console.bar(0);
    let report = firebox_store::verify(&path, &mut |progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.done);
        bar.set_message(progress.item);
    });
    bar.finish_and_clear();
    let report = match report {
        Err(error @ StoreError::HashMismatch { .. }) if args.json => {
            console.json(&json!({"path": path, "passed": false, "error": error.to_string()}))?;
            return Ok(Outcome::CheckFailed);
        }
        report => report?,
    };
    // The files are sound by themselves; this finds out whether configuration and tensors belong together.
    let model = Model::open(&path, &opened_device(&args.device)?)?;
    let compared = compare(args, &model, console)?;
    let passed = compared.as_ref().is_none_or(|compared| compared.passed);
    if args.json {
        let segments: serde_json::Map<_, _> =
            report.segments.iter().map(|(id, hash)| (id.to_string(), json!(hash))).collect();
        console.json(&json!({
            "path": report.path,
            "passed": passed,
            "comparison": compared,
            "source": source_name(report.source),
            "tensors": report.tensors,
            "bytes_hashed": report.bytes,
            "segments": segments,
        }))?;
    } else {
        let hashed = match report.source {
            SourceKind::Bundle => {
                format!(
                    "{} segments of {} have their hashes",
                    report.segments.len(),
                    human_bytes(report.bytes)
                )
            }
            _ => "this format carries no hashes, so only its structure was checked".into(),
        };
        let verdict = verdict(true, console);
        console.line(format!(
            "{verdict}  {}: {} tensors as the configuration asks; {hashed}",
            path.display(),
            report.tensors
        ))?;
        if let Some(compared) = &compared {
            print_compared(compared, console)?;
        }
    }
    Ok(if passed { Outcome::Done } else { Outcome::CheckFailed })
}

fn is_cpu(args: &VerifyArgs) -> bool {
    CPU.contains(&args.device.device.as_str())
}

/// Compares a decoder's predictions on the device with those on the CPU, unless that is the device.
fn compare<'a>(
    args: &'a VerifyArgs,
    model: &Model,
    console: &Console,
) -> anyhow::Result<Option<Compared<'a>>> {
    let device = args.device.device.as_str();
    if is_cpu(args) || (model.decoder().is_err() && args.text.is_none()) {
        return Ok(None);
    }
    let config = model.decoder()?;
    let (vocab, longest) = (config.config().vocab_size, config.config().max_positions);
    let tokens: Vec<u32> = match &args.text {
        Some(path) => {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("--text: cannot read {}; name a file of text", path.display()))?;
            let mut tokens = model.tokenizer()?.encode(&text, true)?;
            tokens.truncate(longest);
            tokens
        }
        None => (0..COMPARED.min(longest)).map(|index| ((5 + index * 7919) % vocab) as u32).collect(),
    };
    if tokens.is_empty() {
        return Err(usage("--text: the file has no text; name one with a page or more"));
    }
    let waiting = console.waiting(format!("comparing {} tokens with the CPU", tokens.len()));
    let reference = Model::open(model.checkpoint().path(), &firebox_runtime::device(CPU[0])?)?;
    let found = compare_devices(model, &reference, &tokens);
    waiting.finish_and_clear();
    let (found, tolerance) = (found?, args.tolerance.unwrap_or(DEVICE_TOLERANCE));
    Ok(Some(Compared { passed: found.mean_kl_bits <= tolerance, tolerance, device, found }))
}

fn print_compared(compared: &Compared<'_>, console: &Console) -> anyhow::Result<()> {
    let Compared { passed, tolerance, device, found } = compared;
    console.line(format!(
        "{}  {device} beside the CPU, {} tokens",
        verdict(*passed, console),
        found.positions
    ))?;
    console.line(format!(
        "  divergence  mean {:.3e} bits (tolerance {tolerance:e}), max {:.3e} bits at position {}",
        found.mean_kl_bits, found.max_kl_bits, found.worst_position
    ))?;
    console.line(format!(
        "  greedy  the same token at {} of {} positions",
        found.same_greedy, found.positions
    ))?;
    if !passed {
        console.line(format!(
            "  compute with --device cpu until this is mended; a newer driver of {device} may help"
        ))?;
    }
    Ok(())
}

fn verdict(passed: bool, console: &Console) -> String {
    if passed { console.styled(Style::Strong, "pass") } else { console.styled(Style::Alarm, "FAIL") }
}
