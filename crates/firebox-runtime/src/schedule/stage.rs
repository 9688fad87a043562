//! An engine with made models, which looks whether the scheduler does what it should.

use std::time::Duration;

use super::*;
use crate::thermal::Heat;

pub fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// A request and what came of it.
#[derive(Debug, Clone)]
pub struct Request {
    pub id: TaskId,
    pub task: Task,
    /// Passes before the first token.
    pub prompt: usize,
    pub tokens: usize,
    pub came: Vec<Duration>,
    blocked: Duration,
}

/// A model that takes as long as it is told.
#[derive(Debug, Clone)]
pub struct Model {
    pub id: LaneId,
    pub layer: Duration,
    pub layers: usize,
    /// How long the next layer takes to read where it is not in memory.
    pub loading: Duration,
    pub is_idle: bool,
    pub requests: Vec<Request>,
    next_layer: usize,
    there_at: Duration,
    ready_since: Option<Duration>,
}

impl Model {
    fn readiness(&self, now: Duration) -> Readiness {
        if self.is_idle || self.requests.is_empty() {
            Readiness::Idle
        } else if self.there_at > now {
            Readiness::Waiting
        } else {
            Readiness::Ready
        }
    }
}

/// Models, a clock and a scheduler.
#[derive(Debug)]
pub struct Stage {
    pub scheduler: Scheduler,
    pub models: Vec<Model>,
    pub now: Duration,
    pub done: Vec<Request>,
    pub idle: Duration,
    running: Option<(usize, Duration)>,
    longest_layer: Duration,
    most_models: usize,
}

impl Stage {
    pub fn new() -> Self {
        Self {
            scheduler: Scheduler::new(ScheduleConfig::default()),
            models: Vec::new(),
            now: Duration::ZERO,
            done: Vec::new(),
            idle: Duration::ZERO,
            running: None,
            longest_layer: Duration::ZERO,
            most_models: 0,
        }
    }

    /// A model whose tokens take so long, in layers.
    pub fn model(&mut self, token: Duration, layers: usize) -> usize {
        let id = self.scheduler.lane(&format!("model {}", self.models.len()));
        self.models.push(Model {
            id,
            layer: token / layers as u32,
            layers,
            loading: Duration::ZERO,
            is_idle: false,
            requests: Vec::new(),
            next_layer: 0,
            there_at: Duration::ZERO,
            ready_since: None,
        });
        self.most_models = self.most_models.max(self.models.len());
        self.models.len() - 1
    }

    pub fn request(&mut self, model: usize, task: Task, prompt: usize, tokens: usize) -> TaskId {
        let id = self.scheduler.add(self.now, self.models[model].id, task);
        let request = Request { id, task, prompt, tokens, came: Vec::new(), blocked: Duration::ZERO };
        self.models[model].requests.push(request);
        id
    }

    pub fn cancel(&mut self, model: usize, request: usize) {
        let request = self.models[model].requests.remove(request);
        self.scheduler.remove(request.id);
    }

    pub fn drop_model(&mut self, model: usize) {
        let model = self.models.remove(model);
        self.scheduler.drop_lane(model.id);
        self.running = None;
    }

    pub fn run_until(&mut self, end: Duration) {
        while self.now < end {
            if !self.step() {
                self.idle += end.saturating_sub(self.now);
                self.now = end.max(self.now);
            }
        }
    }

    /// One layer, or a wait; nothing where there is nothing to do or to wait for.
    pub fn step(&mut self) -> bool {
        let Some((model, until)) = self.running.or_else(|| self.chosen()) else {
            let next = self.models.iter().filter(|model| model.readiness(self.now) == Readiness::Waiting);
            let Some(next) = next.map(|model| model.there_at).min() else { return false };
            self.idle += next - self.now;
            self.now = next;
            return true;
        };
        self.run_layer(model);
        let models = &self.models;
        let ready = |lane| models.iter().find(|model| model.id == lane).unwrap().readiness(self.now);
        let leaves = ready(models[model].id) != Readiness::Ready
            || self.now >= until
            || self.scheduler.preempts(self.now, models[model].id, ready);
        self.running = (!leaves).then_some((model, until));
        self.scheduler.prefetch(self.now).for_each(|lane| assert!(models.iter().any(|m| m.id == lane)));
        true
    }

