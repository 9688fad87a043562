//! What a program does, in numbers and on a timeline: one set of both for whoever looks, a server's `/metrics`, a console
//! or a test.
//!
//! A [`Telemetry`] is handed to what reports; there is none for the whole process. Every model has [`Meters`], and so has
//! every session, whose counts are part of its model's. What somebody knows anyway, such as what was read from disk or
//! what a budget holds, is not counted again: it is [asked](Telemetry::ask) when somebody looks.

mod histogram;
mod meters;
mod names;
mod prometheus;
mod snapshot;
mod timeline;
mod trace;

pub use histogram::Distribution;
use meters::FaultsSeen;
pub use meters::{Held, Meters, Span};
pub use names::{Counter, Gauge, Histogram, Kind, Unit};
pub use prometheus::{CONTENT_TYPE, render};
pub use snapshot::{BudgetSnapshot, MeterSnapshot, ModelSnapshot, ProcessSnapshot, Snapshot};
pub use timeline::{Drawn, TIMELINE_EVENTS, Timeline, Track};

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use firebox_memory::Budget;

/// The numbers and the timeline of one program, or of one test. Clones are the same.
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
    // Only looked into when a model or a session begins, and when somebody looks.
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
    /// How many sessions there ever were.
    begun: u64,
    /// By what they tell of.
    sources: BTreeMap<&'static str, Source>,
}

/// Fills in what it knows. False once it has nothing to say any more.
#[derive(Clone)]
struct Source(Arc<dyn Fn(&mut ModelSnapshot) -> bool + Send + Sync>);

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Source")
    }
}

impl Telemetry {
    /// The numbers of the model of that name, which may not have any yet.
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

    /// Numbers for a session of a model that has no name but how many there were before it.
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

    /// Numbers for a session of a model. They are told of for as long as somebody holds them; what they have counted stays
    /// with the model.
    pub fn session(&self, model: &Arc<Meters>, name: &str) -> Arc<Meters> {
        let (timeline, faults) = (self.0.timeline.clone(), self.0.faults.clone());
        let session = Arc::new(Meters::new(name, Some(model.clone()), timeline, faults));
        if let Some(entry) = self.registry().models.get_mut(model.name()) {
            entry.sessions.retain(|session| session.strong_count() > 0);
            entry.sessions.push(Arc::downgrade(&session));
        }
        session
    }

    /// Asks somebody for numbers of a model whenever somebody looks, until the answer is false, and nobody else any more
    /// `about` the same. Who answers must not look himself, and should not keep the model alive.
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

    /// Tells of a budget from now on, in the place of one of that name.
    pub fn watch_budget(&self, name: &str, budget: &Budget) {
        self.registry().budgets.insert(name.to_owned(), budget.clone());
    }

    /// Tells no longer of a model that is gone, nor of its budget.
    pub fn forget(&self, model: &str) {
        let mut registry = self.registry();
        registry.models.remove(model);
        registry.budgets.remove(model);
    }

    /// Page faults up to now are nobody's.
    pub fn disregard_faults(&self) {
        self.0.faults.since_last();
    }

    /// What happens when; off at first.
    pub fn timeline(&self) -> &Timeline {
        &self.0.timeline
    }

    /// Everything as it is now.
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
        // Nobody waits for who is asked, and who is asked may wait for others.
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
        // Every change is a single insertion.
        self.0.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
