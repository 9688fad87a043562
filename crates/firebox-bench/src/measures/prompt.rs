//! Measures how much a long prompt delays other answers of the same model.

use std::time::Duration;

use anyhow::Context as _;
use firebox_engine::{Clock, EngineCore, RequestId, StepOutcome, WallClock};
use firebox_runtime::{Model, device};

use crate::figure::{Declared, Figures, compared, times};
use crate::measures::concurrency::{PROMPT, RequestLog, TOKENS, core, quantile, request, submit};
use crate::setup::Setup;

/// The default number of prompt tokens, in usual and in quick runs.
const LONG: (usize, usize) = (2048, 48);

/// Tokens at the start of the first answer during which the core finds its pace.
const SETTLING: usize = 8;

/// Answers that are measured without the prompt, at most: a long one takes half an hour, and as many again say no more.
const MOST_ALONE: usize = 50;

pub const FIGURES: &[Declared] = &[
    times("prompt.beside", "ms", "alone"),
    times("prompt.first", "ms", "alone"),
    compared("prompt.speed", "tok/s", "tok/s", "the answers beside it"),
];

pub fn measure(setup: &Setup, figures: &mut Figures) -> anyhow::Result<()> {
    let model = Model::open(setup.q4(), &device("cpu")?)?;
    let long = setup.long.unwrap_or(setup.usual_or(LONG.0, LONG.1));
    for _ in 0..setup.rounds {
        Reader::new(&model, setup.usual_or(TOKENS.0, TOKENS.1))?.beside(long, figures)?;
    }
    Ok(())
}

/// A client that requests one answer after another.
struct Reader {
    core: EngineCore,
    clock: WallClock,
    log: RequestLog,
    vocab: usize,
    /// Tokens of an answer.
    tokens: usize,
    asked: usize,
}

/// The delays that a [`Reader`] observes in its answers.
#[derive(Default)]
struct Noticed {
    /// From the question to the first token.
    firsts: Vec<Duration>,
    /// From one token to the next.
    gaps: Vec<Duration>,
}

impl Reader {
    fn new(model: &Model, tokens: usize) -> anyhow::Result<Self> {
        let vocab = model.decoder()?.config().vocab_size;
        let (core, clock, log) = (core(model)?, WallClock::default(), RequestLog::default());
        Ok(Self { core, clock, log, vocab, tokens, asked: 0 })
    }

    fn ask(&mut self) -> anyhow::Result<(RequestId, Duration)> {
        self.asked += 1;
        let request = request("model", self.vocab, self.asked * 37, PROMPT, self.tokens);
        Ok((submit(&mut self.core, request, &self.clock)?, self.clock.now()))
    }

    fn work(&mut self) -> anyhow::Result<StepOutcome> {
        let (clock, log) = (&self.clock, &mut self.log);
        let worked = self.core.work(clock, &mut |id, event| log.record(clock, id, event));
        self.log.check().map(|()| worked)
    }

    fn said(&self, id: RequestId) -> &[Duration] {
        self.log.tokens.get(&id).map_or(&[], Vec::as_slice)
    }

    fn gaps(&self, id: RequestId) -> impl Iterator<Item = Duration> {
        self.said(id).windows(2).map(|pair| pair[1] - pair[0])
    }

    fn notice(&self, (id, asked): (RequestId, Duration), noticed: &mut Noticed) {
        noticed.firsts.extend(self.said(id).first().map(|first| first.saturating_sub(asked)));
        noticed.gaps.extend(self.gaps(id));
    }

    fn beside(mut self, long: usize, figures: &mut Figures) -> anyhow::Result<()> {
        let (settling, _) = self.ask()?;
        while self.said(settling).len() < SETTLING {
            self.work()?;
        }
        let began = self.clock.now();
        let prompt = request("model", self.vocab, 5, long, 1);
        let prompt = submit(&mut self.core, prompt, &self.clock)?;
        let mut disturbed = Noticed::default();
        let mut reading = None;
        while self.said(prompt).is_empty() {
            self.work()?;
            // When an answer is complete, the next one is requested.
            let (id, _) = reading.unwrap_or((settling, began));
            if self.said(id).len() == self.tokens {
                if let Some(read) = reading {
                    self.notice(read, &mut disturbed);
                }
                reading = Some(self.ask()?);
            }
        }
        let ended = self.clock.now();
        disturbed.gaps.extend(self.gaps(settling).skip(SETTLING - 1));
        let (last, _) = reading.unwrap_or((settling, began));
        if let Some(read) = reading {
            self.notice(read, &mut disturbed);
        }
        self.core.cancel(last, ended, &mut |_, _| {});
        while !matches!(self.work()?, StepOutcome::Idle) {}

        let mut undisturbed = Noticed::default();
        for _ in 0..disturbed.firsts.len().clamp(1, MOST_ALONE) {
            let alone = self.ask()?;
            while !matches!(self.work()?, StepOutcome::Idle) {}
            self.notice(alone, &mut undisturbed);
        }
        let slowest = |times: &mut [Duration]| quantile(times, 0.99).as_secs_f64() * 1e3;
        let took = (ended - began).as_secs_f64();
        let (fed, read) = (long as f64 / took, disturbed.gaps.len() as f64 / took);
        let (ours, baseline) = (slowest(&mut disturbed.gaps), slowest(&mut undisturbed.gaps));
        figures.add_pair("prompt.beside", ours / baseline, ours, baseline)?;
        if !disturbed.firsts.is_empty() {
            let median = |times: &mut [Duration]| quantile(times, 0.5).as_secs_f64() * 1e3;
            let (ours, baseline) = (median(&mut disturbed.firsts), median(&mut undisturbed.firsts));
            figures.add_pair("prompt.first", ours / baseline, ours, baseline)?;
        }
        figures.add_pair("prompt.speed", fed, fed, read).context("no time has passed")
    }
}
