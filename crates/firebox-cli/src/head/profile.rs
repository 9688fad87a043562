//! `firebox head profile`

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use firebox_train::{Examples, ExamplesConfig, TrainError, profile as measure};
use serde_json::json;

use super::train::format;
use crate::columns::table;
use crate::compute::DeviceArgs;
use crate::console::Console;
use crate::opening::open;
use crate::outcome::Outcome;
use crate::plot;

/// Samples of more tokens are left out: every layer reads them anew for every layer before it.
const MOST_TOKENS: usize = 1024;

/// Options of `firebox head profile`.
#[derive(Debug, Args)]
pub struct ProfileArgs {
    /// The model
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// What the head is for: a line of JSON each, with messages, or with prompt and completion
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// How many samples are measured
    #[arg(long, value_name = "N", default_value_t = 64)]
    samples: usize,
    /// How much of what the layers do the head should hold
    #[arg(long, value_name = "X", default_value_t = 0.5)]
    share: f64,
    /// Draw the losses, as an SVG image
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Says what layers are for, and where a head could begin.
pub fn profile(args: &ProfileArgs, console: &Console) -> anyhow::Result<Outcome> {
    let model = open(&args.model, &args.device, console)?;
    let decoder = model.decoder()?;
    let mut examples = Examples::open(&args.data, format(&model)?, ExamplesConfig::new(MOST_TOKENS))?;
    console.note(examples.summary().to_string());
    let count = examples.len().min(args.samples);
    let bar = console.bar(count as u64);
    let samples = (0..count).map(|sample| {
        bar.set_position(sample as u64);
        examples.sample(sample)
    });
    let samples = samples.collect::<Vec<Result<_, TrainError>>>();
    bar.finish_and_clear();
    let waiting = console.waiting("leaving out one layer after the other");
    let profile = measure(&decoder, samples);
    waiting.finish_and_clear();
    let profile = profile?;
    let split = profile.split(args.share);
    if let Some(path) = &args.plot {
        let image = plot::profile(&profile.without, split);
        std::fs::write(path, image).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if args.json {
        console.json(&json!({
            "loss": profile.loss,
            "without": profile.without,
            "targets": profile.targets,
            "split": split,
            "layers": decoder.layers() - split,
        }))?;
        return Ok(Outcome::Done);
    }
    let rows = profile.without.iter().enumerate().map(|(layer, more)| {
        let place = if layer >= split { "head" } else { "trunk" };
        [layer.to_string(), format!("{:+.4}", more), place.to_owned()]
    });
    console.line(table(Some(["layer", "loss without it", "proposed"]), &[0, 1], rows))?;
    console.line(format!(
        "loss {:.4} over {} targets; a head of the last {} layers",
        profile.loss,
        profile.targets,
        decoder.layers() - split
    ))?;
    Ok(Outcome::Done)
}
