//! The models of a machine, their requests, and the loop that runs them layer by layer.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firebox_memory::thermal::Heat;
use firebox_runtime::{
    GrammarCache, Model, PagePool, PrefixLimits, PrefixTree, RuntimeError, Session, SessionFile,
};
use firebox_schedule::{
    AdmissionConfig, Choice, ModelId, NextModel, Queue, ScheduleConfig, ScheduleCounters, Scheduler,
};
use firebox_telemetry::{Counter, Histogram, Kind, Meters};

use crate::batch::EventSink;
use crate::clock::{Clock, WallClock};
use crate::error::EngineError;
use crate::event::Failure;
use crate::lazy_model::{LazyModel, PendingRequest};
use crate::loaded_model::LoadedModel;
use crate::on_failure::OnFailure;
use crate::prefetcher::Fetcher;
use crate::request::Request;
use crate::request_status::RequestStatus;
use crate::sequence::RequestId;

/// Probability from which the model that is likely next is read ahead.
const PREFETCH_PROBABILITY: f64 = 0.5;

/// Limits and policies of a [`EngineCore`].
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Which model runs when.
    pub schedule: ScheduleConfig,
    /// How many requests of a model run at once, and how many may wait.
    pub admission: AdmissionConfig,
    /// How much of the prompts' prefixes each model caches.
    pub prefixes: PrefixLimits,
    /// Whether requests that do not set [`Request::lookup`] draft tokens by lookup.
    pub lookup: bool,
    /// What an [`Engine`](super::Engine) does when its thread panics.
    pub on_failure: OnFailure,
    /// After how long in one step, such as a layer, an [`Engine`](super::Engine) is reported as
    /// [stalled](super::EngineHealth::Stalled).
    pub stall_after: Duration,
    /// After how long without being read, while its buffer is full, an answer fails. It gives its place to others at once, and
    /// its pages only then. Absent for never.
    pub stall_timeout: Option<Duration>,
    /// The clock of an [`Engine`](super::Engine).
    pub clock: Arc<dyn Clock>,
}

/// Pages of a model's prefix cache: 64 prompts of one page each, or fewer longer ones.
const PREFIX_PAGES: usize = 64;

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            schedule: ScheduleConfig::default(),
            admission: AdmissionConfig::default(),
            prefixes: PrefixLimits { pages: PREFIX_PAGES, ..PrefixLimits::default() },
            lookup: false,
            on_failure: OnFailure::default(),
            stall_after: Duration::from_secs(30),
            clock: Arc::new(WallClock::default()),
            stall_timeout: None,
        }
    }
}

/// Several models on one machine with their requests. Each call of [`work`](Self::work) runs one layer, timed by the
/// clock that the caller passes. An [`Engine`](super::Engine) is a thread around it.
#[derive(Debug)]
pub struct EngineCore {
    config: EngineConfig,
    scheduler: Scheduler,
    models: BTreeMap<ModelId, LoadedModel>,
    /// Models that are not open yet, by name.
    lazy: BTreeMap<String, LazyModel>,
    model_of: HashMap<RequestId, ModelId>,
    submitted: u64,
    fetcher: Arc<Fetcher>,
    grammars: Arc<GrammarCache>,
    next: NextModel,
    /// The model that ran last.
    ran: Option<ModelId>,
    /// The model whose quantum is under way, when the quantum began, and how many layers it has run.
    quantum: Option<(ModelId, Option<Instant>, u64)>,
}

/// What a call of [`EngineCore::work`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepOutcome {
    /// It ran a layer of a model.
    Layer {
        /// How long the layer took.
        took: Duration,
        /// Whether another model ran before.
        switched: bool,
    },
    /// It ran nothing: weights have to come from disk, or a request or a model is being prepared.
    Waiting,
    /// It ran nothing: no request can go on.
    Idle,
}

impl EngineCore {
    /// Creates an engine without models.
    pub fn new(config: EngineConfig) -> Result<Self, EngineError> {
        config.schedule.check()?;
        let mut config = config;
        config.admission.most_running = config.admission.most_running.max(1);
        Ok(Self {
            scheduler: Scheduler::new(config.schedule.clone()),
            config,
            models: BTreeMap::new(),
            lazy: BTreeMap::new(),
            model_of: HashMap::new(),
            submitted: 0,
            fetcher: Fetcher::start(),
            grammars: Arc::default(),
            next: NextModel::default(),
            ran: None,
            quantum: None,
        })
    }