    fn chosen(&mut self) -> Option<(usize, Duration)> {
        let (models, now) = (&self.models, self.now);
        let found = |lane| models.iter().position(|model| model.id == lane).unwrap();
        let choice = self.scheduler.choose(now, |lane| models[found(lane)].readiness(now));
        match choice {
            Choice::Run { lane, until } => {
                let model = found(lane);
                assert_eq!(models[model].readiness(now), Readiness::Ready, "chose what cannot run");
                assert!(until > now && until - now <= ms(50));
                Some((model, until))
            }
            Choice::Wait { .. } => {
                assert!(
                    models.iter().all(|model| model.readiness(now) != Readiness::Ready),
                    "waits while something is ready"
                );
                None
            }
        }
    }

    fn run_layer(&mut self, index: usize) {
        let took = self.models[index].layer;
        self.longest_layer = self.longest_layer.max(took);
        self.now += took;
        self.watch(index, took);
        let (now, scheduler) = (self.now, &mut self.scheduler);
        let model = &mut self.models[index];
        model.next_layer += 1;
        model.there_at = now + std::mem::take(&mut model.loading);
        scheduler.ran(now, model.id, took, 1);
        if model.next_layer < model.layers {
            return;
        }
        model.next_layer = 0;
        for request in &mut model.requests {
            if request.prompt > 0 {
                request.prompt -= 1;
            } else {
                request.came.push(now);
                scheduler.token(now, request.id);
            }
        }
        let is_done = |request: &mut Request| request.came.len() >= request.tokens;
        for request in model.requests.extract_if(.., is_done) {
            scheduler.remove(request.id);
            self.done.push(request);
        }
    }

    /// Looks whether somebody was wronged while a model ran a layer.
    fn watch(&mut self, running: usize, took: Duration) {
        let began = self.now - took;
        let longest = (ms(50).div_f64(self.scheduler.config().share)) * (self.most_models as u32 + 2)
            + self.longest_layer * (self.most_models as u32 + 2);
        let best = self.models[running]
            .requests
            .iter()
            .filter(|request| !self.scheduler.is_demoted(request.id))
            .filter(|request| self.scheduler.due(request.id).is_some())
            .map(|request| request.task.priority)
            .max();
        for (index, model) in self.models.iter_mut().enumerate() {
            if index == running || model.readiness(began) != Readiness::Ready {
                model.ready_since = None;
                model.requests.iter_mut().for_each(|request| request.blocked = Duration::ZERO);
                continue;
            }
            let since = *model.ready_since.get_or_insert(began);
            assert!(self.now - since <= longest, "starves for {:?}", self.now - since);
            for request in &mut model.requests {
                let is_late = self.scheduler.due(request.id).is_some_and(|due| due < began);
                let is_wronged = is_late
                    && !self.scheduler.is_demoted(request.id)
                    && best.is_none_or(|best| best < request.task.priority);
                request.blocked = if is_wronged { request.blocked + took } else { Duration::ZERO };
                assert!(
                    request.blocked <= ms(50) + self.longest_layer * 3,
                    "{:?} is late and held up by {best:?} for {:?}",
                    request.task.priority,
                    request.blocked
                );
            }
        }
    }

    pub fn set_heat(&mut self, heat: Heat) {
        self.scheduler.set_heat(heat);
    }

    /// Tokens that requests of a model have got, done or not.
    pub fn tokens(&self, id: TaskId) -> usize {
        let all = self.models.iter().flat_map(|model| &model.requests).chain(&self.done);
        all.filter(|request| request.id == id).map(|request| request.came.len()).sum()
    }
}
