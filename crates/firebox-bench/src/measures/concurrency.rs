//! Measures how much concurrent requests of a model slow each other down, and what switching between models costs.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context as _, bail};
use firebox_engine::{
    Clock, EngineConfig, EngineCore, EngineError, Event, Request, RequestId, StepOutcome, WallClock,
};
use firebox_runtime::schedule::{Priority, ScheduleConfig};
use firebox_runtime::{GenerationConfig, Model, device};

use crate::energy::Energy;
use crate::figure::{Declared, Figures, compared, times};
use crate::setup::Setup;

pub const PROMPT: usize = 32;

/// Tokens of an answer.
pub const TOKENS: (usize, usize) = (200, 12);

/// So many requests at once.
const AT_ONCE: [(usize, &str); 4] =
    [(2, "requests.two"), (3, "requests.three"), (4, "requests.four"), (8, "requests.eight")];

pub const FIGURES: &[Declared] = &[
    times("requests.two", "tok/s", "one after the other"),
    times("requests.three", "tok/s", "one after the other"),
    times("requests.four", "tok/s", "one after the other"),
    times("requests.eight", "tok/s", "one after the other"),
    times("requests.each_of_three", "s", "alone"),
    times("requests.energy", "J/token", "one after the other"),
    compared("requests.switch", "µs", "µs", "another layer of the same model"),
    compared("requests.slowest_switch", "µs", "µs", "another layer of the same model"),
];

pub fn measure(setup: &Setup, figures: &mut Figures) -> anyhow::Result<()> {
    let model = Model::open(setup.q4(), &device("cpu")?)?;
    let tokens = setup.usual_or(TOKENS.0, TOKENS.1);
    together(&model, setup.rounds, tokens, figures)?;
    for _ in 0..setup.rounds {
        switching(&model, tokens, figures)?;
    }
    Ok(())
}

pub fn core(model: &Model) -> anyhow::Result<EngineCore> {
    let mut core = EngineCore::new(EngineConfig::default())?;
    core.add("model", model.clone())?;
    Ok(core)
}

pub fn request(model: &str, vocab: usize, from: usize, prompt: usize, tokens: usize) -> Request {
    let prompt = (0..prompt).map(|at| ((100 + (from + at) * 7919 % 6991) % vocab) as u32).collect();
    let config = GenerationConfig::new().with_max_tokens(tokens).with_ignore_end(true);
    Request::new(model, prompt).with_config(config).with_priority(Priority::Interactive)
}

pub fn submit(core: &mut EngineCore, request: Request, clock: &WallClock) -> anyhow::Result<RequestId> {
    Ok(core.submit(request, clock.now()).map_err(|failure| failure.error)?)
}

/// When the tokens of each request came.
#[derive(Default)]
pub struct RequestLog {
    pub tokens: HashMap<RequestId, Vec<Duration>>,
    last: Option<Duration>,
    failure: Option<EngineError>,
}

impl RequestLog {
    pub fn record(&mut self, clock: &WallClock, id: RequestId, event: Event) {
        match event {
            Event::Piece(piece) if piece.token.is_some() => {
                self.tokens.entry(id).or_default().push(clock.now());
            }
            Event::Finished(_) => self.last = Some(clock.now()),
            Event::Failed(failure) => self.failure = Some(failure.error),
            _ => {}
        }
    }

    /// A figure without a request that failed would be about something else.
    pub fn check(&mut self) -> anyhow::Result<()> {
        self.failure.take().map_or(Ok(()), |failure| Err(failure.into()))
    }
}

/// Runs until nothing is left. Returns the overhead of each step beside its layer: first of steps that continue the same
/// model, then of those that switch to another.
fn run(core: &mut EngineCore, clock: &WallClock, log: &mut RequestLog) -> anyhow::Result<[Vec<Duration>; 2]> {
    let mut overhead = [Vec::new(), Vec::new()];
    loop {
        let began = clock.now();
        match core.work(clock, &mut |id, event| log.record(clock, id, event)) {
            StepOutcome::Layer { took, switched } => {
                overhead[usize::from(switched)].push((clock.now() - began).saturating_sub(took));
            }
            StepOutcome::Waiting => std::thread::sleep(Duration::from_micros(100)),
            StepOutcome::Idle => return log.check().map(|()| overhead),
        }
    }
}

