//! Decides how many layers stay in memory while a model runs.
//!
//! A plan says which layers should be kept. The [`Governor`] looks on: after every step it is told what the step cost, and
//! now and then it asks how short memory is. When memory gets short it lets layers go, when that is over it keeps them
//! again, a few at a time. What the system says about memory may be wrong, but what a step costs is not: a
//! residency that makes steps dearer than reading all weights anew is given up, whatever is said to be available.

mod config;
mod event;
mod interval;
mod pace;
mod patience;
mod watch;

pub use config::{GovernorConfig, ResidencyPlan};
pub use event::Event;

use std::cmp::Reverse;
use std::collections::HashSet;
use std::error::Error;
use std::time::Duration;

use interval::Interval;
use pace::{Pace, Thrash};
use patience::Patience;
use watch::Watch;

use crate::pressure::{Level, Pressure, PressureSource};

/// When memory gets short, a quarter of what is kept goes: enough to be felt, and more follows while it stays short.
const SHED_PART: usize = 4;
/// An eighth of the plan is kept at once, so that the way back takes eight checks, and a step too far is a small one.
const GROWTH_PART: usize = 8;

/// What can be resident or not, one layer at a time.
pub trait Residency {
    /// How many layers there are.
    fn layers(&self) -> usize;
    /// Whether a layer stays in memory.
    fn is_kept(&self, layer: usize) -> bool;
    /// Bytes that keeping the layer takes.
    fn bytes(&self, layer: usize) -> u64;
    /// The larger, the sooner the layer goes. The last one is the one that a pass comes to last, so that there is most time to read
    /// it.
    fn rank(&self, layer: usize) -> usize {
        layer
    }
    /// Lets a layer stay in memory from now on.
    fn keep(&mut self, layer: usize) -> Result<(), Box<dyn Error + Send + Sync>>;
    /// Lets a layer go; from now on it is read whenever it is needed.
    fn let_go(&mut self, layer: usize);
}

/// Keeps as many of the planned layers in memory as there is room for.
pub struct Governor {
    plan: ResidencyPlan,
    config: GovernorConfig,
    watch: Watch,
    check: Interval,
    pace: Pace,
    patience: Patience,
    trial: Option<Trial>,
}

/// Layers that were let go of only to see what streaming costs.
struct Trial {
    layers: Vec<usize>,
    /// What a step took with them.
    step_time: Duration,
}

impl Governor {
    /// Looks after a residency that was planned. The caller keeps what is planned, or as much of it as it likes: the rest
    /// is kept when things have been calm for a while.
    pub fn new(
        mut plan: ResidencyPlan,
        sources: Vec<Box<dyn PressureSource>>,
        config: GovernorConfig,
    ) -> Self {
        // No layer is kept twice.
        let mut named = HashSet::new();
        plan.keep.retain(|&layer| named.insert(layer));
        Self {
            watch: Watch::new(sources, Interval::new(config.poll_tokens, config.poll_time)),
            check: Interval::new(config.check_tokens, config.check_time),
            pace: Pace::new(plan.step_time, plan.streaming_step_time),
            patience: Patience::default(),
            trial: None,
            plan,
            config,
        }
    }

    /// Looks at a step of decoding, a pass through all layers, and acts on it where that is called for.
    ///
    /// `tokens` is how many tokens came of it, `major_faults` how many pages this process had to wait for during it.
    pub fn after_step(
        &mut self,
        tokens: usize,
        step_time: Duration,
        major_faults: u64,
        residency: &mut dyn Residency,
    ) -> Vec<Event> {
        self.pace.record(step_time, major_faults);
        self.act(tokens, step_time, true, residency)
    }

    /// Looks at a pass whose cost says nothing about a step: a prompt, or several sequences at once.
    pub fn after_pass(&mut self, tokens: usize, time: Duration, residency: &mut dyn Residency) -> Vec<Event> {
        self.act(tokens, time, false, residency)
    }

    fn act(
        &mut self,
        tokens: usize,
        time: Duration,
        is_step: bool,
        residency: &mut dyn Residency,
    ) -> Vec<Event> {
        if tokens > 0 {
            self.patience.passed();
        }
        let due = self.check.passes(tokens, time);
        let rose = self.watch.look(tokens, time, due);
        let kept: Vec<usize> = (0..residency.layers()).filter(|&layer| residency.is_kept(layer)).collect();
        if rose {
            return self.relieve(&kept, residency);
        }
        if is_step && let Some(thrash) = self.pace.thrash(self.share_of_plan(kept.len())) {
            return self.retreat(thrash, &kept, residency);
        }
        if is_step && kept.is_empty() {
            let events = self.conclude(residency);
            if !events.is_empty() {
                return events;
            }
        }
        if due { self.regular_check(&kept, residency) } else { Vec::new() }
    }

    /// Lets layers go at once, in the middle of a step too, because somebody has seen that memory is short.
    pub fn alarmed(&mut self, pressure: Pressure, residency: &mut dyn Residency) -> Vec<Event> {
        self.watch.see(pressure);
        let kept: Vec<usize> = (0..residency.layers()).filter(|&layer| residency.is_kept(layer)).collect();
        if pressure.level == Level::None { Vec::new() } else { self.relieve(&kept, residency) }
    }

    /// How short memory was when it was last looked at.
    pub fn pressure(&self) -> Pressure {
        self.watch.pressure()
    }

    /// What a step costs with nothing kept: as measured, or else as expected.
    pub fn streaming_step_time(&self) -> Duration {
        self.pace.streaming()
    }

