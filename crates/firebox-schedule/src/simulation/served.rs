//! A simulated model with its queue and its governor.

use std::collections::BTreeMap;
use std::time::Duration;

use super::device::Device;
use super::mix::{RESERVED_TOKENS, SimulatedModel};
use crate::ScheduleError;
use crate::{AdmissionConfig, ModelId, Queue, Readiness, TaskId, Ticket};
use firebox_memory::governor::{Event, Governor, GovernorConfig, Residency, ResidencyPlan};
use firebox_memory::planner::{FEWEST_BUFFERS, Mode, Shape, plan, predict};
use firebox_memory::{Account, Budget, Charge};

/// Rows of a prompt that share a pass with tokens of answers, which wait for them.
const SHARED_PASS_ROWS: usize = 16;
/// Rows of a prompt that have a pass of their own, so that a quantum does not wait for one layer.
const PROMPT_PASS_ROWS: usize = 128;

/// An admitted request.
#[derive(Debug)]
pub(super) struct Request {
    pub traffic: usize,
    pub arrived: Duration,
    /// The task in the scheduler; `None` while it waits.
    pub task: Option<TaskId>,
    /// Rows of the prompt that are not in the cache yet.
    pub prompt: usize,
    pub answer: usize,
    pub tokens: usize,
    pub kv_bytes: u64,
    pub kv: Option<Charge>,
    /// Whether something beyond the scheduler's control delayed it.
    pub excused: bool,
    /// The time of its own passes.
    pub spent: Duration,
}

/// A pass through all layers.
#[derive(Debug, Default)]
pub(super) struct Pass {
    pub decoding: Vec<Ticket>,
    pub prompt: Option<(Ticket, usize)>,
    pub spent: Duration,
    /// Whether it waited for the disk.
    pub waited: bool,
}

impl Pass {
    pub fn rows(&self) -> usize {
        self.decoding.len() + self.prompt.map_or(0, |(_, rows)| rows)
    }
}

/// The resident layers.
pub(super) struct ResidentLayers {
    layers: Vec<Option<Charge>>,
    bytes: u64,
    budget: Budget,
}

impl ResidentLayers {
    pub fn count(&self) -> usize {
        self.layers.iter().flatten().count()
    }

    /// Evicts the last resident layer. Returns whether there was one.
    pub fn evict_last(&mut self) -> bool {
        let last = self.layers.iter_mut().rev().find(|layer| layer.is_some());
        last.and_then(Option::take).is_some()
    }
}

impl Residency for ResidentLayers {
    fn layers(&self) -> usize {
        self.layers.len()
    }

    fn is_resident(&self, layer: usize) -> bool {
        self.layers[layer].is_some()
    }

    fn bytes(&self, _: usize) -> u64 {
        self.bytes
    }

    fn load(&mut self, layer: usize) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        self.layers[layer] = Some(self.budget.charge(Account::Weights, self.bytes)?);
        Ok(())
    }

    fn evict(&mut self, layer: usize) {
        self.layers[layer] = None;
    }
}

/// A model at work.
pub(super) struct Served {
    pub id: ModelId,
    pub name: String,
    /// Whether some of its requests are pinned, so that other models cannot evict its layers.
    pub is_pinned: bool,
    pub queue: Queue,
    pub most_running: usize,
    pub requests: BTreeMap<Ticket, Request>,
    pub kept: ResidentLayers,
    pub governor: Governor,
    pub planned: usize,
    pub fewest_kept: usize,
    pub events: [u64; 4],
    pub next_layer: usize,
    pub last_ran: Duration,
    pub pass: Option<Pass>,
    pub tokens: u64,
    pub streamed_bytes: u64,
    /// Layers in the ring that were read and not yet computed.
    buffered: Vec<bool>,
    pub ring: usize,
    pub layer_bytes: u64,
    /// The unused part of the memory reserved for its own sequences.
    reserve: Charge,
    reserve_bytes: u64,
    layer_seconds: f64,
    seconds_per_row: f64,
    _standing: Vec<Charge>,
}

