//! Measures what reuse saves: a prefix opened from its file beside computing it; two conversations that take turns beside
//! one that goes on, and beside computing the other one again; a branch; and what masks cost.

use std::hint::black_box;
use std::time::Instant;

use anyhow::ensure;
use firebox_runtime::{
    KvType, Model, Origin, PersistentPrefix, PrefixOptions, Role, RuntimeError, Session, TurnId, device,
};

use crate::figure::{Declared, Figures, alone, compared, spread, times};
use crate::setup::Setup;

pub const FIGURES: &[Declared] = &[
    times("streams.prefix_f32", "ms", "computing it"),
    times("streams.prefix_f16", "ms", "computing it"),
    times("streams.prefix_int8", "ms", "computing it"),
    times("streams.prefix_first", "ms", "computing it"),
    compared("streams.switch", "ms", "ms", "two tokens of one"),
    times("streams.switch_saves", "ms", "computing the other again"),
    alone("streams.fork", "µs"),
    compared("streams.mask", "%", "ms", "all visible"),
    compared("streams.half_masked", "%", "ms", "all visible"),
];

/// Tokens of a prefix, and of a conversation.
const TOKENS: (usize, usize) = (512, 48);

/// Turns of the conversation that is masked, and tokens of each.
const TURNS: u32 = 24;
const TURN: usize = 64;

/// The number of repetitions of short operations in a round.
const SHORT: usize = 9;
const FORKS: u32 = 1000;

pub fn measure(setup: &Setup, figures: &mut Figures) -> anyhow::Result<()> {
    let model = Model::open(setup.q4(), &device("cpu")?)?;
    let streams = Streams { model, tokens: setup.usual_or(TOKENS.0, TOKENS.1) };
    let mut masked = streams.masked()?;
    for _ in 0..setup.rounds {
        streams.prefix(figures)?;
        streams.switch(figures)?;
        streams.fork(figures)?;
        masked.measure(figures)?;
    }
    Ok(())
}

struct Streams {
    model: Model,
    tokens: usize,
}

impl Streams {
    fn text(&self, seed: u32) -> Vec<u32> {
        (0..self.tokens as u32).map(|i| 3 + (seed + i * 31) % 150).collect()
    }

    fn begun(&self, seed: u32) -> Result<Session, RuntimeError> {
        let mut session = self.model.session()?;
        session.feed(&self.text(seed))?;
        Ok(session)
    }

    fn prefix(&self, figures: &mut Figures) -> anyhow::Result<()> {
        let folder = tempfile::tempdir()?;
        let text = self.text(0);
        for (kept, name) in [
            (KvType::F32, "streams.prefix_f32"),
            (KvType::F16, "streams.prefix_f16"),
            (KvType::Int8, "streams.prefix_int8"),
        ] {
            let options = PrefixOptions { kv_type: kept, capacity: self.tokens };
            PersistentPrefix::open_or_build(folder.path(), &self.model, &text, options)?;
            let opened = || -> anyhow::Result<Session> {
                let prefix = PersistentPrefix::open_or_build(folder.path(), &self.model, &text, options)?;
                ensure!(
                    matches!(prefix.origin(), Origin::Opened),
                    "a prefix that was just written is not found"
                );
                Ok(self.model.session()?.with_kv_type(kept).with_prefix(&prefix)?)
            };
            let computed = || -> anyhow::Result<Session> {
                let mut session = self.model.session()?.with_kv_type(kept);
                session.add_fact(&text)?;
                Ok(session)
            };
            let (baseline, mut session) = timed(computed)?;
            let (first_baseline, _) = timed(|| Ok(session.feed(&[5])?))?;
            let ours = often(|| Ok(timed(opened)?.0))?;
            figures.sooner(name, ours, baseline)?;
            if kept == KvType::F16 {
                let first = often(|| Ok(timed(|| Ok(opened()?.feed(&[5])?))?.0))?;
                figures.sooner("streams.prefix_first", first, baseline + first_baseline)?;
            }
        }
        Ok(())
    }

