//! `firebox verify`

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use firebox_eval::{Prefill, Verification, verify_against};
use firebox_runtime::Model;
use firebox_store::{SourceKind, StoreError};
use serde::Serialize;
use serde_json::json;

use crate::compute::DeviceArgs;
use crate::console::{Console, Style, human_bytes};
use crate::hub;
use crate::inspect::source_name;
use crate::opening::open;
use crate::outcome::{Outcome, usage};

/// Single precision keeps about seven digits; a wrong formula loses far more than what rounding may add up to here.
const LOGIT_TOLERANCE: f64 = 1e-4;
const EMBEDDING_TOLERANCE: f64 = 1e-5;

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
    /// The largest difference that passes, for decoders as a share of the logit range
    /// [default: 1e-4 for decoders, 1e-5 for encoders]
    #[arg(long, value_name = "X", requires = "against")]
    tolerance: Option<f64>,
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

/// Checks a model's files, or its numbers.
pub fn verify(args: &VerifyArgs, console: &Console) -> anyhow::Result<Outcome> {
    match &args.against {
        Some(expected) => verify_numbers(args, expected, console),
        None => verify_files(args, console),
    }
}

fn verify_numbers(args: &VerifyArgs, expected: &Path, console: &Console) -> anyhow::Result<Outcome> {
    if args.tolerance.is_some_and(|tolerance| tolerance.is_nan() || tolerance < 0.0) {
        return Err(usage("--tolerance: should be 0 or more"));
    }
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
    Model::open(&path, &firebox_runtime::device(&args.device.device)?)?;
    if args.json {
        let segments: serde_json::Map<_, _> =
            report.segments.iter().map(|(id, hash)| (id.to_string(), json!(hash))).collect();
        console.json(&json!({
            "path": report.path,
            "passed": true,
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
    }
    Ok(Outcome::Done)
}

fn verdict(passed: bool, console: &Console) -> String {
    if passed { console.styled(Style::Strong, "pass") } else { console.styled(Style::Alarm, "FAIL") }
}
