//! Compares changing heads with opening the model anew, and measures the cost of decoding with a head.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context as _;
use firebox_eval::SwapTimings;
use firebox_runtime::heads::HeadPoolConfig;
use firebox_runtime::residency::disk_rate;
use firebox_runtime::{Model, Session, device, resident_bytes};
use firebox_store::Heads;
use serde::{Deserialize, Serialize};

use crate::child::{self, Task, TaskKind};
use crate::figure::{Declared, Figures, compared, times};
use crate::setup::{HEAD, Setup};

pub const FIGURES: &[Declared] = &[
    times("heads.warm", "ms", "opening the model"),
    times("heads.warm_first", "ms", "opening the model, to the first token"),
    times("heads.cold", "ms", "opening the model"),
    times("heads.cold_first", "ms", "opening the model, to the first token"),
    times("heads.fallback", "ms", "opening the model"),
    times("heads.fallback_first", "ms", "opening the model, to the first token"),
    times("heads.beside_reading", "ms", "reading as many bytes"),
    compared("heads.memory", "%", "MB", "trunk and heads"),
    times("heads.speed", "tok/s", "the model alone"),
];

/// Rounds are short.
const ROUNDS: usize = 7;

/// Tokens that were said before.
const DEPTH: u32 = 16;

/// Rounds of decoding with a head and without one, in turn, and the tokens of each.
const DECODING: (usize, usize) = (15, 32);

/// Pairs of processes whose memory is compared.
const PEAKS: usize = 5;

/// A decoding task for a child process, either with a selected head and all other heads in memory, or with the plain model.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HeadTask {
    model: PathBuf,
    head: Option<String>,
}

/// The memory that such a task took, in bytes.
#[derive(Debug, Serialize, Deserialize)]
pub struct HeadMemory {
    resident: u64,
    /// The part of `resident` that loaded heads take.
    heads: u64,
}

impl HeadTask {
    /// Decodes in this process.
    pub fn run(&self) -> anyhow::Result<HeadMemory> {
        let (model, mut session) = self.session()?;
        decode(&mut session, DECODING.1)?;
        // Not the most it ever took: that is while the model is opened, without heads.
        let resident =
            resident_bytes().context("this system does not say how much memory a process takes")?;
        Ok(HeadMemory { resident, heads: model.heads().map_or(0, |head_pool| head_pool.bytes()) })
    }

    fn session(&self) -> anyhow::Result<(Model, Session)> {
        let model = Model::open(&self.model, &device("cpu")?)?;
        let Some(head) = &self.head else {
            let session = model.session()?;
            return Ok((model, session));
        };
        let model = model.with_heads(HeadPoolConfig::default())?;
        if let Some(head_pool) = model.heads() {
            head_pool.names().iter().for_each(|name| head_pool.prefetch(name));
            head_pool.wait_until_idle();
        }
        let mut session = model.session()?;
        session.use_head(head).fallback_reason.map_or(Ok(()), Err)?;
        Ok((model, session))
    }
}

/// Tokens a second behind a short prompt.
fn decode(session: &mut Session, tokens: usize) -> anyhow::Result<f64> {
    session.feed(&prompt())?;
    let began = Instant::now();
    (0..tokens).try_for_each(|_| session.feed(&[1]).map(drop))?;
    Ok(tokens as f64 / began.elapsed().as_secs_f64())
}

fn prompt() -> Vec<u32> {
    (1..=DEPTH).collect()
}

pub fn measure(setup: &Setup, figures: &mut Figures) -> anyhow::Result<()> {
    let (path, cpu) = (setup.q4(), device("cpu")?);
    let bytes = Heads::open(&path)?.head(HEAD)?.bytes();
    let prompt = prompt();
    for _ in 0..setup.usual_or(ROUNDS, 1) {
        let (changes, model) = SwapTimings::measure(&path, &cpu, HEAD, &prompt)?;
        let reading = bytes as f64 / disk_rate(model.checkpoint())?;
        // Changes that are timed up to the first token are compared with opening the model up to its first token.
        let (reload, first) = (changes.reload, changes.reload_first_token);
        for (name, seconds, opening) in [
            ("heads.warm", changes.warm, reload),
            ("heads.warm_first", changes.warm_first_token, first),
            ("heads.cold", changes.cold, reload),
            ("heads.cold_first", changes.cold_first_token, first),
            ("heads.fallback", changes.fallback, reload),
            ("heads.fallback_first", changes.fallback_first_token, first),
        ] {
            figures.sooner(name, 1e3 * seconds, 1e3 * opening)?;
        }
        figures.more("heads.beside_reading", 1e3 * changes.cold, 1e3 * reading)?;
    }
    let alone = HeadTask { model: path.clone(), head: None };
    let with_head = HeadTask { model: path, head: Some(HEAD.into()) };
    for _ in 0..setup.usual_or(PEAKS, 1) {
        memory(&alone, &with_head, bytes, figures)?;
    }
    speed(&alone, &with_head, setup.usual_or(DECODING.0, 1), figures)
}

/// Compares the memory of a process that decodes with a head to that of the plain model plus the loaded heads.
fn memory(alone: &HeadTask, with_head: &HeadTask, own: u64, figures: &mut Figures) -> anyhow::Result<()> {
    let in_child = |task: &HeadTask| child::asked::<HeadMemory>(&Task::new(TaskKind::Head, task)?, None);
    let (alone, with) = (in_child(alone)?, in_child(with_head)?);
    let allowed = alone.resident - own + with.heads;
    let percent = 100.0 * with.resident as f64 / allowed as f64;
    figures.add_pair("heads.memory", percent, with.resident as f64 / 1e6, allowed as f64 / 1e6)
}

fn speed(alone: &HeadTask, with_head: &HeadTask, rounds: usize, figures: &mut Figures) -> anyhow::Result<()> {
    // Kept, so that the head stays in memory from one round to the next.
    let ((alone, _own), (with_head, _with)) = (alone.session()?, with_head.session()?);
    let speed_alone = || decode(&mut alone.session()?, DECODING.1);
    let speed_with_head = || {
        let mut session = with_head.session()?;
        session.use_head(HEAD).fallback_reason.map_or(Ok(()), Err)?;
        decode(&mut session, DECODING.1)
    };
    for round in 0..rounds {
        // The order alternates, since each run finds the machine in the state that the other left.
        let (with, alone) = if round % 2 == 0 {
            let alone = speed_alone()?;
            (speed_with_head()?, alone)
        } else {
            (speed_with_head()?, speed_alone()?)
        };
        figures.more("heads.speed", with, alone)?;
    }
    Ok(())
}