impl Served {
    /// Creates a model with a plan for `memory`.
    pub fn new(
        id: ModelId,
        model: &SimulatedModel,
        memory: u64,
        is_pinned: bool,
        device: &mut Device,
    ) -> Result<Self, ScheduleError> {
        let shape: Shape = model.shape();
        let rates = device.profile.speed.rates(&shape)?;
        let plan = plan(&shape, &rates, memory, Mode::Throughput, 1024)?;
        let nothing = vec![false; shape.parts.len()];
        let streaming = predict(&shape, &rates, &nothing, plan.buffers.max(FEWEST_BUFFERS))?;
        let ring = plan.buffers.max(FEWEST_BUFFERS);
        let layer_bytes = shape.parts[0].kept_bytes;
        let standing = vec![
            device.budget.charge(Account::Program, shape.fixed_bytes)?,
            device.budget.charge(Account::Activations, plan.chunk as u64 * shape.activation_bytes_per_row)?,
            device.budget.charge(Account::Scratch, ring as u64 * layer_bytes)?,
        ];
        let reserve_bytes = RESERVED_TOKENS * shape.kv_bytes_per_token;
        let reserve = device.budget.charge(Account::Streams, reserve_bytes)?;
        let mut kept = ResidentLayers {
            layers: shape.parts.iter().map(|_| None).collect(),
            bytes: layer_bytes,
            budget: device.budget.clone(),
        };
        for &layer in &plan.kept_layers {
            // A plan that keeps everything counts no ring, but the simulated model has one for later evictions.
            if kept.load(layer).is_err() {
                break;
            }
        }
        let admission = AdmissionConfig::default();
        let residency = ResidencyPlan {
            keep: plan.kept_layers.clone(),
            step_time: Duration::from_secs_f64(plan.prediction.seconds_per_token),
            streaming_step_time: Duration::from_secs_f64(streaming.seconds_per_token * 0.8),
        };
        Ok(Self {
            id,
            name: model.name.clone(),
            is_pinned,
            most_running: admission.most_running,
            queue: Queue::new(admission),
            requests: BTreeMap::new(),
            planned: plan.kept_layers.len(),
            fewest_kept: kept.count(),
            kept,
            governor: Governor::new(residency, device.sources(), GovernorConfig::default()),
            events: [0; 4],
            next_layer: 0,
            last_ran: Duration::ZERO,
            pass: None,
            tokens: 0,
            streamed_bytes: 0,
            buffered: nothing,
            ring,
            layer_bytes,
            reserve,
            reserve_bytes,
            layer_seconds: rates.compute[0],
            seconds_per_row: model.operations_per_row() / device.profile.operations_per_second(),
            _standing: standing,
        })
    }

    /// Returns the bytes that can be evicted for more valuable data.
    pub fn evictable_bytes(&self) -> u64 {
        if self.is_pinned { 0 } else { self.kept.count() as u64 * self.layer_bytes }
    }

    /// Returns the unused bytes of its reserved context.
    pub fn reserved(&self) -> u64 {
        self.reserve.bytes()
    }

    /// Releases bytes of the reserved context for a sequence that is about to take them.
    pub fn release_reserve(&mut self, bytes: u64) {
        let left = self.reserve.bytes().saturating_sub(bytes);
        // Shrinking never fails.
        let _ = self.reserve.resize(left);
    }

    /// Takes the reserved context back after sequences have ended.
    pub fn refill(&mut self) {
        let used: u64 =
            self.requests.values().filter_map(|request| request.kv.as_ref()).map(Charge::bytes).sum();
        // If others hold that memory now, a later call takes it back.
        let _ = self.reserve.resize(self.reserve_bytes.saturating_sub(used));
    }

    pub fn layers(&self) -> usize {
        self.buffered.len()
    }

    fn has(&self, layer: usize) -> bool {
        self.kept.is_resident(layer) || self.buffered[layer]
    }

    pub fn readiness(&self) -> Readiness {
        if self.pass.is_none() && !self.requests.values().any(|request| request.task.is_some()) {
            Readiness::Idle
        } else if self.has(self.next_layer) {
            Readiness::Ready
        } else {
            Readiness::Waiting
        }
    }

