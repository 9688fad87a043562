//! The choice of the model that runs next.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::counters::{ScheduleCounters, ScheduleEvent};
use super::model_queue::{Claim, ModelQueue, Rank};
use super::task_progress::TaskProgress;
use super::{Choice, ModelId, Priority, Readiness, ScheduleConfig, Task, TaskId};
use firebox_memory::thermal::Heat;

/// The quanta that a task may be ahead of its pace before others come first: enough that one quantum of another model, and
/// the layer that ends it, make no task late.
const LEAD_QUANTA: u32 = 2;
/// The least number of quanta between two demotions, in which the first one takes effect.
const SETTLING_QUANTA: u32 = 8;

/// When one task is late enough for a demotion, all tasks count as late from this part of that lateness on.
const LATE_FRACTION: f64 = 0.5;

/// Chooses the model that runs next. It has no clock: every call is given the time since the start.
///
/// ```
/// use std::time::Duration;
/// use firebox_schedule::{Choice, Priority, Readiness, ScheduleConfig, Scheduler, Task};
///
/// let mut scheduler = Scheduler::new(ScheduleConfig::default());
/// let (small, large) = (scheduler.add_model("small"), scheduler.add_model("large"));
/// let now = Duration::ZERO;
/// scheduler.add(now, large, Task::new(Priority::Background));
/// scheduler.add(now, small, Task::new(Priority::Interactive));
/// let choice = scheduler.choose(now, |_| Readiness::Ready);
/// assert_eq!(choice, Choice::Run { model: small, until: Duration::from_millis(50) });
/// ```
#[derive(Debug)]
pub struct Scheduler {
    config: ScheduleConfig,
    heat: Heat,
    models: BTreeMap<ModelId, ModelQueue>,
    model_of: HashMap<TaskId, ModelId>,
    models_made: u32,
    tasks_made: u64,
    running: Option<Running>,
    last_share: Duration,
    last_demotion: Option<Duration>,
    counters: ScheduleCounters,
}

/// A quantum in progress.
#[derive(Debug, Clone, Copy)]
struct Running {
    model: ModelId,
    until: Duration,
    /// Given for having waited, and not taken back.
    is_share: bool,
}

impl Scheduler {
    /// Creates a scheduler without models.
    pub fn new(config: ScheduleConfig) -> Self {
        Self {
            config,
            heat: Heat::Nominal,
            models: BTreeMap::new(),
            model_of: HashMap::new(),
            models_made: 0,
            tasks_made: 0,
            running: None,
            last_share: Duration::ZERO,
            last_demotion: None,
            counters: ScheduleCounters::default(),
        }
    }

    /// Adds a model. Its id differs from those of all removed models.
    pub fn add_model(&mut self, name: &str) -> ModelId {
        let id = ModelId(self.models_made);
        self.models_made += 1;
        self.models.insert(id, ModelQueue::new(name));
        id
    }

    /// Removes a model and all its tasks.
    pub fn remove_model(&mut self, model: ModelId) {
        self.models.remove(&model);
        self.model_of.retain(|_, of| *of != model);
        self.running.take_if(|running| running.model == model);
    }

    /// Adds a task. The tasks of a removed model are ignored.
    pub fn add(&mut self, now: Duration, model: ModelId, task: Task) -> TaskId {
        let id = TaskId(self.tasks_made);
        self.tasks_made += 1;
        if let Some(found) = self.models.get_mut(&model) {
            self.counters.classes[task.priority as usize].tasks += 1;
            found.tasks.insert(id, TaskProgress::new(task, now, &self.config));
            found.waits_since.get_or_insert(now);
            self.model_of.insert(id, model);
        }
        id
    }

    /// Removes a task that is done or cancelled.
    pub fn remove(&mut self, task: TaskId) {
        let Some(model) = self.model_of.remove(&task).and_then(|model| self.models.get_mut(&model)) else {
            return;
        };
        model.tasks.remove(&task);
        if model.tasks.is_empty() {
            model.waits_since = None;
        }
    }

