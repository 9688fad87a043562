//! Decides how many layers stay in memory while a model runs.
//!
//! A plan names the layers to keep. The [`Governor`] is told the time of every step and reads memory pressure at intervals.
//! It evicts layers when memory is short and loads them again, a few at a time, when it no longer is. A system's report of
//! memory may be wrong, but step times are not: if resident layers make steps slower than streaming all weights, they are
//! evicted whatever the system reports.

mod backoff;
mod config;
mod event;
mod interval;
mod step_times;
mod watch;

pub use config::{GovernorConfig, ResidencyPlan};
pub use event::Event;

use std::cmp::Reverse;
use std::collections::HashSet;
use std::error::Error;
use std::time::Duration;

use backoff::Backoff;
use interval::Interval;
use step_times::{StepTimes, Thrash};
use watch::Watch;

use crate::pressure::{Level, Pressure, PressureSource};

/// When memory is short a quarter of the resident layers is evicted; more follow while it stays short.
const EVICTED_FRACTION: usize = 4;
/// An eighth of the plan is loaded at once, so that growing back takes eight checks and an overshoot is small.
const LOADED_FRACTION: usize = 8;

/// Layers that can be resident or not.
pub trait Residency {
    /// Returns the number of layers.
    fn layers(&self) -> usize;
    /// Returns whether a layer is resident.
    fn is_resident(&self, layer: usize) -> bool;
    /// Returns the bytes that a resident layer takes.
    fn bytes(&self, layer: usize) -> u64;
    /// Returns the eviction rank: the layer with the largest is evicted first. By default that is the last layer of a pass,
    /// which leaves most time to read it.
    fn rank(&self, layer: usize) -> usize {
        layer
    }
    /// Makes a layer resident.
    fn load(&mut self, layer: usize) -> Result<(), Box<dyn Error + Send + Sync>>;
    /// Evicts a layer. From then on it is read whenever it is needed.
    fn evict(&mut self, layer: usize);
}

/// Keeps as many of the planned layers resident as memory allows.
pub struct Governor {
    plan: ResidencyPlan,
    config: GovernorConfig,
    watch: Watch,
    check: Interval,
    step_times: StepTimes,
    backoff: Backoff,
    trial: Option<Trial>,
}

/// Layers that were evicted only to measure the time of a streamed step.
struct Trial {
    layers: Vec<usize>,
    /// The time of a step with them resident.
    step_time: Duration,
}

impl Governor {
    /// Creates a governor for a plan. The caller loads as many of the planned layers as it likes; the rest is loaded after
    /// some calm checks.
    pub fn new(
        mut plan: ResidencyPlan,
        sources: Vec<Box<dyn PressureSource>>,
        config: GovernorConfig,
    ) -> Self {
        // Keeps the first mention of each layer.
        let mut named = HashSet::new();
        plan.keep.retain(|&layer| named.insert(layer));
        Self {
            watch: Watch::new(sources, Interval::new(config.poll_tokens, config.poll_time)),
            check: Interval::new(config.check_tokens, config.check_time),
            step_times: StepTimes::new(plan.step_time, plan.streaming_step_time),
            backoff: Backoff::default(),
            trial: None,
            plan,
            config,
        }
    }

    /// Records a decoding step, one pass through all layers, and acts on it if necessary.
    ///
    /// `tokens` is the number of tokens that the step produced, `major_faults` the number of pages that this process waited
    /// for.
    pub fn after_step(
        &mut self,
        tokens: usize,
        step_time: Duration,
        major_faults: u64,
        residency: &mut dyn Residency,
    ) -> Vec<Event> {
        self.step_times.record(step_time, major_faults);
        self.act(tokens, step_time, true, residency)
    }

