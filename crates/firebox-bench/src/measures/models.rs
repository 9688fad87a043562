//! Three models that do not fit into memory together, one question to each: how long until the specialist says something,
//! and how much is said in a second.
//!
//! Every way of running them is a process of its own, before which all files are dropped from the page cache. All ways
//! answer the same: prompts of 16 tokens, then 8 tokens of the router, 100 of the fallback, 100 of the specialist,
//! greedily; where one comes after the other, in this order. The specialist's first token is measured without the fallback as
//! well, whose answer comes before it where one follows the other. The measure fails where ways say different tokens.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use firebox_engine::{Clock, EngineConfig, EngineCore, Event, Request, StepOutcome, WallClock};
use firebox_model::StreamedConfig;
use firebox_runtime::residency::{ShareOptions, SharedBudget};
use firebox_runtime::schedule::Priority;
use firebox_runtime::{
    Generation, GenerationConfig, Model, PrefixLimits, SamplerConfig, device, peak_resident_bytes,
};
use firebox_store::{Checkpoint, ReadMethod};
use serde::{Deserialize, Serialize};

use crate::child::{self, Task, TaskKind};
use crate::figure::{Declared, Figures, compared, spread, times};
use crate::setup::{Setup, once};
use firebox_testing::model::SyntheticModel;

/// The models in the order in which they are asked: what they are called, their part of the bytes, layers, tokens of the
/// answer.
const MODELS: [(&str, usize, usize, usize); 3] =
    [("router", 120, 12, 8), (FALLBACK, 340, 18, 100), ("specialist", 890, 32, 100)];
const ALL_PARTS: usize = 1350;
const FALLBACK: &str = "fallback";
/// Megabytes that all of them take together, and the most tokens of an answer.
const MEGABYTES: (usize, usize) = (1350, 54);
const MOST_TOKENS: (usize, usize) = (usize::MAX, 12);
const PROMPT: usize = 16;
/// The budget, as a part of the memory that preloading all models takes.
const SHARE: f64 = 0.65;
/// Megabytes of models that are too few to measure anything with, and room for a program that runs nothing large.
const SMALL: usize = 500;
const PROGRAM: f64 = 64e6;

pub const FIGURES: &[Declared] = &[
    times("models.first_standing", "s", "one after the other"),
    times("models.first_cold", "s", "one after the other"),
    times("models.two_standing", "s", "one after the other"),
    times("models.two_cold", "s", "one after the other"),
    times("models.speed_standing", "tok/s", "all loaded before"),
    times("models.speed_cold", "tok/s", "all loaded before"),
    compared("models.memory", "% of the budget", "MB", "the budget"),
    compared("models.budget", "% of preloading", "MB", "all loaded before"),
];

/// A way of running them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Way {
    /// One after the other: mapped, read ahead whole, dropped.
    Mapped,
    /// One after the other: read past the page cache, dropped.
    Read,
    /// All loaded before.
    Preload,
    /// Interleaved, from nothing.
    Cold,
    /// Interleaved, with the models opened before the requests.
    Standing,
}

/// One way of running them, with so many bytes of memory if it is told how many there are.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Trial {
    way: Way,
    folder: PathBuf,
    budget: u64,
    /// Answers are no longer than that.
    most_tokens: usize,
    /// Whether the fallback is asked as well, before the specialist.
    with_fallback: bool,
}

/// The results of one way of running the models; times are in seconds.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct RunResult {
    opening: f64,
    /// Until the specialist's first token.
    first: f64,
    all: f64,
    /// Tells answers from others.
    said: String,
    tokens: usize,
    peak: u64,
}

impl RunResult {
    fn speed(&self) -> f64 {
        self.tokens as f64 / self.all
    }
}