    /// Adds a model. Its sequences share one pool of pages.
    pub fn add(&mut self, name: &str, model: Model) -> Result<(), EngineError> {
        let pool = model.session()?.cache().pool().clone();
        self.add_in_pool(name, model, pool)
    }

    /// Adds a model whose sequences take their pages from `pool`.
    pub fn add_in_pool(&mut self, name: &str, model: Model, pool: PagePool) -> Result<(), EngineError> {
        self.is_free(name)?;
        let mut queue = Queue::new(self.config.admission.clone());
        queue.set_heat(self.scheduler.heat());
        let mut limits = self.config.prefixes.clone();
        limits.budget =
            limits.budget.or_else(|| model.residency().map(|residency| residency.budget().clone()));
        let prefixes = PrefixTree::new(&model.decoder()?, &pool, limits);
        let loaded = LoadedModel::new(name, model, pool, queue, prefixes, &self.fetcher)?;
        let loaded = loaded.with_lookup(self.config.lookup).with_grammars(self.grammars.clone());
        self.models.insert(self.scheduler.add_model(name), loaded);
        Ok(())
    }

    /// Adds a model that is opened on its first request, or when one is likely, and takes no memory before. Other
    /// models run meanwhile. If opening fails, the waiting requests fail with the reason, and the next request tries
    /// again.
    pub fn add_later(
        &mut self,
        name: &str,
        open: impl Fn() -> Result<Model, RuntimeError> + Send + Sync + 'static,
    ) -> Result<(), EngineError> {
        self.is_free(name)?;
        self.lazy.insert(name.to_owned(), LazyModel::new(Arc::new(open), self.config.admission.clone()));
        Ok(())
    }

    fn is_free(&self, name: &str) -> Result<(), EngineError> {
        if self.model_id(name).is_ok() || self.lazy.contains_key(name) {
            return Err(EngineError::ModelNamed { name: name.into() });
        }
        Ok(())
    }

    /// Removes a model; its requests fail. Returns the model if it was open.
    pub fn remove(&mut self, name: &str, sink: EventSink<'_>) -> Result<Option<Model>, EngineError> {
        if let Some(lazy) = self.lazy.remove(name) {
            for pending in lazy.waiting {
                pending.fail(EngineError::NoModel { name: name.into(), there: self.names() }, sink);
            }
            return Ok(None);
        }
        let id = self.model_id(name)?;
        let requests: Vec<RequestId> =
            self.model_of.iter().filter(|(_, of)| **of == id).map(|(id, _)| *id).collect();
        self.scheduler.remove_model(id);
        self.quantum.take_if(|(model, ..)| *model == id);
        self.ran.take_if(|ran| *ran == id);
        let Some(mut loaded) = self.models.remove(&id) else { unreachable!("it was just found") };
        loaded.batch.abandon();
        for id in requests {
            self.model_of.remove(&id);
            loaded.fail(id, EngineError::NoModel { name: name.into(), there: self.names() }, sink);
        }
        loaded.retire();
        self.grammars.forget(&loaded.model);
        Ok(Some(loaded.model))
    }

    pub(crate) fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Fails all requests and starts again with the same models, after a panic that may have left anything half
    /// changed.
    pub(crate) fn restart(
        &mut self,
        error: &dyn Fn() -> EngineError,
        sink: EventSink<'_>,
    ) -> Result<(), EngineError> {
        let heat = self.scheduler.heat();
        self.scheduler = Scheduler::new(self.config.schedule.clone());
        self.scheduler.set_heat(heat);
        self.model_of.clear();
        (self.ran, self.quantum) = (None, None);
        for pending in self.lazy.values_mut().flat_map(LazyModel::take_waiting) {
            pending.fail(error(), sink);
        }
        for mut loaded in mem::take(&mut self.models).into_values() {
            loaded.fail_all(error, sink);
            loaded.retire();
            let (name, model, pool) = loaded.into_parts();
            self.add_in_pool(&name, model, pool)?;
        }
        Ok(())
    }

    /// Returns the open models, by name.
    pub fn models(&self) -> impl Iterator<Item = (&str, &Model)> {
        self.models.values().map(|loaded| (loaded.name.as_str(), &loaded.model))
    }

    /// Returns an empty session for [requests](Request::in_session) of a model. It takes its pages from the model's
    /// pool.
    pub fn session(&self, name: &str) -> Result<Session, EngineError> {
        self.models[&self.model_id(name)?].session()
    }

    /// Returns a session that continues from a file. It takes its pages from the model's pool.
    pub fn restored(&self, name: &str, saved: &SessionFile) -> Result<Session, EngineError> {
        self.models[&self.model_id(name)?].restored(saved)
    }

