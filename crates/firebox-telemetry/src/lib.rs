//! Metrics and a timeline of a program, for a server's `/metrics`, a console or a test.
//!
//! A [`Telemetry`] is passed to whatever reports to it; there is no global one. Every model has [`Meters`], and so has every
//! session, whose counts are added to its model's. Values that are known elsewhere, such as bytes read from disk or charged
//! to a budget, are not counted twice: a [source](Telemetry::ask) adds them to each snapshot.

mod histogram;
mod meters;
mod names;
mod prometheus;
mod recording;
mod snapshot;
mod timeline;
mod trace;

pub use histogram::Distribution;
use meters::FaultsSeen;
pub use meters::{Held, Meters, Span};
pub use names::{Counter, Gauge, Histogram, Kind, Unit};
pub use prometheus::{CONTENT_TYPE, render, render_counter};
pub use recording::Track;
pub use snapshot::{BudgetSnapshot, MeterSnapshot, ModelSnapshot, ProcessSnapshot, Snapshot};
pub use timeline::{TIMELINE_EVENTS, Timeline, TimelineEvent};

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use firebox_memory::Budget;

/// The metrics and the timeline of a program or a test. Clones share them.
///
/// ```
/// use firebox_telemetry::{Counter, Telemetry, render};
///
/// let telemetry = Telemetry::default();
/// let model = telemetry.model("pocket");
/// let session = telemetry.session(&model, "1");
/// session.add(Counter::GeneratedTokens, 7);
/// assert_eq!(model.count(Counter::GeneratedTokens), 7);
/// assert!(render(&telemetry.snapshot()).contains("firebox_generated_tokens_total{model=\"pocket\"} 7\n"));
/// ```
#[derive(Debug, Clone, Default)]
pub struct Telemetry(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    timeline: Timeline,
    faults: FaultsSeen,
    // Locked only when a model or a session begins, and for snapshots.
    registry: Mutex<Registry>,
}

#[derive(Debug, Default)]
struct Registry {
    models: BTreeMap<String, Entry>,
    budgets: BTreeMap<String, Budget>,
}

#[derive(Debug)]
struct Entry {
    meters: Arc<Meters>,
    sessions: Vec<Weak<Meters>>,
    /// The number of sessions that ever began.
    begun: u64,
    /// Sources by topic.
    sources: BTreeMap<&'static str, Source>,
}

/// Adds its values to a snapshot. Returns false once it has none any more.
#[derive(Clone)]
struct Source(Arc<dyn Fn(&mut ModelSnapshot) -> bool + Send + Sync>);

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Source")
    }
}

impl Telemetry {
    /// Returns the meters of a model, which are created on the first call.
    pub fn model(&self, name: &str) -> Arc<Meters> {
        let mut registry = self.registry();
        if let Some(entry) = registry.models.get(name) {
            return entry.meters.clone();
        }
        let meters = Arc::new(Meters::new(name, None, self.0.timeline.clone(), self.0.faults.clone()));
        let entry =
            Entry { meters: meters.clone(), sessions: Vec::new(), begun: 0, sources: BTreeMap::new() };
        registry.models.insert(name.to_owned(), entry);
        meters
    }

    /// Returns meters for a session that is named by its number.
    pub fn next_session(&self, model: &Arc<Meters>) -> Arc<Meters> {
        let name = {
            let mut registry = self.registry();
            let begun = registry.models.get_mut(model.name()).map(|entry| {
                entry.begun += 1;
                entry.begun
            });
            begun.unwrap_or_default().to_string()
        };
        self.session(model, &name)
    }

    /// Returns meters for a session of a model. Snapshots include them as long as they exist; their counts stay with the
    /// model.
    pub fn session(&self, model: &Arc<Meters>, name: &str) -> Arc<Meters> {
        let (timeline, faults) = (self.0.timeline.clone(), self.0.faults.clone());
        let session = Arc::new(Meters::new(name, Some(model.clone()), timeline, faults));
        if let Some(entry) = self.registry().models.get_mut(model.name()) {
            entry.sessions.retain(|session| session.strong_count() > 0);
            entry.sessions.push(Arc::downgrade(&session));
        }
        session
    }

    /// Adds a source that is asked for values of a model at each snapshot, until it returns false. It replaces the previous
    /// source for the same topic. A source must not take a snapshot itself, and should not keep the model alive.
    pub fn ask(
        &self,
        model: &Meters,
        about: &'static str,
        source: impl Fn(&mut ModelSnapshot) -> bool + Send + Sync + 'static,
    ) {
        if let Some(entry) = self.registry().models.get_mut(model.name()) {
            entry.sources.insert(about, Source(Arc::new(source)));
        }
    }

    /// Includes a budget in snapshots, in place of any of the same name.
    pub fn watch_budget(&self, name: &str, budget: &Budget) {
        self.registry().budgets.insert(name.to_owned(), budget.clone());
    }

    /// Removes a model and its budget.
    pub fn forget(&self, model: &str) {
        let mut registry = self.registry();
        registry.models.remove(model);
        registry.budgets.remove(model);
    }

    /// Ignores the page faults up to now.
    pub fn disregard_faults(&self) {
        self.0.faults.since_last();
    }

    /// Returns the timeline, which is off at first.
    pub fn timeline(&self) -> &Timeline {
        &self.0.timeline
    }

    /// Takes a snapshot.
    pub fn snapshot(&self) -> Snapshot {
        let mut models = Vec::new();
        let mut asked = Vec::new();
        let budgets = {
            let registry = self.registry();
            for entry in registry.models.values() {
                let sessions: Vec<_> = entry.sessions.iter().filter_map(Weak::upgrade).collect();
                models.push(ModelSnapshot::of(&entry.meters, &sessions));
                asked.push(entry.sources.clone());
            }
            registry.budgets.iter().map(|(name, budget)| BudgetSnapshot::of(name, budget)).collect()
        };
        // Sources are asked without the lock, because they may wait for other locks.
        for (model, sources) in models.iter_mut().zip(asked) {
            let gone: Vec<_> = sources.into_values().filter(|source| !(source.0)(model)).collect();
            if !gone.is_empty()
                && let Some(entry) = self.registry().models.get_mut(&model.name)
            {
                entry.sources.retain(|_, source| !gone.iter().any(|gone| Arc::ptr_eq(&gone.0, &source.0)));
            }
        }
        Snapshot { process: ProcessSnapshot::now(), budgets, models }
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        // Every change is a single insertion, so a poisoned lock holds consistent values.
        self.0.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