    /// Chooses the model that runs its next layer. A model keeps the machine until its quantum ends, unless a more urgent one
    /// is ready.
    pub fn choose(&mut self, now: Duration, mut ready: impl FnMut(ModelId) -> Readiness) -> Choice {
        let mut found = Vec::with_capacity(self.models.len());
        let mut misses = None;
        let mut waits = false;
        for (&id, model) in &mut self.models {
            if model.tasks.is_empty() {
                continue;
            }
            match ready(id) {
                Readiness::Idle => model.waits_since = None,
                Readiness::Ready => {
                    model.waits_since.get_or_insert(now);
                    found.push(id);
                }
                Readiness::Waiting => {
                    model.waits_since.get_or_insert(now);
                    waits = true;
                    let dues = model.tasks.values().filter_map(|track| track.due);
                    misses = dues.chain(misses).filter(|&due| due > now).min();
                }
            }
        }
        if let Some(running) = self.current(now).filter(|running| found.contains(&running.model)) {
            if !found.iter().any(|&other| self.breaks(now, other, &running)) {
                return Choice::Run { model: running.model, until: running.until };
            }
            self.counters.preemptions += 1;
        }
        let best = found.iter().filter_map(|&id| Some((self.claim(now, id)?, id))).min();
        let Some((claim, model)) = best else {
            self.running = None;
            self.counters.waits += u64::from(waits);
            return Choice::Wait { until: misses };
        };
        let is_share = claim.rank == Rank::Share;
        if is_share {
            self.last_share = now;
            self.counters.shares += 1;
        }
        let until = now.saturating_add(self.quantum());
        self.counters.quanta += 1;
        self.running = Some(Running { model, until, is_share });
        Choice::Run { model, until }
    }

    /// Returns the models in the order in which they will want the machine, so that their layers are read in time.
    ///
    /// Models that have waited long come first, as they do for the machine: a disk that read for the most urgent only would
    /// starve the others, which would never be ready.
    pub fn prefetch(&self, now: Duration) -> impl Iterator<Item = ModelId> + use<> {
        let interval = self.share_interval();
        let wanted = |(&id, model): (&ModelId, &ModelQueue)| {
            let since = model.waits_since?;
            let claim = model.claim(now, self.lead())?;
            let has_waited = now.saturating_sub(since) >= interval;
            Some((if has_waited { Claim { rank: Rank::Share, at: since, then: since } } else { claim }, id))
        };
        let mut wanted: Vec<(Claim, ModelId)> = self.models.iter().filter_map(wanted).collect();
        wanted.sort();
        wanted.into_iter().map(|(_, model)| model)
    }

    /// Records that a model ran, after every layer or quantum.
    pub fn ran(&mut self, now: Duration, model: ModelId, took: Duration, layers: usize) {
        self.counters.layers += layers as u64;
        self.counters.busy = self.counters.busy.saturating_add(took);
        if let Some(model) = self.models.get_mut(&model) {
            model.ran(now, took);
        }
        let quantum = self.quantum();
        let over = self.running.take_if(|running| running.model == model && now >= running.until);
        if let Some(over) = over {
            let most = quantum.mul_f64(self.config.slippage);
            self.counters.overruns += u64::from(now - over.until > most);
            self.demote_laggard(now);
        }
    }

    /// Records a token of a task.
    pub fn token(&mut self, now: Duration, task: TaskId) {
        let lead = self.lead();
        let Some(model) = self.model_of.get(&task).and_then(|model| self.models.get_mut(model)) else {
            return;
        };
        let Some(track) = model.tasks.get_mut(&task) else { return };
        let arrival = track.arrive(now, self.config.slippage, lead);
        let priority = track.task.priority;
        model.stepped(arrival.is_first);
        let class = &mut self.counters.classes[priority as usize];
        class.tokens += 1;
        match arrival.late {
            Some(true) => {
                class.slips += 1;
                class.late_firsts += u64::from(arrival.is_first);
            }
            Some(false) => class.met += 1,
            None => {}
        }
        if arrival.restored {
            let model = model.name.clone();
            self.counters.note(ScheduleEvent::Restored { at: now, task, model, priority });
        }
        if arrival.late == Some(true) {
            self.demote_laggard(now);
        }
    }

    /// Returns the thermal state that was set last.
    pub fn heat(&self) -> Heat {
        self.heat
    }

    /// Sets the thermal state. Quanta are shorter on a hot machine.
    pub fn set_heat(&mut self, heat: Heat) {
        self.heat = heat;
    }

    /// Returns the counters.
    pub fn counters(&self) -> &ScheduleCounters {
        &self.counters
    }

    /// Returns whether a task was demoted because it fell behind its pace.
    pub fn is_demoted(&self, task: TaskId) -> bool {
        self.track(task).is_some_and(TaskProgress::is_demoted)
    }

    /// Returns the deadline of the next token of a task; `None` if it has no pace.
    pub fn due(&self, task: TaskId) -> Option<Duration> {
        self.track(task)?.due
    }

    /// Returns the settings.
    pub fn config(&self) -> &ScheduleConfig {
        &self.config
    }

    /// Returns the longest time that a ready model may wait, apart from the layers that end quanta: every so often one of the
    /// waiting models gets a quantum.
    pub(super) fn longest_wait(&self) -> Duration {
        self.share_interval() * (self.models.len() as u32 + 1) + self.quantum()
    }

