//! The command-line options for the memory that a model may take.

use std::path::Path;

use clap::{Args, ValueEnum};
use firebox_runtime::planner::{Mode, Placement};
use firebox_runtime::residency::ResidencyOptions;
use firebox_runtime::{Model, human_bytes, parse_bytes};
use firebox_store::ReadMethod;

use crate::compute::CacheType;
use crate::console::Console;
use crate::hub;

/// Options of fitting a model into memory.
#[derive(Debug, Clone, Args)]
pub struct FittingArgs {
    /// Memory that the whole process may take, such as 800M or 1.5G; what does not fit is read from disk while it runs
    #[arg(long, value_name = "SIZE", env = "FIREBOX_MEMORY", value_parser = parse_bytes)]
    pub memory: Option<u64>,
    /// What memory is for
    #[arg(long, value_name = "MODE", env = "FIREBOX_MODE", value_enum, default_value_t)]
    pub mode: PlanMode,
    /// Keep so many layers instead of as many as fit
    #[arg(long, value_name = "N", env = "FIREBOX_KEEP_LAYERS")]
    pub keep_layers: Option<usize>,
    /// Which layers to keep
    #[arg(long, value_name = "WHICH", env = "FIREBOX_PLACEMENT", value_enum, default_value_t)]
    pub placement: PlacementArg,
    /// Buffers that layers are read into; one reads nothing ahead [default: as many as help]
    #[arg(long, value_name = "N", env = "FIREBOX_BUFFERS", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub buffers: Option<u16>,
    /// How files are read: direct or buffered [default: the faster one]
    #[arg(long, value_name = "HOW", env = "FIREBOX_READ")]
    pub read: Option<ReadMethod>,
}

/// What memory is for
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum PlanMode {
    /// Layers, with room for 512 tokens
    Throughput,
    /// Layers, with room for 1024 tokens
    #[default]
    Balanced,
    /// The whole context, and then layers
    Context,
}

impl From<PlanMode> for Mode {
    fn from(mode: PlanMode) -> Self {
        match mode {
            PlanMode::Throughput => Self::Throughput,
            PlanMode::Balanced => Self::Balanced,
            PlanMode::Context => Self::Context,
        }
    }
}

/// Which layers to keep
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum PlacementArg {
    /// Whichever is predicted to be fastest
    #[default]
    Auto,
    /// The first
    FirstN,
    /// The last
    LastN,
    /// Spread evenly
    Interleaved,
}

impl From<PlacementArg> for Placement {
    fn from(placement: PlacementArg) -> Self {
        match placement {
            PlacementArg::Auto => Self::Auto,
            PlacementArg::FirstN => Self::FirstN,
            PlacementArg::LastN => Self::LastN,
            PlacementArg::Interleaved => Self::Interleaved,
        }
    }
}

impl FittingArgs {
    /// Returns these options with the memory of the model's entry in firebox.toml, if it has one.
    pub fn of(&self, name: &Path) -> Self {
        let own = hub::known(name).and_then(|model| model.memory);
        Self { memory: own.or(self.memory), ..self.clone() }
    }

    /// Returns the options for fitting a model into memory, if a limit is given.
    pub fn config(&self, cache: CacheType, context: Option<usize>) -> Option<ResidencyOptions> {
        let mut config = ResidencyOptions::new(self.memory?);
        config.mode = self.mode.into();
        config.kv_dtype = cache.into();
        config.context = context.filter(|context| *context > 0);
        config.layers = self.keep_layers;
        config.placement = self.placement.into();
        config.buffers = self.buffers.map(usize::from);
        config.method = self.read;
        Some(config)
    }
}

/// Says how a model was fitted.
pub fn say_fit(model: &Model, console: &Console) {
    let Some(residency) = model.residency() else { return };
    let plan = residency.plan();
    let streamed = model.decoder().ok().and_then(|decoder| Some(decoder.streamed()?.reading()));
    let (method, rate) = streamed.map_or((String::new(), 0.0), |(method, rate)| (method.to_string(), rate));
    console.detail(format!(
        "keeps {} layers{} in {}, reads the rest {method} at {:.2} GB/s through {} buffers; about {:.1} tok/s; {}",
        plan.kept_layers.len(),
        if plan.keep_unembedding { " and the unembedding" } else { "" },
        human_bytes(residency.budget().total()),
        rate / 1e9,
        plan.buffers,
        plan.prediction.tokens_per_second,
        plan.explanation,
    ));
}

/// Says what has happened to what is kept since this was last asked.
pub fn say_events(model: &Model, console: &Console) {
    for event in model.residency().map(|residency| residency.events()).unwrap_or_default() {
        console.detail(event.to_string());
    }
}