pub fn measure(setup: &Setup, figures: &mut Figures) -> anyhow::Result<()> {
    let megabytes = setup.usual_or(MEGABYTES.0, MEGABYTES.1);
    let folder = made(setup, megabytes)?;
    let most_tokens = setup.usual_or(MOST_TOKENS.0, MOST_TOKENS.1);
    let trial = |way, budget, with_fallback| {
        Trial { way, folder: folder.clone(), budget, most_tokens, with_fallback }.measured()
    };
    let run = |way, budget| trial(way, budget, true);
    let mut preloaded = Vec::new();
    for _ in 0..setup.rounds {
        preloaded.push(run(Way::Preload, 0)?);
    }
    // The memory of which the budget is a part.
    let all = spread(preloaded.iter().map(|ran| ran.peak as f64)).median;
    // The program itself takes more than that where models are tiny, and they only show that it works.
    let least = if megabytes < SMALL { PROGRAM + SHARE * (megabytes * 1_000_000) as f64 } else { 0.0 };
    let budget = (all * SHARE).max(least);
    figures.add_pair("models.budget", 100.0 * budget / all, budget / 1e6, all / 1e6)?;
    for _ in 0..setup.rounds {
        let run = |way| run(way, budget as u64);
        let (mapped, read, preload) = (run(Way::Mapped)?, run(Way::Read)?, run(Way::Preload)?);
        let (cold, standing) = (run(Way::Cold)?, run(Way::Standing)?);
        expect_same_tokens(&mapped, &[&read, &preload, &cold, &standing])?;
        // Of the two ways to load whole models the faster one, in every round.
        let in_turn = mapped.first.min(read.first);
        figures.sooner("models.first_standing", standing.first, in_turn)?;
        figures.sooner("models.first_cold", cold.first, in_turn)?;
        let two = |way| trial(way, budget as u64, false);
        let (mapped, read) = (two(Way::Mapped)?, two(Way::Read)?);
        let (cold_two, standing_two) = (two(Way::Cold)?, two(Way::Standing)?);
        expect_same_tokens(&mapped, &[&read, &cold_two, &standing_two])?;
        let in_turn = mapped.first.min(read.first);
        figures.sooner("models.two_standing", standing_two.first, in_turn)?;
        figures.sooner("models.two_cold", cold_two.first, in_turn)?;
        figures.more("models.speed_standing", standing.speed(), preload.speed())?;
        let with_opening = preload.tokens as f64 / (preload.opening + preload.all);
        figures.more("models.speed_cold", cold.speed(), with_opening)?;
        let most = cold.peak.max(standing.peak) as f64;
        figures.add_pair("models.memory", 100.0 * most / budget, most / 1e6, budget / 1e6)?;
    }
    Ok(())
}

fn expect_same_tokens(one: &RunResult, others: &[&RunResult]) -> anyhow::Result<()> {
    for other in others {
        ensure!(one.said == other.said, "ways say different tokens: {} and {}", one.said, other.said);
    }
    Ok(())
}

/// Models of so many megabytes together, made where they are not there yet.
fn made(setup: &Setup, megabytes: usize) -> anyhow::Result<PathBuf> {
    let folder = setup.out.join("models").join(format!("three-{megabytes}"));
    let vocab = if megabytes < SMALL { 2048 } else { 32_000 };
    once(&folder, |folder| {
        for (seed, (name, part, layers, _)) in MODELS.into_iter().enumerate() {
            let made = SyntheticModel::with_bytes(megabytes * 1_000_000 * part / ALL_PARTS, layers, vocab);
            made.write(&folder.join(name), seed as u64 + 1)?;
        }
        Ok(())
    })?;
    Ok(folder)
}

impl Trial {
    /// Runs the trial in a process of its own, with nothing in the page cache.
    fn measured(self) -> anyhow::Result<RunResult> {
        for (name, ..) in MODELS {
            Checkpoint::open(self.folder.join(name))?.evict()?;
        }
        child::asked(&Task::new(TaskKind::Models, &self)?, None)
    }

    /// Runs the trial in this process.
    pub fn run(&self) -> anyhow::Result<RunResult> {
        let began = Instant::now();
        let ran = match self.way {
            Way::Mapped => self.in_turn(began, mapped)?,
            Way::Read => self.in_turn(began, read)?,
            Way::Preload => {
                let mut core = core()?;
                for (name, ..) in MODELS {
                    core.add(name, mapped(&self.folder.join(name))?)?;
                }
                let opening = began.elapsed().as_secs_f64();
                RunResult { opening, ..self.asked(core, Instant::now())? }
            }
            Way::Cold => self.interleaved(began, false)?,
            Way::Standing => self.interleaved(began, true)?,
        };
        let peak =
            peak_resident_bytes().context("this system does not say how much memory a process took")?;
        Ok(RunResult { peak, tokens: self.answers().map(|(_, tokens)| tokens).sum(), ..ran })
    }

    /// Who is asked, and how many tokens each says.
    fn answers(&self) -> impl Iterator<Item = (&'static str, usize)> {
        let is_asked = |name: &str| self.with_fallback || name != FALLBACK;
        let asked = MODELS.into_iter().filter(move |(name, ..)| is_asked(name));
        asked.map(|(name, .., tokens)| (name, tokens.min(self.most_tokens)))
    }

    fn in_turn(
        &self,
        began: Instant,
        load: impl Fn(&Path) -> anyhow::Result<Model>,
    ) -> anyhow::Result<RunResult> {
        let (mut said, mut first, mut opening) = (Vec::new(), Duration::ZERO, Duration::ZERO);
        for (name, tokens) in self.answers() {
            let since = Instant::now();
            let model = load(&self.folder.join(name))?;
            opening += since.elapsed();
            let mut session = model.session()?;
            let mut generation = Generation::begin(&mut session, None, &prompt(), config(tokens))?;
            let mut count = 0;
            while generation.next_piece()?.is_some() {
                count += 1;
                if count == 1 {
                    first = began.elapsed();
                }
            }
            said.push(generation.finish()?.tokens);
        }
        Ok(RunResult {
            opening: opening.as_secs_f64(),
            first: first.as_secs_f64(),
            all: began.elapsed().as_secs_f64(),
            said: digest(&said),
            ..RunResult::default()
        })
    }