    fn track(&self, task: TaskId) -> Option<&TaskProgress> {
        self.models.get(self.model_of.get(&task)?)?.tasks.get(&task)
    }

    pub(super) fn models(&self) -> impl Iterator<Item = (ModelId, &ModelQueue)> {
        self.models.iter().map(|(&id, model)| (id, model))
    }

    pub(super) fn quantum(&self) -> Duration {
        self.config.quantum(self.heat)
    }

    fn lead(&self) -> Duration {
        self.quantum() * LEAD_QUANTA
    }

    /// Returns the time between two quanta that are given for having waited.
    fn share_interval(&self) -> Duration {
        // The share was checked, or is at least kept from dividing by zero.
        self.quantum().div_f64(self.config.share.clamp(0.01, 0.5))
    }

    /// Returns the quantum in progress.
    fn current(&self, now: Duration) -> Option<Running> {
        self.running.filter(|running| now < running.until)
    }

    fn claim(&self, now: Duration, model: ModelId) -> Option<Claim> {
        let model = self.models.get(&model)?;
        let claim = model.claim(now, self.lead())?;
        let since = model.waits_since.unwrap_or(now);
        let interval = self.share_interval();
        let has_waited = now.saturating_sub(since) >= interval && now - self.last_share.min(now) >= interval;
        Some(if has_waited { Claim { rank: Rank::Share, at: since, then: since } } else { claim })
    }

    /// Returns whether another model does not wait for the end of a quantum: it has a better reason, or an earlier deadline
    /// that it would miss.
    fn breaks(&self, now: Duration, other: ModelId, running: &Running) -> bool {
        if other == running.model || running.is_share {
            return false;
        }
        let claim = |model: ModelId| {
            let model = self.models.get(&model)?;
            Some((model.claim(now, self.lead())?, model.step_time()))
        };
        match (claim(other), claim(running.model)) {
            (Some((other, step_time)), Some((own, _))) => {
                let cannot_wait = other.at < running.until.saturating_add(step_time);
                let is_due = matches!(other.rank, Rank::Due(_));
                other.rank < own.rank
                    || (is_due && other.rank == own.rank && other.at < own.at && cannot_wait)
            }
            (other, None) => other.is_some(),
            (None, _) => false,
        }
    }

    /// Demotes the late tasks of the model that would take most of the machine, so that the others keep their priority. The
    /// effect is awaited before the next demotion.
    fn demote_laggard(&mut self, now: Duration) {
        let settling = self.quantum() * SETTLING_QUANTA;
        if self.last_demotion.is_some_and(|last| now.saturating_sub(last) < settling) {
            return;
        }
        let all = || {
            let tracks = |(&id, model)| {
                let model: &ModelQueue = model;
                model.tasks.values().map(move |track| (id, model, track))
            };
            self.models.iter().flat_map(tracks)
        };
        if !all().any(|(_, model, track)| is_laggard(model, track, now, self.config.slippage)) {
            return;
        }
        let busy = self.models.values().filter(|model| !model.tasks.is_empty()).count();
        let part = 1.0 / busy.max(1) as f64;
        // If one model makes all others late, it is chance which of them is late first.
        let most = self.config.slippage * LATE_FRACTION;
        let worst = all()
            .filter(|(_, model, track)| is_laggard(model, track, now, most))
            .map(|(id, model, track)| (model.demand(track.span().unwrap_or_default()), id))
            // A model that would take less than its part is late because of another one, or of the disk.
            .filter(|(demand, _)| *demand >= part)
            .max_by(|one, other| one.0.total_cmp(&other.0));
        let Some((demand, worst)) = worst else { return };
        self.last_demotion = Some(now);
        for (&id, model) in &mut self.models {
            let laggards: Vec<TaskId> = model
                .tasks
                .iter()
                .filter(|(_, track)| is_laggard(model, track, now, most))
                .map(|(&task, _)| task)
                .collect();
            for task in laggards {
                let Some(track) = model.tasks.get_mut(&task) else { continue };
                if id != worst {
                    track.forgive();
                    continue;
                }
                let (slippage, priority) = (track.slippage(now), track.task.priority);
                track.demote();
                let model = model.name.clone();
                let event = ScheduleEvent::Demoted { at: now, task, model, priority, slippage, demand };
                self.counters.note(event);
            }
        }
    }
}

fn is_laggard(model: &ModelQueue, track: &TaskProgress, now: Duration, most: f64) -> bool {
    if track.task.priority == Priority::Pinned || track.is_demoted() || track.slippage(now) <= most {
        return false;
    }
    // A first token that only waited for others makes no laggard.
    track.tokens > 0 || track.span().is_some_and(|span| model.demand(span) >= 1.0)
}
