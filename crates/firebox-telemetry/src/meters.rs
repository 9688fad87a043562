//! The meters of a model or a session.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::histogram::{Buckets, Distribution};
use super::recording::Track;
use super::timeline::Timeline;
use super::{Counter, Gauge, Histogram, Kind};
use firebox_memory::PageFaults;
use firebox_memory::governor::Event;

/// The metrics of a model or a session. The counts of a session are added to its model's.
///
/// Counting is one atomic addition, and a second one for a session's model, whether or not anything reads the counts.
#[derive(Debug)]
pub struct Meters {
    name: Arc<str>,
    above: Option<Arc<Meters>>,
    counters: [AtomicU64; Counter::COUNT],
    gauges: [AtomicI64; Gauge::COUNT],
    histograms: [Buckets; Histogram::COUNT],
    timeline: Timeline,
    track: Track,
    faults: FaultsSeen,
}

impl Default for Meters {
    /// Returns meters without a name that belong to no telemetry.
    fn default() -> Self {
        Self::new("", None, Timeline::default(), FaultsSeen::default())
    }
}

impl Meters {
    pub(super) fn new(name: &str, above: Option<Arc<Self>>, timeline: Timeline, faults: FaultsSeen) -> Self {
        let track = above.as_ref().map_or_else(|| timeline.track(name), |above| above.track);
        Self {
            name: name.into(),
            above,
            counters: [const { AtomicU64::new(0) }; Counter::COUNT],
            gauges: [const { AtomicI64::new(0) }; Gauge::COUNT],
            histograms: Default::default(),
            timeline,
            track,
            faults,
        }
    }

    /// Returns the name of the model or session.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Adds to a counter: events, bytes, or nanoseconds.
    pub fn add(&self, counter: Counter, amount: u64) {
        self.counters[counter as usize].fetch_add(amount, Ordering::Relaxed);
        if let Some(above) = &self.above {
            above.add(counter, amount);
        }
    }

    /// Adds a time to a counter.
    pub fn add_time(&self, counter: Counter, time: Duration) {
        self.add(counter, nanos(time));
    }

    /// Returns the value of a counter.
    pub fn count(&self, counter: Counter) -> u64 {
        self.counters[counter as usize].load(Ordering::Relaxed)
    }

    /// Sets a gauge, here and not in the model above.
    pub fn set(&self, gauge: Gauge, value: u64) {
        self.gauges[gauge as usize].store(value as i64, Ordering::Relaxed);
    }

    /// Increments a gauge, here and in the model above, until the guard is dropped.
    pub fn hold(self: &Arc<Self>, gauge: Gauge) -> Held {
        self.change(gauge, 1);
        Held { meters: self.clone(), gauge }
    }

    /// Returns the value of a gauge.
    pub fn level(&self, gauge: Gauge) -> u64 {
        self.gauges[gauge as usize].load(Ordering::Relaxed).max(0) as u64
    }

    fn change(&self, gauge: Gauge, by: i64) {
        self.gauges[gauge as usize].fetch_add(by, Ordering::Relaxed);
        if let Some(above) = &self.above {
            above.change(gauge, by);
        }
    }

    /// Adds a value to a distribution. For times see [`took`](Self::took).
    pub fn record(&self, histogram: Histogram, value: u64) {
        self.histograms[histogram as usize].record(value);
        if let Some(above) = &self.above {
            above.record(histogram, value);
        }
    }