    /// Records a pass whose time tells nothing about a step: a prompt, or several sequences at once.
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
            self.backoff.count_pass();
        }
        let due = self.check.passes(tokens, time);
        let rose = self.watch.look(tokens, time, due);
        let kept: Vec<usize> =
            (0..residency.layers()).filter(|&layer| residency.is_resident(layer)).collect();
        if rose {
            return self.relieve_pressure(&kept, residency);
        }
        if is_step && let Some(thrash) = self.step_times.thrash(self.share_of_plan(kept.len())) {
            return self.end_thrashing(thrash, &kept, residency);
        }
        if is_step && kept.is_empty() {
            let events = self.end_trial(residency);
            if !events.is_empty() {
                return events;
            }
        }
        if due { self.regular_check(&kept, residency) } else { Vec::new() }
    }

    /// Evicts layers at once, even within a step, because another source found memory short.
    pub fn alarmed(&mut self, pressure: Pressure, residency: &mut dyn Residency) -> Vec<Event> {
        self.watch.see(pressure);
        let kept: Vec<usize> =
            (0..residency.layers()).filter(|&layer| residency.is_resident(layer)).collect();
        if pressure.level == Level::None { Vec::new() } else { self.relieve_pressure(&kept, residency) }
    }

    /// Returns the last reading of memory pressure.
    pub fn pressure(&self) -> Pressure {
        self.watch.pressure()
    }

    /// Returns the time of a step without resident layers, measured if it was, expected otherwise.
    pub fn streaming_step_time(&self) -> Duration {
        self.step_times.streaming()
    }

    /// Returns the plan.
    pub fn plan(&self) -> &ResidencyPlan {
        &self.plan
    }

    /// The work of a regular check.
    fn regular_check(&mut self, kept: &[usize], residency: &mut dyn Residency) -> Vec<Event> {
        let mut events = Vec::new();
        if kept.is_empty() {
            events.extend(self.step_times.learn().map(|step_time| Event::Learned { step_time }));
        }
        if self.watch.pressure().level == Level::None {
            self.backoff.count_calm_check();
            events.extend(self.grow(kept.len(), residency));
        } else {
            events.extend(self.relieve_pressure(kept, residency));
        }
        events
    }

    /// Evicts layers because memory is short.
    fn relieve_pressure(&mut self, kept: &[usize], residency: &mut dyn Residency) -> Vec<Event> {
        self.trial = None;
        if kept.is_empty() {
            self.backoff.restart_wait();
            return Vec::new();
        }
        self.backoff.pressure_rose(kept.len());
        let Pressure { level, available } = self.watch.pressure();
        let (cause, count) = match level {
            Level::Critical => (Event::Emergency { available }, kept.len()),
            _ => (Event::Short { available }, kept.len().div_ceil(EVICTED_FRACTION)),
        };
        vec![cause, self.evict(count, kept, residency)]
    }

    /// Evicts layers because keeping them costs more than it saves.
    fn end_thrashing(&mut self, thrash: Thrash, kept: &[usize], residency: &mut dyn Residency) -> Vec<Event> {
        // Without resident layers the time of a streamed step can be measured. Until that has happened there is nothing to
        // compare with.
        let all = thrash.slower_than_streaming || !self.step_times.streaming_is_measured();
        let count = if all { kept.len() } else { kept.len().div_ceil(2) };
        let Thrash { step_time, expected, major_faults, .. } = thrash;
        if major_faults == 0 && !self.step_times.streaming_is_measured() {
            self.trial = Some(Trial { layers: kept.to_vec(), step_time });
        } else {
            self.backoff.failed(kept.len());
        }
        vec![Event::Thrash { step_time, expected, major_faults }, self.evict(count, kept, residency)]
    }

    /// Loads the layers of a trial again if steps without them are slower.
    fn end_trial(&mut self, residency: &mut dyn Residency) -> Vec<Event> {
        let Some(trial) = &self.trial else { return Vec::new() };
        let Some(is_slower) = self.step_times.learn_if_slower(trial.step_time) else { return Vec::new() };
        let was_kept = |layer: &usize| trial.layers.contains(layer);
        let layers: Vec<usize> = self.plan.keep.iter().copied().filter(was_kept).collect();
        self.trial = None;
        if !is_slower {
            self.backoff.failed(layers.len());
            return Vec::new();
        }
        // The last reading was taken while these layers held memory.
        self.watch.look(0, Duration::ZERO, true);
        if self.watch.pressure().level != Level::None {
            return self.relieve_pressure(&[], residency);
        }
        let mut events = vec![Event::Learned { step_time: self.step_times.streaming() }];
        events.extend(self.keep(layers, 0, residency));
        events
    }

    /// Evicts the layers with the largest ranks.
    fn evict(&mut self, count: usize, kept: &[usize], residency: &mut dyn Residency) -> Event {
        let mut layers = kept.to_vec();
        layers.sort_by_key(|&layer| Reverse(residency.rank(layer)));
        layers.truncate(count);
        layers.iter().for_each(|&layer| residency.evict(layer));
        self.restart();
        self.check.restart();
        Event::Shed { layers }
    }

    /// Charges the time lost since the last change, and starts to measure anew.
    fn restart(&mut self) {
        self.backoff.charge(self.step_times.lost_steps());
        self.step_times.restart();
    }

    /// Loads more of the plan, as far as the backoff and memory allow.
    fn grow(&mut self, kept: usize, residency: &mut dyn Residency) -> Vec<Event> {
        let most = self.growth(kept);
        let missing = |layer: &usize| *layer < residency.layers() && !residency.is_resident(*layer);
        let missing = self.plan.keep.iter().copied().filter(missing).take(most).collect();
        self.keep(missing, kept, residency)
    }

    /// Loads layers, as far as memory allows, in addition to `kept` resident ones.
    fn keep(&mut self, missing: Vec<usize>, kept: usize, residency: &mut dyn Residency) -> Vec<Event> {
        let mut events = Vec::new();
        let mut available = self.watch.pressure().available;
        for layer in missing {
            let bytes = residency.bytes(layer);
            if available.is_some_and(|available| available < bytes.saturating_add(self.config.margin)) {
                break;
            }
            available = available.map(|available| available - bytes);
            if let Err(error) = residency.load(layer) {
                self.backoff.failed(kept + events.len() + 1);
                events.push(Event::Refused { layer, reason: error.to_string() });
                break;
            }
            self.backoff.grew();
            self.restart();
            events.push(Event::Grew { layer });
        }
        events
    }

    /// Returns the number of layers that may be loaded at once.
    fn growth(&self, kept: usize) -> usize {
        // The effect of the last change has to be measured first, and so has the time of a streamed step when nothing is
        // resident.
        if !self.step_times.is_known() || (kept == 0 && !self.step_times.streaming_is_measured()) {
            return 0;
        }
        let known = self.watch.pressure().available.is_some();
        let most = if known { self.plan.keep.len().div_ceil(LOADED_FRACTION) } else { 1 };
        most.min(self.backoff.allowance(kept))
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