    fn interleaved(&self, began: Instant, stands: bool) -> anyhow::Result<RunResult> {
        let mut core = core()?;
        let shared = SharedBudget::new(self.budget)?;
        // As long as the answers are.
        let options =
            ShareOptions { context: Some(128), rows: PROMPT, preload: stands, ..ShareOptions::default() };
        for (name, ..) in MODELS {
            let (shared, path, cpu) = (shared.clone(), self.folder.join(name), device("cpu")?);
            match name {
                "router" | "specialist" => core.add(name, shared.open(path, &cpu, &options)?)?,
                // Rarely used.
                _ => {
                    let options = ShareOptions { preload: false, ..options.clone() };
                    core.add_later(name, move || shared.open(&path, &cpu, &options))?;
                }
            }
        }
        let opening = if stands { began.elapsed().as_secs_f64() } else { 0.0 };
        let ran = self.asked(core, if stands { Instant::now() } else { began })?;
        let held = shared.budget().most_held();
        ensure!(held <= self.budget, "{held} bytes were charged to a budget of {}", self.budget);
        Ok(RunResult { opening, ..ran })
    }

    /// Asks all at once.
    fn asked(&self, mut core: EngineCore, began: Instant) -> anyhow::Result<RunResult> {
        let clock = WallClock::default();
        let specialist = self.answers().count() - 1;
        let mut said = vec![Vec::new(); specialist + 1];
        let mut asked = Vec::new();
        for (name, tokens) in self.answers() {
            let request =
                Request::new(name, prompt()).with_config(config(tokens)).with_priority(Priority::Interactive);
            asked.push(core.submit(request, clock.now()).map_err(|failure| failure.error)?);
        }
        let (mut first, mut error) = (Duration::ZERO, None);
        loop {
            let worked = core.work(&clock, &mut |id, event| {
                let Some(which) = asked.iter().position(|asked| *asked == id) else { return };
                match event {
                    Event::Piece(piece) => {
                        if which == specialist && said[which].is_empty() {
                            first = began.elapsed();
                        }
                        said[which].extend(piece.token);
                    }
                    Event::Failed(failure) => error = Some(failure.error),
                    _ => {}
                }
            });
            if let Some(error) = error.take() {
                return Err(error.into());
            }
            match worked {
                StepOutcome::Layer { .. } => {}
                StepOutcome::Waiting => std::thread::sleep(Duration::from_micros(100)),
                StepOutcome::Idle => break,
            }
        }
        Ok(RunResult {
            first: first.as_secs_f64(),
            all: began.elapsed().as_secs_f64(),
            said: digest(&said),
            ..RunResult::default()
        })
    }
}

/// Returns a core without prefix sharing, since no prompt is asked twice.
fn core() -> anyhow::Result<EngineCore> {
    let prefixes = PrefixLimits { pages: 0, ..PrefixLimits::default() };
    Ok(EngineCore::new(EngineConfig { prefixes, ..EngineConfig::default() })?)
}

/// Opened, and all of it in memory: the plain way.
fn mapped(path: &Path) -> anyhow::Result<Model> {
    let model = Model::open(path, &device("cpu")?)?;
    for segment in model.checkpoint().segments() {
        model.checkpoint().populate(segment.id)?;
    }
    Ok(model)
}

fn streaming(method: ReadMethod) -> StreamedConfig {
    StreamedConfig { method: Some(method), rate: Some(1e9), ..StreamedConfig::default() }
}

/// Read into memory of its own.
fn read(path: &Path) -> anyhow::Result<Model> {
    let model = Model::streamed(Checkpoint::open(path)?, &device("cpu")?, &streaming(ReadMethod::Direct))?;
    let decoder = model.decoder()?;
    let streamed = decoder.streamed().context("it streams")?;
    streamed.set_buffers(0);
    for part in 0..streamed.parts() {
        streamed.load(part)?;
    }
    Ok(model)
}

fn prompt() -> Vec<u32> {
    (0..PROMPT as u32).map(|at| 3 + at * 97 % 2000).collect()
}

fn config(tokens: usize) -> GenerationConfig {
    GenerationConfig::new()
        .with_max_tokens(tokens)
        .with_ignore_end(true)
        .with_sampler(SamplerConfig::greedy())
}

fn digest(said: &[Vec<u32>]) -> String {
    let all =
        said.iter().flatten().fold(0u64, |all, &token| all.wrapping_mul(0x0100_0000_01b3) ^ u64::from(token));
    format!("{all:x} of {:?}", said.iter().map(Vec::len).collect::<Vec<_>>())
}