    /// Returns the requests of all open models that are queued or running.
    pub fn requests(&self) -> Vec<RequestStatus> {
        self.models.values().flat_map(LoadedModel::requests).collect()
    }

    /// Returns the grammars that were compiled lately.
    pub fn grammars(&self) -> &Arc<GrammarCache> {
        &self.grammars
    }

    /// Submits a request. It ends with an event that [is the last](super::Event::is_last); an invalid request is
    /// refused at once.
    pub fn submit(&mut self, request: Request, now: Duration) -> Result<RequestId, Box<Failure>> {
        self.submit_choices(request, 1, now).map(|ids| ids[0])
    }

    /// Submits a request for several choices, each with events of its own and, from the request's seed on, a seed of its own.
    /// Either all choices are queued or none. Their prompt goes through the layers once.
    pub fn submit_choices(
        &mut self,
        request: Request,
        count: usize,
        now: Duration,
    ) -> Result<Vec<RequestId>, Box<Failure>> {
        let ids: Vec<RequestId> = (self.submitted..).take(count.max(1)).map(RequestId).collect();
        let model = request.model.clone();
        if let Some(lazy) = self.lazy.get_mut(&model) {
            let tickets = match lazy.queue.enter_all(now, request.task.priority, &request.client, ids.len()) {
                Ok(tickets) => tickets,
                Err(error) => {
                    return Err(Box::new(Failure { error: error.into(), session: request.session }));
                }
            };
            self.submitted += ids.len() as u64;
            self.next.note(&model);
            let choices = ids.iter().copied().zip(tickets).collect();
            lazy.waiting.push(PendingRequest { choices, request, since: now, cancelled: Vec::new() });
            lazy.start_opening();
            return Ok(ids);
        }
        self.submit_to_open(&ids, request, now)?;
        self.submitted += ids.len() as u64;
        self.next.note(&model);
        // Starts to load the model that is likely to be used next while this one runs.
        let likely: Vec<String> = self.next.likely(PREFETCH_PROBABILITY).map(str::to_owned).collect();
        for name in likely {
            if let Some(lazy) = self.lazy.get_mut(&name) {
                lazy.start_opening();
            } else if let Ok(id) = self.model_id(&name) {
                self.models[&id].prefetch(now);
            }
        }
        Ok(ids)
    }

    fn submit_to_open(
        &mut self,
        ids: &[RequestId],
        request: Request,
        now: Duration,
    ) -> Result<(), Box<Failure>> {
        let model = match self.model_id(&request.model) {
            Ok(model) => model,
            Err(error) => return Err(Box::new(Failure { error, session: request.session })),
        };
        let Some(loaded) = self.models.get_mut(&model) else { unreachable!("it was just found") };
        loaded.submit(ids, request, now)?;
        self.model_of.extend(ids.iter().map(|id| (*id, model)));
        loaded.changed = true;
        Ok(())
    }

    /// Submits the requests of models that were opened meanwhile, and fails those that are late or whose model failed
    /// to open.
    fn collect_opened(&mut self, now: Duration, sink: EventSink<'_>) {
        let mut opened = Vec::new();
        for (name, lazy) in &mut self.lazy {
            for late in lazy.take_late(now) {
                late.fail(EngineError::Late { model: name.clone() }, sink);
            }
            opened.extend(lazy.opened().map(|model| (name.clone(), model)));
        }
        for (name, model) in opened {
            let Some(mut lazy) = self.lazy.remove(&name) else { continue };
            let waiting = lazy.take_waiting();
            let added = model.map_err(EngineError::from).and_then(|model| self.add(&name, model));
            if let Err(error) = added {
                let source = Arc::new(error);
                for pending in waiting {
                    let error = EngineError::NotOpened { name: name.clone(), source: source.clone() };
                    pending.fail(error, sink);
                }
                self.lazy.insert(name, lazy);
                continue;
            }
            for PendingRequest { choices, request, since, cancelled } in waiting {
                let ids: Vec<RequestId> = choices.into_iter().map(|(id, _)| id).collect();
                match self.submit_to_open(&ids, request, since) {
                    Ok(()) => cancelled.into_iter().for_each(|id| self.cancel(id, now, sink)),
                    Err(failure) => {
                        let failures = failure.of_choices(ids.len());
                        ids.into_iter().zip(failures).for_each(|(id, failure)| sink(id, failure));
                    }
                }
            }
        }
    }

    fn pending(&self) -> impl Iterator<Item = &PendingRequest> {
        self.lazy.values().flat_map(|lazy| &lazy.waiting)
    }