/// Seconds for so many requests, asked at once, none of which was asked before.
fn answered(
    core: &mut EngineCore,
    vocab: usize,
    asked: &mut usize,
    count: usize,
    tokens: usize,
) -> anyhow::Result<f64> {
    let (clock, mut log) = (WallClock::default(), RequestLog::default());
    let began = clock.now();
    for _ in 0..count {
        *asked += 1;
        submit(core, request("model", vocab, *asked * 37, PROMPT, tokens), &clock)?;
    }
    run(core, &clock, &mut log)?;
    Ok((log.last.context("nothing was answered")? - began).as_secs_f64())
}

fn together(model: &Model, rounds: usize, tokens: usize, figures: &mut Figures) -> anyhow::Result<()> {
    let vocab = model.decoder()?.config().vocab_size;
    // Pages stay with the core: memory that was never used before comes slowly.
    let (mut core, mut asked) = (core(model)?, 0);
    for count in [1].into_iter().chain(AT_ONCE.map(|(count, _)| count)) {
        answered(&mut core, vocab, &mut asked, count, tokens)?;
    }
    let energy = Energy::of_machine();
    if energy.is_none() {
        figures.leave_out("energy: this machine has no counter below /sys/class/powercap that may be read");
    }
    for _ in 0..rounds {
        for (count, name) in AT_ONCE {
            let begun = energy.as_ref().and_then(Energy::read);
            let mut in_turn = 0.0;
            for _ in 0..count {
                in_turn += answered(&mut core, vocab, &mut asked, 1, tokens)?;
            }
            let between = energy.as_ref().and_then(Energy::read);
            let at_once = answered(&mut core, vocab, &mut asked, count, tokens)?;
            let all = (count * tokens) as f64;
            figures.more(name, all / at_once, all / in_turn)?;
            if count != 3 {
                continue;
            }
            // All of them end together, so the time of all is that of each.
            let alone = in_turn / count as f64;
            figures.add_pair("requests.each_of_three", at_once / alone, at_once, alone)?;
            if let (Some(energy), Some(begun), Some(between)) = (&energy, begun, between) {
                let since =
                    |then| energy.since(then).context("the counter of energy cannot be read any more");
                let after = since(&between)?;
                let before = since(&begun)? - after;
                figures.sooner("requests.energy", after / all, before / all)?;
            }
        }
    }
    Ok(())
}

fn switching(model: &Model, tokens: usize, figures: &mut Figures) -> anyhow::Result<()> {
    let vocab = model.decoder()?.config().vocab_size;
    let schedule = ScheduleConfig { quantum: Duration::from_millis(1), ..ScheduleConfig::default() };
    let mut core = EngineCore::new(EngineConfig { schedule, ..EngineConfig::default() })?;
    for name in ["one", "other"] {
        core.add(name, model.clone())?;
    }
    let (clock, mut log) = (WallClock::default(), RequestLog::default());
    for name in ["one", "other"] {
        submit(&mut core, request(name, vocab, 7, PROMPT, tokens), &clock)?;
    }
    let [mut same, mut switched] = run(&mut core, &clock, &mut log)?;
    if same.is_empty() || switched.is_empty() {
        bail!("two models took no turns");
    }
    for (name, share) in [("requests.switch", 0.5), ("requests.slowest_switch", 0.99)] {
        let micros = |times: &mut Vec<Duration>| quantile(times, share).as_secs_f64() * 1e6;
        let (ours, baseline) = (micros(&mut switched), micros(&mut same));
        figures.add_pair(name, ours, ours, baseline)?;
    }
    Ok(())
}

pub fn quantile(times: &mut [Duration], share: f64) -> Duration {
    times.sort_unstable();
    let at = ((times.len() as f64 * share) as usize).min(times.len().saturating_sub(1));
    times.get(at).copied().unwrap_or_default()
}
