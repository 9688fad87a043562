//! `firebox plan`

use std::path::{Path, PathBuf};

#[cfg(feature = "plot")]
use anyhow::Context as _;
use clap::Args;
use firebox_model::Architecture;
use firebox_runtime::planner::{self, DeviceProfile, Mode, Plan, Prediction, Rates, Shape, decoder_shape};
use firebox_runtime::residency;
use firebox_runtime::{RuntimeError, parse_bytes};
use firebox_store::Checkpoint;
use serde::Serialize;

use crate::columns::table;
use crate::compute::{CacheType, DeviceArgs};
use crate::console::{Console, grouped, human_bytes};
use crate::fitting::PlanMode;
use crate::hub;
use crate::opening::opened_device;
use crate::outcome::Outcome;
#[cfg(feature = "plot")]
use crate::plot;

/// Marks the row that was chosen.
const CHOSEN: &str = ">";

/// Options of `firebox plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// The model
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Memory that the model may take, such as 800M or 1.5G
    #[arg(short, long, value_name = "SIZE", value_parser = parse_bytes)]
    memory: u64,
    /// A JSON file that says how fast a machine is, to plan for that one
    #[arg(long, value_name = "FILE")]
    device_profile: Option<PathBuf>,
    /// What memory is for
    #[arg(long, value_name = "MODE", env = "FIREBOX_MODE", value_enum, default_value_t)]
    mode: PlanMode,
    /// Longest sequence that is expected, in tokens; 0 is what the model was trained for
    #[arg(short, long, value_name = "N", env = "FIREBOX_CTX_SIZE", default_value_t = 0)]
    ctx_size: usize,
    /// What keys and values are kept in
    #[arg(long, value_name = "TYPE", env = "FIREBOX_CACHE_TYPE", value_enum, default_value_t)]
    cache_type: CacheType,
    /// Write memory and speed over the number of resident layers, as an SVG image
    #[cfg(feature = "plot")]
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// The parameters of a plan.
pub struct Wanted<'a> {
    pub memory: u64,
    pub mode: Mode,
    /// Tokens; 0 is what the model was trained for.
    pub context: usize,
    pub cache_type: CacheType,
    pub profile: Option<&'a Path>,
    pub device: &'a DeviceArgs,
}

/// A plan, and what it is made from.
#[derive(Debug, Serialize)]
pub struct Report {
    model: PathBuf,
    /// Where the rates are from.
    rates: String,
    layers: usize,
    layer_bytes: u64,
    unembedding_bytes: u64,
    memory_bytes: u64,
    mode: Mode,
    context: usize,
    #[serde(flatten)]
    plan: Plan,
}