    /// Returns how many requests run or wait.
    pub fn under_way(&self) -> usize {
        self.model_of.len() + self.pending().map(|pending| pending.choices.len()).sum::<usize>()
    }

    /// Returns whether a request runs or waits.
    pub fn knows(&self, id: RequestId) -> bool {
        self.model_of.contains_key(&id) || self.pending().any(|pending| pending.has(id))
    }

    /// Cancels a request. If it is in a pass, it ends with that pass.
    pub fn cancel(&mut self, id: RequestId, now: Duration, sink: EventSink<'_>) {
        let pending = self.lazy.values_mut().flat_map(|lazy| &mut lazy.waiting);
        for pending in pending.filter(|pending| pending.has(id)) {
            // It ends once it has a session to return.
            pending.cancelled.push(id);
        }
        let Some(model) = self.model_of.get(&id) else { return };
        if let Some(loaded) = self.models.get_mut(model)
            && loaded.cancel(id, now, sink)
        {
            loaded.finish(id, now, &mut self.scheduler);
            self.model_of.remove(&id);
        }
    }

    /// Pauses a request, or lets it go on.
    pub fn hold(&mut self, id: RequestId, held: bool, now: Duration) {
        if let Some(loaded) = self.model_of.get(&id).and_then(|model| self.models.get_mut(model)) {
            loaded.hold(id, held, now);
        }
    }

    /// Fails a request whose events have not been read for `after`. Returns whether it has ended; one that is in a pass has
    /// to be asked for again.
    pub(crate) fn fail_stalled(
        &mut self,
        id: RequestId,
        after: Duration,
        now: Duration,
        sink: EventSink<'_>,
    ) -> bool {
        let Some(loaded) = self.model_of.get(&id).and_then(|model| self.models.get_mut(model)) else {
            return false;
        };
        let has_ended = loaded.fail_stalled(id, after, sink);
        if has_ended {
            loaded.finish(id, now, &mut self.scheduler);
            self.model_of.remove(&id);
        }
        has_ended
    }

    /// Sets how hot the machine is. The hotter, the fewer requests run together and the shorter the quanta.
    pub fn set_heat(&mut self, heat: Heat) {
        self.scheduler.set_heat(heat);
        for loaded in self.models.values_mut() {
            loaded.queue.set_heat(heat);
            loaded.embeddings.queue.set_heat(heat);
            loaded.changed = true;
        }
    }

    /// Returns the counters of the scheduler.
    pub fn counters(&self) -> &ScheduleCounters {
        self.scheduler.counters()
    }

    /// Runs one layer of the model that the scheduler chooses, if any is ready.
    pub fn work(&mut self, clock: &dyn Clock, sink: EventSink<'_>) -> StepOutcome {
        let now = clock.now();
        self.collect_opened(now, sink);
        for (&model, loaded) in &mut self.models {
            for id in loaded.prepared(now, sink) {
                loaded.finish(id, now, &mut self.scheduler);
                self.model_of.remove(&id);
            }
            for id in loaded.fail_late(now, sink) {
                loaded.finish(id, now, &mut self.scheduler);
                self.model_of.remove(&id);
            }
            for id in loaded.update(model, &mut self.scheduler, now, sink) {
                loaded.finish(id, now, &mut self.scheduler);
                self.model_of.remove(&id);
            }
            loaded.report_urgency();
        }
        let before = CounterSnapshot::new(self.scheduler.counters());
        let stopped = self.ran;
        let models = &self.models;
        let choice = self.scheduler.choose(now, |model| models[&model].readiness());
        let Choice::Run { model, .. } = choice else {
            self.end_quantum();
            self.set_disk_order(now);
            // A request may have ended as it started, and another one start in its place.
            let has_work =
                |loaded: &LoadedModel| loaded.batch.has_work() || loaded.is_preparing() || loaded.changed;
            let is_busy = self.models.values().any(has_work) || self.lazy.values().any(LazyModel::is_opening);
            return if is_busy { StepOutcome::Waiting } else { StepOutcome::Idle };
        };
        let switched = self.ran != Some(model) && self.ran.replace(model).is_some();
        let chosen = CounterSnapshot::new(self.scheduler.counters());
        if chosen.preemptions > before.preemptions
            && let Some(stopped) = stopped.and_then(|stopped| self.models.get(&stopped))
        {
            stopped.model.meters().add(Counter::Preemptions, chosen.preemptions - before.preemptions);
        }
        if switched || chosen.quanta > before.quanta {
            self.end_quantum();
        }
        if switched {
            self.set_disk_order(now);
            // While this model runs, the disk loads what the next one needs.
            let next = self.scheduler.prefetch(now).find(|next| *next != model);
            if let Some(next) = next.and_then(|next| self.models.get(&next)) {
                next.prefetch(now);
            }
        }
        let Some(loaded) = self.models.get_mut(&model) else { return StepOutcome::Idle };
        if switched {
            loaded.model.meters().took(Histogram::ContextSwitch, clock.now().saturating_sub(now));
        }
        let result = loaded.batch.step(clock, sink);
        if let Some(residency) = loaded.model.residency() {
            residency.charge_program_growth();
        }
        let now = clock.now();
        let meters = loaded.model.meters();
        match &mut self.quantum {
            Some((.., layers)) => *layers += 1,
            None => {
                meters.add(Counter::Quanta, 1);
                self.quantum = Some((model, meters.began(), 1));
            }
        }
        if let Some(took) = result.took {
            self.scheduler.ran(now, model, took, 1);
        }
        for id in result.tokens {
            if let Some(task) = loaded.task(id) {
                self.scheduler.token(now, task);
            }
        }
        before.add_growth(self.scheduler.counters(), meters);
        for (id, rows) in result.rows {
            loaded.served(id, rows);
        }
        for prompt in &result.prompts {
            loaded.prompt_computed(prompt, now);
        }
        // Sequences that have left returned their pages.
        let starved = result.ended.is_empty() && !result.starved.is_empty();
        for id in result.ended {
            loaded.finish(id, now, &mut self.scheduler);
            self.model_of.remove(&id);
        }
        if starved {
            for id in loaded.preempt(result.starved, now, sink) {
                loaded.finish(id, now, &mut self.scheduler);
                self.model_of.remove(&id);
            }
        }
        StepOutcome::Layer { took: result.took.unwrap_or_default(), switched }
    }