    /// What the governor works towards.
    pub fn plan(&self) -> &ResidencyPlan {
        &self.plan
    }

    /// What is done at regular intervals.
    fn regular_check(&mut self, kept: &[usize], residency: &mut dyn Residency) -> Vec<Event> {
        let mut events = Vec::new();
        if kept.is_empty() {
            events.extend(self.pace.learn().map(|step_time| Event::Learned { step_time }));
        }
        if self.watch.pressure().level == Level::None {
            self.patience.calm();
            events.extend(self.grow(kept.len(), residency));
        } else {
            events.extend(self.relieve(kept, residency));
        }
        events
    }

    /// Lets layers go because memory is short.
    fn relieve(&mut self, kept: &[usize], residency: &mut dyn Residency) -> Vec<Event> {
        self.trial = None;
        if kept.is_empty() {
            self.patience.disturbed();
            return Vec::new();
        }
        self.patience.pressed(kept.len());
        let Pressure { level, available } = self.watch.pressure();
        let (cause, count) = match level {
            Level::Critical => (Event::Emergency { available }, kept.len()),
            _ => (Event::Short { available }, kept.len().div_ceil(SHED_PART)),
        };
        vec![cause, self.shed(count, kept, residency)]
    }

    /// Lets layers go because keeping them costs more than it saves.
    fn retreat(&mut self, thrash: Thrash, kept: &[usize], residency: &mut dyn Residency) -> Vec<Event> {
        // Without layers kept it shows what streaming costs, and until it has been seen there is nothing to compare with.
        let all = thrash.dearer_than_streaming || !self.pace.streaming_is_measured();
        let count = if all { kept.len() } else { kept.len().div_ceil(2) };
        let Thrash { step_time, expected, major_faults, .. } = thrash;
        if major_faults == 0 && !self.pace.streaming_is_measured() {
            self.trial = Some(Trial { layers: kept.to_vec(), step_time });
        } else {
            self.patience.failed(kept.len());
        }
        vec![Event::Thrash { step_time, expected, major_faults }, self.shed(count, kept, residency)]
    }

    /// Keeps the layers of a trial again if steps without them are dearer.
    fn conclude(&mut self, residency: &mut dyn Residency) -> Vec<Event> {
        let Some(trial) = &self.trial else { return Vec::new() };
        let Some(is_dearer) = self.pace.learn_if_dearer(trial.step_time) else { return Vec::new() };
        let was_kept = |layer: &usize| trial.layers.contains(layer);
        let layers: Vec<usize> = self.plan.keep.iter().copied().filter(was_kept).collect();
        self.trial = None;
        if !is_dearer {
            self.patience.failed(layers.len());
            return Vec::new();
        }
        // What was seen last was seen while they took their memory.
        self.watch.look(0, Duration::ZERO, true);
        if self.watch.pressure().level != Level::None {
            return self.relieve(&[], residency);
        }
        let mut events = vec![Event::Learned { step_time: self.pace.streaming() }];
        events.extend(self.keep(layers, 0, residency));
        events
    }

    /// Lets those layers go that rank last.
    fn shed(&mut self, count: usize, kept: &[usize], residency: &mut dyn Residency) -> Event {
        let mut layers = kept.to_vec();
        layers.sort_by_key(|&layer| Reverse(residency.rank(layer)));
        layers.truncate(count);
        layers.iter().for_each(|&layer| residency.let_go(layer));
        self.begin_again();
        self.check.begin_again();
        Event::Shed { layers }
    }

    /// Residency is another now; what it was has cost what it has.
    fn begin_again(&mut self) {
        self.patience.lost(self.pace.lost());
        self.pace.begin_again();
    }

    /// Keeps more of the plan, as far as patience and memory go.
    fn grow(&mut self, kept: usize, residency: &mut dyn Residency) -> Vec<Event> {
        let most = self.growth(kept);
        let missing = |layer: &usize| *layer < residency.layers() && !residency.is_kept(*layer);
        let missing = self.plan.keep.iter().copied().filter(missing).take(most).collect();
        self.keep(missing, kept, residency)
    }

    /// Keeps layers, as far as memory goes, beside so many that are kept.
    fn keep(&mut self, missing: Vec<usize>, kept: usize, residency: &mut dyn Residency) -> Vec<Event> {
        let mut events = Vec::new();
        let mut available = self.watch.pressure().available;
        for layer in missing {
            let bytes = residency.bytes(layer);
            if available.is_some_and(|available| available < bytes.saturating_add(self.config.margin)) {
                break;
            }
            available = available.map(|available| available - bytes);
            if let Err(error) = residency.keep(layer) {
                self.patience.failed(kept + events.len() + 1);
                events.push(Event::Refused { layer, reason: error.to_string() });
                break;
            }
            self.patience.tried();
            self.begin_again();
            events.push(Event::Grew { layer });
        }
        events
    }

    /// How many layers may be added at once.
    fn growth(&self, kept: usize) -> usize {
        // The last change has to have shown what it costs, and keeping nothing is the chance to see what that costs.
        if !self.pace.is_known() || (kept == 0 && !self.pace.streaming_is_measured()) {
            return 0;
        }
        let known = self.watch.pressure().available.is_some();
        let most = if known { self.plan.keep.len().div_ceil(GROWTH_PART) } else { 1 };
        most.min(self.patience.room(kept))
    }

    fn share_of_plan(&self, kept: usize) -> f64 {
        (kept as f64 / self.plan.keep.len().max(1) as f64).min(1.0)
    }
}

impl std::fmt::Debug for Governor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Governor")
            .field("plan", &self.plan)
            .field("pressure", &self.pressure())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
