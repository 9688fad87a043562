//! A simulated engine that checks the scheduler after every layer.

#![allow(clippy::unwrap_used)]
#![cfg_attr(not(test), allow(dead_code))] // Tests use the rest.

use std::time::Duration;

use super::monitor::Monitor;
use super::*;
use firebox_memory::thermal::Heat;

pub fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// A request and its tokens.
#[derive(Debug, Clone)]
pub struct Request {
    pub id: TaskId,
    pub task: Task,
    /// Passes before the first token.
    pub prompt: usize,
    pub tokens: usize,
    pub came: Vec<Duration>,
}

/// A model whose layers take a given time.
#[derive(Debug, Clone)]
pub struct Model {
    pub id: ModelId,
    pub layer: Duration,
    pub layers: usize,
    /// The time until the next layer is read, if it is not in memory.
    pub loading: Duration,
    pub is_idle: bool,
    pub requests: Vec<Request>,
    next_layer: usize,
    there_at: Duration,
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
pub struct Harness {
    pub scheduler: Scheduler,
    pub models: Vec<Model>,
    pub now: Duration,
    pub done: Vec<Request>,
    pub idle: Duration,
    monitor: Monitor,
}

impl Harness {
    pub fn new() -> Self {
        Self {
            scheduler: Scheduler::new(ScheduleConfig::default()),
            models: Vec::new(),
            now: Duration::ZERO,
            done: Vec::new(),
            idle: Duration::ZERO,
            monitor: Monitor::default(),
        }
    }

    /// Adds a model whose tokens take `token`, divided into layers.
    pub fn model(&mut self, token: Duration, layers: usize) -> usize {
        let id = self.scheduler.add_model(&format!("model {}", self.models.len()));
        self.models.push(Model {
            id,
            layer: token / layers as u32,
            layers,
            loading: Duration::ZERO,
            is_idle: false,
            requests: Vec::new(),
            next_layer: 0,
            there_at: Duration::ZERO,
        });
        self.models.len() - 1
    }

    pub fn request(&mut self, model: usize, task: Task, prompt: usize, tokens: usize) -> TaskId {
        let id = self.scheduler.add(self.now, self.models[model].id, task);
        let request = Request { id, task, prompt, tokens, came: Vec::new() };
        self.models[model].requests.push(request);
        id
    }

    pub fn cancel(&mut self, model: usize, request: usize) {
        let request = self.models[model].requests.remove(request);
        self.scheduler.remove(request.id);
    }

    pub fn drop_model(&mut self, model: usize) {
        let model = self.models.remove(model);
        self.scheduler.remove_model(model.id);
    }

    pub fn run_until(&mut self, end: Duration) {
        while self.now < end {
            if !self.step() {
                self.idle += end.saturating_sub(self.now);
                self.now = end.max(self.now);
            }
        }
    }

    /// Runs a layer or waits. Returns false if there is nothing to do or to wait for.
    pub fn step(&mut self) -> bool {
        let Some(model) = self.chosen() else {
            let next = self.models.iter().filter(|model| model.readiness(self.now) == Readiness::Waiting);
            let Some(next) = next.map(|model| model.there_at).min() else { return false };
            self.idle += next - self.now;
            self.now = next;
            return true;
        };
        self.run_layer(model);
        let models = &self.models;
        self.scheduler.prefetch(self.now).for_each(|id| assert!(models.iter().any(|m| m.id == id)));
        true
    }

    fn chosen(&mut self) -> Option<usize> {
        let (models, now) = (&self.models, self.now);
        let found = |id| models.iter().position(|model| model.id == id).unwrap();
        let choice = self.scheduler.choose(now, |id| models[found(id)].readiness(now));
        match choice {
            Choice::Run { model: id, until } => {
                let model = found(id);
                assert_eq!(models[model].readiness(now), Readiness::Ready, "chose what cannot run");
                assert!(until > now && until - now <= ms(50));
                Some(model)
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
        let began = self.now;
        self.now += took;
        let (models, running) = (&self.models, self.models[index].id);
        let readiness = |id| models.iter().find(|model| model.id == id).unwrap().readiness(began);
        let violation = self.monitor.look(&self.scheduler, began, took, running, readiness);
        assert_eq!(violation, None);
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

    pub fn set_heat(&mut self, heat: Heat) {
        self.scheduler.set_heat(heat);
    }

    /// Returns the number of tokens of a request, finished or not.
    pub fn tokens(&self, id: TaskId) -> usize {
        let all = self.models.iter().flat_map(|model| &model.requests).chain(&self.done);
        all.filter(|request| request.id == id).map(|request| request.came.len()).sum()
    }
}
