//! What a long prompt is to those who read along with another answer of the same model.

use std::time::Duration;

use anyhow::Context as _;
use firebox_runtime::engine::{Clock, Host, RequestId, WallClock, Worked};
use firebox_runtime::{Model, device};

use crate::figure::{Declared, Figures, compared, times};
use crate::measures::requests::{Heard, PROMPT, TOKENS, host, quantile, request, submit};
use crate::setup::Setup;

/// Tokens of the prompt, if nobody says.
const LONG: (usize, usize) = (2048, 48);

/// The first tokens of the first answer come from a host that finds its pace.
const SETTLING: usize = 8;

/// Answers that are measured without the prompt, at most: a long one takes half an hour, and as many again say no more.
const MOST_ALONE: usize = 50;

pub const FIGURES: &[Declared] = &[
    times("prompt.beside", "ms", "alone"),
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

/// Somebody who has one answer after the other.
struct Reader {
    host: Host,
    clock: WallClock,
    heard: Heard,
    vocab: usize,
    /// Tokens of an answer.
    tokens: usize,
    asked: usize,
}

impl Reader {
    fn new(model: &Model, tokens: usize) -> anyhow::Result<Self> {
        let vocab = model.decoder()?.config().vocab_size;
        let (host, clock, heard) = (host(model)?, WallClock::default(), Heard::default());
        Ok(Self { host, clock, heard, vocab, tokens, asked: 0 })
    }

    fn ask(&mut self) -> anyhow::Result<RequestId> {
        self.asked += 1;
        let request = request("model", self.vocab, self.asked * 37, PROMPT, self.tokens);
        submit(&mut self.host, request, &self.clock)
    }

    fn work(&mut self) -> anyhow::Result<Worked> {
        let (clock, heard) = (&self.clock, &mut self.heard);
        let worked = self.host.work(clock, &mut |id, event| heard.hear(clock, id, event));
        self.heard.check().map(|()| worked)
    }

    fn said(&self, id: RequestId) -> &[Duration] {
        self.heard.tokens.get(&id).map_or(&[], Vec::as_slice)
    }

    /// What lay between the tokens of an answer.
    fn gaps(&self, id: RequestId) -> impl Iterator<Item = Duration> {
        self.said(id).windows(2).map(|pair| pair[1] - pair[0])
    }

    fn beside(mut self, long: usize, figures: &mut Figures) -> anyhow::Result<()> {
        let mut reading = self.ask()?;
        while self.said(reading).len() < SETTLING {
            self.work()?;
        }
        let began = self.clock.now();
        let prompt = request("model", self.vocab, 5, long, 1);
        let prompt = submit(&mut self.host, prompt, &self.clock)?;
        let (mut disturbed, mut answers) = (Vec::new(), 0);
        while self.said(prompt).is_empty() {
            self.work()?;
            // Whoever has read an answer asks for the next.
            if self.said(reading).len() == self.tokens {
                disturbed.extend(self.gaps(reading).skip(if answers == 0 { SETTLING } else { 0 }));
                answers += 1;
                reading = self.ask()?;
            }
        }
        let ended = self.clock.now();
        disturbed.extend(self.gaps(reading).skip(if answers == 0 { SETTLING } else { 0 }));
        self.host.cancel(reading, ended, &mut |_, _| {});
        while !matches!(self.work()?, Worked::Idle) {}

        let mut undisturbed = Vec::new();
        for _ in 0..answers.clamp(1, MOST_ALONE) {
            let alone = self.ask()?;
            while !matches!(self.work()?, Worked::Idle) {}
            undisturbed.extend(self.gaps(alone));
        }
        let slowest = |times: &mut Vec<Duration>| quantile(times, 0.99).as_secs_f64() * 1e3;
        let (ours, baseline) = (slowest(&mut disturbed), slowest(&mut undisturbed));
        figures.add_pair("prompt.beside", ours / baseline, ours, baseline)?;
        let took = (ended - began).as_secs_f64();
        let (fed, read) = (long as f64 / took, disturbed.len() as f64 / took);
        figures.add_pair("prompt.speed", fed, fed, read).context("no time has passed")
    }
}