    fn switch(&self, figures: &mut Figures) -> anyhow::Result<()> {
        let mut sessions = [self.begun(1)?, self.begun(2)?];
        // Back again, so that all tokens see as many.
        let say = |session: &mut Session| -> anyhow::Result<()> {
            black_box(session.feed(&[5])?);
            session.rewind(self.tokens);
            Ok(())
        };
        let (mut one, mut both) = (Vec::new(), Vec::new());
        for _ in 0..SHORT {
            one.push(timed(|| say(&mut sessions[0]).and_then(|()| say(&mut sessions[0])))?.0);
            both.push(timed(|| say(&mut sessions[0]).and_then(|()| say(&mut sessions[1])))?.0);
        }
        let (one, both) = (spread(one).median, spread(both).median);
        let again = timed(|| Ok(self.begun(2)?))?.0;
        // A pair of tokens has a switch in its middle and another before the next pair.
        let switch = (both - one) / 2.0;
        figures.add_pair("streams.switch", switch, both, one)?;
        // The token of the other conversation either way.
        figures.sooner("streams.switch_saves", both - one / 2.0, again + one / 2.0)
    }

    /// A branch of a conversation, begun and ended.
    fn fork(&self, figures: &mut Figures) -> anyhow::Result<()> {
        let session = self.begun(1)?;
        let pages = session.cache().pool().pages();
        let (all, ()) = timed(|| {
            (0..FORKS).for_each(|_| drop(black_box(session.clone())));
            Ok(())
        })?;
        ensure!(session.cache().pool().pages() == pages, "a fork took a page");
        figures.add("streams.fork", 1e3 * all / f64::from(FORKS))
    }

    /// A conversation of turns, and two branches of it with turns hidden.
    fn masked(&self) -> anyhow::Result<Masked> {
        let mut session = self.model.session()?;
        let length = TURN.min(self.tokens);
        let mut turns: Vec<TurnId> = Vec::new();
        for turn in 0..TURNS {
            turns.push(session.begin_turn(&[Role::User])?);
            session.feed(&self.text(turn)[..length])?;
        }
        let hiding = |hidden: &[TurnId]| -> anyhow::Result<Session> {
            let mut branch = session.clone();
            for turn in hidden {
                branch.mask(*turn, true)?;
            }
            Ok(branch)
        };
        let half: Vec<TurnId> = turns.iter().copied().step_by(2).collect();
        let (one, half) = (hiding(&turns[..1])?, hiding(&half)?);
        Ok(Masked { visible: session, one, half })
    }
}

/// One conversation in three sessions: with all turns visible, with one turn hidden, and with every other turn hidden.
struct Masked {
    visible: Session,
    one: Session,
    half: Session,
}

impl Masked {
    fn measure(&mut self, figures: &mut Figures) -> anyhow::Result<()> {
        let say = |session: &mut Session| -> anyhow::Result<f64> {
            let held = session.tokens().len();
            let (took, _) = timed(|| Ok(black_box(session.feed(&[5])?)))?;
            session.rewind(held);
            Ok(took)
        };
        let (mut visible, mut one, mut half) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..SHORT {
            visible.push(say(&mut self.visible)?);
            one.push(say(&mut self.one)?);
            half.push(say(&mut self.half)?);
        }
        let [visible, one, half] = [visible, one, half].map(|times| spread(times).median);
        for (name, took) in [("streams.mask", one), ("streams.half_masked", half)] {
            figures.add_pair(name, 100.0 * (took / visible - 1.0), took, visible)?;
        }
        Ok(())
    }
}

/// Returns the milliseconds that some work took, and its result.
fn timed<T>(work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<(f64, T)> {
    let began = Instant::now();
    let done = work()?;
    Ok((1e3 * began.elapsed().as_secs_f64(), done))
}

/// Returns the median of [`SHORT`] repetitions of a short measurement.
fn often(measure: impl Fn() -> anyhow::Result<f64>) -> anyhow::Result<f64> {
    Ok(spread((0..SHORT).map(|_| measure()).collect::<Result<Vec<_>, _>>()?).median)
}
