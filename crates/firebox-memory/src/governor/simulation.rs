//! A simulated machine whose step times follow those of real ones.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::*;

pub const LAYER_BYTES: u64 = 100 << 20;
/// The factor by which a layer slows down that should be resident and was paged out.
const FAULT_PENALTY: u32 = 10;

/// Layers in a memory that holds some of them.
pub struct Machine {
    kept: Vec<bool>,
    /// The number of layers that memory holds.
    pub capacity: usize,
    /// The times of a layer.
    pub resident: Duration,
    pub streamed: Duration,
    /// Whether loading fails.
    pub refuses: bool,
    /// Whether page faults are not counted.
    pub blind: bool,
    pub most_kept: usize,
    pub changes: usize,
}

impl Machine {
    pub fn kept(&self) -> Vec<usize> {
        (0..self.kept.len()).filter(|&layer| self.kept[layer]).collect()
    }

    fn streaming_step(&self) -> Duration {
        self.streamed * self.kept.len() as u32
    }

    /// Returns the time of a step and its page faults.
    fn step(&self) -> (Duration, u64) {
        let kept = self.kept().len();
        let streamed = self.streamed * (self.kept.len() - kept) as u32;
        if kept > self.capacity {
            let faults = if self.blind { 0 } else { 1000 * kept as u64 };
            (streamed + self.streamed * FAULT_PENALTY * kept as u32, faults)
        } else {
            (streamed + self.resident * kept as u32, 0)
        }
    }

    /// Returns the true pressure.
    fn pressure(&self) -> Pressure {
        let kept = self.kept().len();
        let level = match kept.saturating_sub(self.capacity) {
            0 => Level::None,
            over if over * 2 > self.kept.len() => Level::Critical,
            _ => Level::Some,
        };
        Pressure { level, available: Some(self.capacity.saturating_sub(kept) as u64 * LAYER_BYTES) }
    }
}

impl Residency for Machine {
    fn layers(&self) -> usize {
        self.kept.len()
    }

    fn is_resident(&self, layer: usize) -> bool {
        self.kept[layer]
    }

    fn bytes(&self, _: usize) -> u64 {
        LAYER_BYTES
    }

    fn load(&mut self, layer: usize) -> Result<(), Box<dyn Error + Send + Sync>> {
        if self.refuses {
            return Err("refused".into());
        }
        assert!(!std::mem::replace(&mut self.kept[layer], true), "kept twice");
        self.most_kept = self.most_kept.max(self.kept().len());
        self.changes += 1;
        Ok(())
    }

    fn evict(&mut self, layer: usize) {
        assert!(std::mem::replace(&mut self.kept[layer], false), "let go twice");
        self.changes += 1;
    }
}

/// The reading that the system reports.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Says {
    /// The true one.
    Truth,
    /// None.
    Nothing,
    /// A fixed one.
    This(Pressure),
}

/// A governor at work.
pub struct Run {
    pub machine: Machine,
    pub governor: Governor,
    pub events: Vec<Event>,
    pub spent: Duration,
    pub tokens: u32,
    said: Arc<Mutex<Option<Pressure>>>,
    noise: u32,
}

impl Run {
    /// Creates a machine that keeps the whole plan, its first `planned` layers, and has memory for them. A resident layer
    /// takes `resident` thousandths of the time of a streamed one.
    pub fn new(layers: usize, planned: usize, resident: u32) -> Self {
        Self::on(Duration::from_millis(1), layers, planned, resident, 100)
    }

    /// Creates a machine that takes `streamed` to stream a layer and whose plan expects `percent` of the true step times.
    pub fn on(streamed: Duration, layers: usize, planned: usize, resident: u32, percent: u32) -> Self {
        let machine = Machine {
            kept: (0..layers).map(|layer| layer < planned).collect(),
            capacity: planned,
            resident: streamed * resident / 1000,
            streamed,
            refuses: false,
            blind: false,
            most_kept: planned,
            changes: 0,
        };
        let plan = ResidencyPlan {
            keep: (0..planned).collect(),
            step_time: machine.step().0 * percent / 100,
            streaming_step_time: machine.streaming_step() * percent / 100,
        };
        let said = Arc::new(Mutex::new(None));
        let heard = said.clone();
        let source: Box<dyn PressureSource> = Box::new(move || *heard.lock().unwrap());
        let config = GovernorConfig { margin: LAYER_BYTES / 2, ..GovernorConfig::default() };
        let governor = Governor::new(plan, vec![source], config);
        Self { machine, governor, events: Vec::new(), spent: Duration::ZERO, tokens: 0, said, noise: 1 }
    }

    pub fn kept(&self) -> usize {
        self.machine.kept().len()
    }

    /// Runs steps of one token each.
    pub fn steps(&mut self, count: usize, says: Says) {
        for _ in 0..count {
            let (time, faults) = self.machine.step();
            let time = time * self.noise() / 1000;
            self.step(time, faults, says);
        }
    }

    /// Runs a step that takes `time`.
    pub fn step(&mut self, time: Duration, faults: u64, says: Says) {
        *self.said.lock().unwrap() = match says {
            Says::Truth => Some(self.machine.pressure()),
            Says::Nothing => None,
            Says::This(pressure) => Some(pressure),
        };
        self.spent = self.spent.saturating_add(time);
        self.tokens += 1;
        self.events.extend(self.governor.after_step(1, time, faults, &mut self.machine));
    }

    /// Returns the time spent as a multiple of streaming everything.
    pub fn cost(&self) -> f64 {
        self.spent.as_secs_f64() / (self.machine.streaming_step() * self.tokens).as_secs_f64()
    }

    /// Returns thousandths around 1000: step times vary by a few percent.
    fn noise(&mut self) -> u32 {
        self.noise = self.noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        970 + (self.noise >> 16) % 61
    }
}