/// Says how many layers to keep in so much memory and how fast a model is then going to run, without running it.
pub fn plan(args: &PlanArgs, console: &Console) -> anyhow::Result<Outcome> {
    let checkpoint = Checkpoint::open(hub::resolve(&args.model)?)?;
    let wanted = Wanted {
        memory: args.memory,
        mode: args.mode.into(),
        context: args.ctx_size,
        cache_type: args.cache_type,
        profile: args.device_profile.as_deref(),
        device: &args.device,
    };
    let report = Report::of(&checkpoint, args.model.clone(), &wanted)?;
    #[cfg(feature = "plot")]
    if let Some(path) = &args.plot {
        let image = plot::plan(&report.plan, args.memory);
        std::fs::write(path, image).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if args.json {
        console.json(&report)?;
    } else {
        console.line(report.readable())?;
    }
    Ok(Outcome::Done)
}

/// The rates of a machine that may be another, and what to call it.
fn rates_of_profile(path: &Path, shape: &Shape) -> anyhow::Result<(String, Rates)> {
    let profile = DeviceProfile::open(path)?;
    Ok((format!("of {}, from {}", profile.name, path.display()), profile.rates(shape)?))
}

impl Report {
    /// Makes the best plan, at the rates of a profile or, without one, at rates measured on this machine.
    pub fn of(checkpoint: &Checkpoint, model: PathBuf, wanted: &Wanted<'_>) -> anyhow::Result<Self> {
        let Architecture::Decoder(config) = Architecture::from_json(checkpoint.config())? else {
            let remedy = "it is small enough to keep all of it; plan a decoder such as qwen3";
            return Err(RuntimeError::Kind { found: "a sentence encoder", remedy }.into());
        };
        let shape = decoder_shape(checkpoint, &config, wanted.cache_type.into())?;
        let (rates_from, rates) = match wanted.profile {
            Some(path) => rates_of_profile(path, &shape)?,
            None => {
                let device = opened_device(wanted.device)?;
                ("measured on this machine".into(), residency::measure(checkpoint, &device, &shape)?)
            }
        };
        let context = if wanted.context == 0 { config.max_positions } else { wanted.context };
        Ok(Self {
            model,
            rates: rates_from,
            layers: shape.layers(),
            layer_bytes: shape.parts.iter().filter(|part| part.is_layer).map(|part| part.kept_bytes).sum(),
            unembedding_bytes: shape.unembedding_bytes(),
            memory_bytes: wanted.memory,
            mode: wanted.mode,
            context,
            plan: planner::plan(&shape, &rates, wanted.memory, wanted.mode, context)?,
        })
    }

    fn readable(&self) -> String {
        let facts = [
            ("model", self.model.display().to_string()),
            ("layers", format!("{}, {} together", self.layers, human_bytes(self.layer_bytes))),
            ("unembedding", human_bytes(self.unembedding_bytes)),
        ];
        let facts = facts.map(|(name, value)| [name.to_owned(), value]);
        let facts = table(None, &[], facts.into_iter().chain(self.choice()));
        format!("{facts}\n\n{}", self.rows())
    }

    /// Returns the plan's choices and their inputs as rows of a table.
    pub fn choice(&self) -> [[String; 2]; 7] {
        let plan = &self.plan;
        let choice = [
            ("rates", self.rates.clone()),
            ("memory", human_bytes(self.memory_bytes)),
            ("room for", format!("{} tokens", grouped(plan.kv_tokens as u64))),
            ("prompt", format!("{} tokens at a time", plan.chunk)),
            ("streams", self.streamed()),
            ("keeps", self.kept()),
            ("speed", format!("{} tok/s", speed(&plan.prediction))),
        ];
        choice.map(|(name, value)| [name.to_owned(), value])
    }

    fn streamed(&self) -> String {
        let plan = &self.plan;
        let layers = self.layers - plan.kept_layers.len();
        match (layers, plan.keep_unembedding) {
            (0, true) => "nothing".into(),
            (0, false) => format!("the unembedding, through {} buffers", plan.buffers),
            (_, true) => format!("{layers} layers, through {} buffers", plan.buffers),
            (_, false) => format!("{layers} layers and the unembedding, through {} buffers", plan.buffers),
        }
    }

    fn kept(&self) -> String {
        let plan = &self.plan;
        let unembedding = if plan.keep_unembedding { " and the unembedding" } else { "" };
        match plan.kept_layers.len() {
            0 if plan.keep_unembedding => "the unembedding".into(),
            0 => "nothing".into(),
            all if all == self.layers => format!("all layers{unembedding}"),
            some => format!("{some} layers{unembedding}; {}", plan.explanation),
        }
    }

    fn rows(&self) -> String {
        let row = |(count, row): (usize, &Prediction)| {
            [
                if count == self.plan.kept_layers.len() { CHOSEN.into() } else { String::new() },
                count.to_string(),
                human_bytes(row.peak_bytes),
                speed(row),
                format!("{:.0} %", 100.0 * row.waiting / row.seconds_per_token),
            ]
        };
        let header = ["", "kept", "memory", "tok/s", "waiting"];
        table(Some(header), &[1, 2, 3, 4], self.plan.table.iter().enumerate().map(row))
    }
}

fn speed(prediction: &Prediction) -> String {
    let speed = prediction.tokens_per_second;
    if speed < 100.0 { format!("{speed:.2}") } else { format!("{speed:.0}") }
}
