//! One model run one way, in a process of its own.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context as _;
use firebox_eval::{Benchmark, BenchmarkConfig, benchmark};
use firebox_runtime::planner::{Mode, Placement};
use firebox_runtime::residency::ResidencyOptions;
use firebox_runtime::{Model, device, peak_resident_bytes};
use firebox_store::ReadMethod;
use serde::{Deserialize, Serialize};

/// More memory than any model takes that is measured.
pub const PLENTY: u64 = 1 << 40;

/// One that every made model knows.
const TOKEN: u32 = 100;

/// The layers that are resident.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Resident {
    First,
    Last,
    Spread,
    Fastest,
}

impl From<Resident> for Placement {
    fn from(resident: Resident) -> Self {
        match resident {
            Resident::First => Self::FirstN,
            Resident::Last => Self::LastN,
            Resident::Spread => Self::Interleaved,
            Resident::Fastest => Self::Auto,
        }
    }
}

/// The parameters of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Run {
    pub model: PathBuf,
    /// Bytes that the whole process may take; otherwise the model is mapped.
    pub memory: Option<u64>,
    /// The number and choice of resident layers, instead of as many as fit.
    pub layers: Option<(usize, Resident)>,
    pub prompt: usize,
    pub depth: usize,
    pub tokens: usize,
    pub batches: Vec<usize>,
}

/// The results of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunResult {
    /// Seconds from opening it to what follows a first token.
    pub first: f64,
    pub prefill: f64,
    /// Tokens a second of each number of sequences.
    pub decode: Vec<f64>,
    pub peak: u64,
    /// The planner's prediction, if one was made.
    pub predicted: Option<Predicted>,
}

/// The speed and memory peak that a plan predicts.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Predicted {
    pub speed: f64,
    pub peak: u64,
}

impl Run {
    /// Mapped, and few tokens.
    pub fn short(model: PathBuf) -> Self {
        let (memory, layers, batches) = (None, None, vec![1]);
        Self { model, memory, layers, prompt: 128, depth: 64, tokens: 16, batches }
    }

    /// Runs it in this process.
    pub fn run(&self) -> anyhow::Result<RunResult> {
        let cpu = device("cpu")?;
        let began = Instant::now();
        let model = match self.memory {
            None => Model::open(&self.model, &cpu)?,
            Some(memory) => Model::open_within(&self.model, &cpu, &self.options(memory))?,
        };
        model.session()?.feed(&[TOKEN])?;
        let first = began.elapsed().as_secs_f64();
        let config = BenchmarkConfig {
            prompt: self.prompt,
            depth: self.depth,
            tokens: self.tokens,
            batches: self.batches.clone(),
            repeat: 1,
            ..BenchmarkConfig::default()
        };
        let Benchmark { prefill_tps, decode_tps } = benchmark(&model, &config)?;
        let predicted = model.residency().map(|residency| {
            let prediction = residency.plan().prediction;
            Predicted { speed: prediction.tokens_per_second, peak: prediction.peak_bytes }
        });
        let peak =
            peak_resident_bytes().context("this system does not say how much memory a process took")?;
        Ok(RunResult {
            first,
            prefill: prefill_tps,
            decode: decode_tps.into_values().collect(),
            peak,
            predicted,
        })
    }

    fn options(&self, memory: u64) -> ResidencyOptions {
        let (layers, resident) =
            self.layers.map_or((None, Resident::Fastest), |(count, resident)| (Some(count), resident));
        ResidencyOptions {
            layers,
            placement: resident.into(),
            mode: Mode::Throughput,
            context: Some(self.prompt.max(self.depth + self.tokens)),
            method: Some(ReadMethod::Direct),
            ..ResidencyOptions::new(memory)
        }
    }
}

impl RunResult {
    /// Returns the better value of each result.
    pub fn better(&self, other: &Self) -> Self {
        Self {
            first: self.first.min(other.first),
            prefill: self.prefill.max(other.prefill),
            decode: self.decode.iter().zip(&other.decode).map(|(one, other)| one.max(*other)).collect(),
            peak: self.peak.min(other.peak),
            predicted: self.predicted,
        }
    }

    /// Tokens a second of the first number of sequences.
    pub fn speed(&self) -> anyhow::Result<f64> {
        self.decode.first().copied().context("a run was to decode")
    }
}
