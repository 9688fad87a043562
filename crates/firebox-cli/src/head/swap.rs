//! `firebox head swap`

use std::path::PathBuf;

use clap::Args;
use firebox_eval::SwapTimings;
use firebox_runtime::residency::disk_rate;
use firebox_store::Heads;
use serde_json::json;

use crate::columns::table;
use crate::compute::DeviceArgs;
use crate::console::Console;
use crate::hub;
use crate::opening::opened_device;
use crate::outcome::Outcome;

/// Options of `firebox head swap`.
#[derive(Debug, Args)]
pub struct SwapArgs {
    /// The model
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// The head to change to
    #[arg(value_name = "NAME")]
    name: String,
    /// How many tokens were said before
    #[arg(long, value_name = "N", default_value_t = 16)]
    depth: usize,
    /// How often everything is measured; medians are shown
    #[arg(long, value_name = "N", default_value_t = 5)]
    repeat: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Measures changes of heads.
pub fn swap(args: &SwapArgs, console: &Console) -> anyhow::Result<Outcome> {
    let path = hub::resolve(&args.model)?;
    let device = opened_device(&args.device)?;
    let head_bytes = Heads::open(&path)?.head(&args.name)?.bytes();
    let prompt: Vec<u32> = (0..args.depth.max(1) as u32).map(|token| 1 + token % 64).collect();
    let (mut rounds, mut reading) = (Vec::new(), Vec::new());
    for _ in 0..args.repeat.max(1) {
        let (changes, model) = SwapTimings::measure(&path, &device, &args.name, &prompt)?;
        reading.push(head_bytes as f64 / disk_rate(model.checkpoint())?);
        rounds.push(changes);
    }
    let of = |time: fn(&SwapTimings) -> f64| median(rounds.iter().map(time).collect());
    let rows = [
        ("warm", "warm", of(|changes| changes.warm)),
        ("warm_first_token", "warm, to the first token", of(|changes| changes.warm_first_token)),
        ("cold", "cold", of(|changes| changes.cold)),
        ("cold_first_token", "cold, to the first token", of(|changes| changes.cold_first_token)),
        ("fallback", "to what stands in", of(|changes| changes.fallback)),
        (
            "fallback_first_token",
            "to what stands in, to the first token",
            of(|changes| changes.fallback_first_token),
        ),
        ("reading", "reading the head's bytes", median(reading)),
        ("reload", "opening the model", of(|changes| changes.reload)),
        (
            "reload_first_token",
            "opening the model, to the first token",
            of(|changes| changes.reload_first_token),
        ),
    ];
    if args.json {
        let seconds: serde_json::Map<_, _> =
            rows.iter().map(|(name, _, time)| ((*name).to_owned(), json!(time))).collect();
        let (head, depth) = (&args.name, args.depth);
        console
            .json(&json!({ "head": head, "head_bytes": head_bytes, "depth": depth, "seconds": seconds }))?;
        return Ok(Outcome::Done);
    }
    let [.., (_, _, reload), (_, _, reload_first_token)] = rows;
    let rows = rows.map(|(name, what, time)| {
        let opening = if name.ends_with("first_token") { reload_first_token } else { reload };
        [what.to_owned(), format!("{:.3} ms", time * 1e3), format!("{:.1}x", opening / time)]
    });
    console.line(table(Some(["change", "time", "faster than opening"]), &[1, 2], rows))?;
    Ok(Outcome::Done)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