    /// Returns the layer to read next if the ring may hold `depth` layers.
    pub fn wanted(&self, depth: usize) -> Option<usize> {
        let in_ring = self.buffered.iter().filter(|buffered| **buffered).count();
        // A layer that blocks the pass is read even if another one loses its buffer.
        if in_ring >= depth.min(self.ring) && self.has(self.next_layer) {
            return None;
        }
        self.in_order().find(|&layer| !self.has(layer))
    }

    /// Returns all layers in the order in which they are needed.
    fn in_order(&self) -> impl DoubleEndedIterator<Item = usize> + use<> {
        let (next, layers) = (self.next_layer, self.layers());
        (0..layers).map(move |ahead| (next + ahead) % layers)
    }

    /// Frees a buffer of the ring: an evicted layer may be needed before those that are in it.
    pub fn make_room(&mut self) {
        while self.buffered.iter().filter(|buffered| **buffered).count() >= self.ring {
            let Some(last) = self.in_order().rev().find(|&layer| self.buffered[layer]) else { return };
            self.buffered[last] = false;
        }
    }

    pub fn has_read(&mut self, layer: usize) {
        self.buffered[layer] = true;
        self.streamed_bytes += self.layer_bytes;
    }

    /// Begins a pass over all requests that decode, and a chunk of the first prompt.
    pub fn begin_pass(&mut self) {
        if self.pass.is_some() {
            return;
        }
        let running = || self.requests.iter().filter(|(_, request)| request.task.is_some());
        let decoding: Vec<Ticket> =
            running().filter(|(_, request)| request.prompt == 0).map(|(&ticket, _)| ticket).collect();
        let most = if decoding.is_empty() { PROMPT_PASS_ROWS } else { SHARED_PASS_ROWS };
        let prompt = running()
            .find(|(_, request)| request.prompt > 0)
            .map(|(&ticket, request)| (ticket, request.prompt.min(most)));
        self.pass = Some(Pass { decoding, prompt, ..Pass::default() });
    }

    /// Returns the time of the next layer on a cool machine that reads nothing.
    pub fn layer_seconds(&self) -> f64 {
        let rows = self.pass.as_ref().map_or(1, Pass::rows);
        self.layer_seconds.max(rows as f64 * self.seconds_per_row)
    }

    /// Returns the time of a request that runs alone on a cool machine with everything in memory.
    pub fn work_seconds(&self, prompt: usize, answer: usize) -> f64 {
        let pieces = prompt.div_ceil(PROMPT_PASS_ROWS) as f64;
        let prompt = (pieces * self.layer_seconds).max(prompt as f64 * self.seconds_per_row);
        (prompt + answer as f64 * self.layer_seconds) * self.layers() as f64
    }

    /// Ends a layer. Returns the pass if this was its last layer.
    pub fn ran(&mut self, took: Duration) -> Option<Pass> {
        self.buffered[self.next_layer] = false;
        if let Some(pass) = &mut self.pass {
            pass.spent += took;
        }
        self.next_layer = (self.next_layer + 1) % self.layers();
        if self.next_layer == 0 { self.pass.take() } else { None }
    }

    /// Lets the governor act on a pass, or on a time without one.
    pub fn govern(&mut self, pass: Option<&Pass>, time: Duration) {
        // The layers of a pinned model stay resident.
        if self.is_pinned {
            return;
        }
        let events = match pass {
            Some(pass) if pass.prompt.is_none() && pass.decoding.len() == 1 => {
                self.governor.after_step(1, time, 0, &mut self.kept)
            }
            Some(pass) => self.governor.after_pass(pass.rows(), time, &mut self.kept),
            None => self.governor.after_pass(0, time, &mut self.kept),
        };
        for event in events {
            let kind = match event {
                Event::Shed { .. } => 0,
                Event::Grew { .. } => 1,
                Event::Thrash { .. } => 2,
                Event::Refused { .. } => 3,
                _ => continue,
            };
            self.events[kind] += 1;
        }
        self.fewest_kept = self.fewest_kept.min(self.kept.count());
    }
}
