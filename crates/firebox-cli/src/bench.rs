//! `firebox bench`

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use firebox_eval::{Benchmark, BenchmarkConfig};
use firebox_runtime::peak_resident_bytes;
use serde::Serialize;

use crate::compute::{CacheType, DeviceArgs};
use crate::console::Console;
use crate::fitting::{FittingArgs, say_events};
use crate::opening::open_fitted;
use crate::outcome::Outcome;
use crate::tracing::TraceArgs;

/// Options of `firebox bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// The model
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    prompt: u32,
    /// Tokens before decoding begins
    #[arg(long, value_name = "N", default_value_t = 128)]
    depth: u32,
    /// Tokens to decode: chosen greedily, on the device where it can, and each fed to the next step as in an answer
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Sequences that decode together
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', default_values_t = [1, 4, 8],
          value_parser = clap::value_parser!(u16).range(1..))]
    batch: Vec<u16>,
    /// Runs whose median is taken
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    repeat: u16,
    /// What keys and values are kept in
    #[arg(long, value_name = "TYPE", env = "FIREBOX_CACHE_TYPE", value_enum, default_value_t)]
    cache_type: CacheType,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    fitting: FittingArgs,
    #[command(flatten)]
    tracing: TraceArgs,
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    device: String,
    threads: usize,
    load_s: f64,
    #[serde(flatten)]
    measured: Benchmark,
    peak_rss_mib: Option<u64>,
}

/// Measures how fast a model runs.
pub fn bench(args: &BenchArgs, console: &Console) -> anyhow::Result<Outcome> {
    let began = Instant::now();
    let widest = args.batch.iter().copied().max().map_or(1, usize::from);
    let context = (args.prompt as usize).max(widest * (args.depth as usize + args.tokens as usize));
    let limit = args.fitting.of(&args.model).config(args.cache_type, Some(context));
    let model = open_fitted(&args.model, &args.device, limit.as_ref(), console)?;
    let load_s = began.elapsed().as_secs_f64();
    let config = BenchmarkConfig {
        prompt: args.prompt as usize,
        depth: args.depth as usize,
        tokens: args.tokens as usize,
        batches: args.batch.iter().map(|&batch| batch.into()).collect(),
        repeat: args.repeat.into(),
        kv_type: args.cache_type.into(),
    };
    let trace = args.tracing.begin(&model);
    let waiting = console.waiting("measuring");
    let measured = firebox_eval::benchmark(&model, &config);
    waiting.finish_and_clear();
    let measured = measured?;
    if let Some(trace) = trace {
        trace.save(console)?;
    }
    say_events(&model, console);
    let report = Report {
        model: args.model.file_name().unwrap_or(args.model.as_os_str()).to_string_lossy().into_owned(),
        device: args.device.device.clone(),
        threads: rayon::current_num_threads(),
        load_s,
        measured,
        peak_rss_mib: peak_resident_bytes().map(|bytes| bytes >> 20),
    };
    if args.json {
        console.json(&report)?;
        return Ok(Outcome::Done);
    }
    console.line(format!("{} on {}, {} threads", report.model, report.device, report.threads))?;
    console.line(format!("load      {:>10.3} s", report.load_s))?;
    console.line(format!("prefill   {:>10.2} tok/s, {} tokens", report.measured.prefill_tps, args.prompt))?;
    for (batch, speed) in &report.measured.decode_tps {
        console.line(format!("decode    {speed:>10.2} tok/s, batch {batch} after {} tokens", args.depth))?;
    }
    if let Some(peak) = report.peak_rss_mib {
        console.line(format!("peak      {peak:>10} MiB"))?;
    }
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Cli, Command};

    #[test]
    fn a_model_may_stand_behind_batches() {
        let given = ["firebox", "bench", "--batch", "1,4", "small"];
        let Command::Bench(args) = Cli::try_parse_from(given).unwrap().command else {
            panic!("another command")
        };
        assert_eq!((args.batch, args.model), (vec![1, 4], PathBuf::from("small")));
    }
}