    /// Adds a time to a distribution.
    pub fn took(&self, histogram: Histogram, time: Duration) {
        self.record(histogram, u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    }

    /// Returns a distribution.
    pub fn distribution(&self, histogram: Histogram) -> Distribution {
        self.histograms[histogram as usize].distribution()
    }

    /// Counts and draws a pass of `rows` rows over some sequences: `Prefill`, `Decode` or `Verify`. All page faults since the
    /// end of the last pass are counted as its own.
    pub fn passed(&self, kind: Kind, sequences: usize, rows: usize, began: Instant) {
        let ended = Instant::now();
        self.add(Counter::Passes, 1);
        self.add(Counter::Rows, rows as u64);
        self.add_time(Counter::PassTime, ended.saturating_duration_since(began));
        if kind == Kind::Decode {
            self.record(Histogram::BatchOccupancy, sequences as u64);
        }
        let faults = self.faults.since_last();
        self.add(Counter::MinorFaults, faults.minor);
        self.add(Counter::MajorPageFaults, faults.major);
        if self.timeline.is_on() {
            self.timeline.span(kind, self.track, [sequences as u64, rows as u64], began, ended);
        }
    }

    /// Counts and draws an event of a governor.
    pub fn governed(&self, event: &Event) {
        let micros = |time: &Duration| nanos(*time) / 1000;
        match event {
            Event::Short { available } => {
                self.add(Counter::MemoryWarnings, 1);
                self.mark(Kind::Short, [available.unwrap_or(0), 0]);
            }
            Event::Emergency { available } => {
                self.add(Counter::MemoryWarnings, 1);
                self.mark(Kind::Emergency, [available.unwrap_or(0), 0]);
            }
            Event::Thrash { step_time, major_faults, .. } => {
                self.add(Counter::Thrashes, 1);
                self.mark(Kind::Thrash, [micros(step_time), *major_faults]);
            }
            Event::Shed { layers } => {
                self.add(Counter::ShedParts, layers.len() as u64);
                let first = layers.iter().min().copied().unwrap_or(0);
                self.mark(Kind::Shed, [layers.len() as u64, first as u64]);
            }
            Event::Grew { layer } => {
                self.add(Counter::GrownParts, 1);
                self.mark(Kind::Grew, [*layer as u64, 0]);
            }
            Event::Refused { layer, .. } => self.mark(Kind::Refused, [*layer as u64, 0]),
            Event::Learned { step_time } => self.mark(Kind::Learned, [micros(step_time), 0]),
        }
    }

    /// Counts and draws an eviction of turns.
    pub fn evicted(&self, turns: usize, tokens: usize) {
        self.add(Counter::EvictedTurns, turns as u64);
        self.add(Counter::EvictedTokens, tokens as u64);
        self.mark(Kind::Eviction, [turns as u64, tokens as u64]);
    }

    /// Returns the start of something that may be drawn; `None` while the timeline is off.
    pub fn began(&self) -> Option<Instant> {
        self.timeline.is_on().then(Instant::now)
    }

    /// Draws a span from `began` until now.
    pub fn drawn(&self, kind: Kind, numbers: [u64; 2], began: Option<Instant>) {
        if let Some(began) = began {
            self.timeline.span(kind, self.track, numbers, began, Instant::now());
        }
    }

    /// Draws a span from now until the guard is dropped.
    pub fn span(&self, kind: Kind, numbers: [u64; 2]) -> Span<'_> {
        Span { meters: self, kind, numbers, began: self.began() }
    }

    /// Draws an event without duration, or a change of a level.
    pub fn mark(&self, kind: Kind, numbers: [u64; 2]) {
        if self.timeline.is_on() {
            let now = Instant::now();
            self.timeline.span(kind, self.track, numbers, now, now);
        }
    }

    /// Returns the timeline.
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }
}

/// The page faults at the end of the last pass of any model. A pass runs on several threads, so the faults of models that run
/// at the same time cannot be told apart; none is counted twice.
#[derive(Debug, Clone, Default)]
pub(super) struct FaultsSeen(Arc<Mutex<Option<PageFaults>>>);

impl FaultsSeen {
    /// Returns the faults since the last call, and none for the first one.
    pub fn since_last(&self) -> PageFaults {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = PageFaults::of_process();
        match (now, std::mem::replace(&mut *seen, now)) {
            (Some(now), Some(before)) => now.since(before),
            _ => PageFaults::default(),
        }
    }
}

/// Returns nanoseconds, which suffice for six hundred years.
fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Decrements a gauge when it is dropped.
#[derive(Debug)]
#[must_use = "it is counted until it is dropped"]
pub struct Held {
    meters: Arc<Meters>,
    gauge: Gauge,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.meters.change(self.gauge, -1);
    }
}

/// Draws a span when it is dropped.
#[derive(Debug)]
#[must_use = "it is drawn when it is dropped"]
pub struct Span<'a> {
    meters: &'a Meters,
    kind: Kind,
    numbers: [u64; 2],
    began: Option<Instant>,
}

impl Span<'_> {
    /// Sets the numbers of the span, if they were not known before.
    pub fn numbers(&mut self, numbers: [u64; 2]) {
        self.numbers = numbers;
    }
}

impl Drop for Span<'_> {
    fn drop(&mut self) {
        self.meters.drawn(self.kind, self.numbers, self.began);
    }
}