    /// Sets the order in which models read from disk: by priority, and within a priority those first that wait for their
    /// first token. A model that already decodes goes as fast as the disk reads anyway.
    fn set_disk_order(&mut self, now: Duration) {
        let mut order: Vec<ModelId> = self.scheduler.prefetch(now).collect();
        order.sort_by_key(|model| {
            let urgency = self.models.get(model).and_then(LoadedModel::urgency);
            Reverse(urgency.map(|urgency| (urgency.priority, urgency.awaits_first_token)))
        });
        for (model, loaded) in &mut self.models {
            let place = order.iter().position(|other| other == model);
            loaded.report_queue_position(place.map_or(u32::MAX, |place| place as u32));
        }
    }

    fn end_quantum(&mut self) {
        let Some((model, began, layers)) = self.quantum.take() else { return };
        if let Some(loaded) = self.models.get(&model) {
            loaded.model.meters().drawn(
                Kind::Quantum,
                [loaded.batch.sequences().len() as u64, layers],
                began,
            );
        }
    }

    fn model_id(&self, name: &str) -> Result<ModelId, EngineError> {
        let mut loaded = self.models.iter().filter(|(_, loaded)| loaded.name == name);
        loaded
            .next()
            .map(|(id, _)| *id)
            .ok_or_else(|| EngineError::NoModel { name: name.into(), there: self.names() })
    }

    fn names(&self) -> Vec<String> {
        let open = self.models.values().map(|loaded| loaded.name.clone());
        open.chain(self.lazy.keys().cloned()).collect()
    }
}

/// Counters of the scheduler before a layer.
struct CounterSnapshot {
    quanta: u64,
    overruns: u64,
    preemptions: u64,
    slips: u64,
    demotions: u64,
}

impl CounterSnapshot {
    fn new(counters: &ScheduleCounters) -> Self {
        let slips = counters.classes.iter().map(|class| class.slips).sum();
        Self {
            quanta: counters.quanta,
            overruns: counters.overruns,
            preemptions: counters.preemptions,
            slips,
            demotions: counters.demotions,
        }
    }

    /// Adds what the counters have gained since to the meters of the model that ran.
    fn add_growth(&self, counters: &ScheduleCounters, meters: &Meters) {
        let now = Self::new(counters);
        for (counter, added) in [
            (Counter::QuantumOverruns, now.overruns - self.overruns),
            (Counter::DeadlineSlips, now.slips - self.slips),
            (Counter::Demotions, now.demotions - self.demotions),
        ] {
            if added > 0 {
                meters.add(counter, added);
            }
        }
    }
}

impl Drop for EngineCore {
    fn drop(&mut self) {
        self.fetcher.end();
        self.models.values_mut().for_each(LoadedModel::retire);
    }
}
