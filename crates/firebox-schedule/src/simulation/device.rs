//! The simulated machine.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::Profile;
use super::random::Random;
use crate::ScheduleError;
use firebox_memory::Budget;
use firebox_memory::pressure::{Headroom, Level, Pressure, PressureSource, Warning};
use firebox_memory::thermal::{Heat, Thermometer};

/// The interval at which temperature and memory change.
pub(super) const TICK: Duration = Duration::from_secs(1);

/// The simulated machine: its temperature, its memory, and other programs.
pub(super) struct Device {
    pub profile: Profile,
    pub budget: Budget,
    memory: Memory,
    celsius: Arc<AtomicU32>,
    thermometer: Thermometer,
    others: Vec<Other>,
    warnings: Vec<Warning>,
    warned: Level,
    pub heat_seconds: [u64; 4],
    pub hottest: f64,
    pub raised: u64,
    pub short_seconds: u64,
    pub longest_overcommitment: u64,
    overcommitted: u64,
}

/// Another program that takes memory for a while.
#[derive(Debug, Clone, Copy)]
struct Other {
    bytes: u64,
    until: Duration,
}

/// The memory accounts, shared with pressure sources.
#[derive(Debug, Clone)]
struct Memory {
    total: u64,
    others: Arc<AtomicU64>,
    budget: Budget,
}

impl Memory {
    /// Returns the free bytes; negative if more is in use than exists.
    fn left(&self) -> i128 {
        let held = self.budget.total() - self.budget.left();
        i128::from(self.total) - i128::from(self.others.load(Ordering::Relaxed)) - i128::from(held)
    }

    fn pressure(&self) -> Pressure {
        let available = u64::try_from(self.left()).unwrap_or(0);
        Headroom { available, total: self.total, is_shared: true }.pressure_under(Level::None)
    }
}

impl Device {
    pub fn new(profile: &Profile) -> Result<Self, ScheduleError> {
        let budget = Budget::new(profile.budget);
        let celsius = Arc::new(AtomicU32::new((profile.heat.idle as f32).to_bits()));
        let read = celsius.clone();
        let sensor = move || Some(f32::from_bits(read.load(Ordering::Relaxed)));
        let others = Arc::new(AtomicU64::new(profile.others.system));
        Ok(Self {
            memory: Memory { total: profile.memory, others, budget: budget.clone() },
            profile: profile.clone(),
            budget,
            celsius,
            thermometer: Thermometer::new(sensor).with_marks(profile.heat.marks()),
            others: Vec::new(),
            warnings: Vec::new(),
            warned: Level::None,
            heat_seconds: [0; 4],
            hottest: profile.heat.idle,
            raised: 0,
            short_seconds: 0,
            longest_overcommitment: 0,
            overcommitted: 0,
        })
    }

    /// Returns the pressure sources of a governor.
    pub fn sources(&mut self) -> Vec<Box<dyn PressureSource>> {
        let memory = self.memory.clone();
        let mut sources: Vec<Box<dyn PressureSource>> = vec![Box::new(move || Some(memory.pressure()))];
        if self.profile.others.warns {
            let (warning, warned) = Warning::channel();
            self.warnings.push(warning);
            sources.push(Box::new(warned));
        }
        sources
    }

    /// Advances by a second of which the machine worked for `load`. Returns the thermal state.
    pub fn tick(&mut self, now: Duration, load: f64, random: &mut Random) -> Heat {
        self.warm(load);
        self.change_programs(now, random);
        let level = self.memory.pressure().level;
        self.short_seconds += u64::from(level != Level::None);
        self.overcommitted = if self.memory.left() < 0 { self.overcommitted + 1 } else { 0 };
        self.longest_overcommitment = self.longest_overcommitment.max(self.overcommitted);
        // Systems warn when pressure rises, and do not report its end.
        if level > self.warned && !self.warnings.is_empty() {
            self.raised += 1;
            self.warnings.iter().for_each(|warning| warning.raise(level));
        }
        self.warned = level;
        let heat = self.thermometer.read();
        self.heat_seconds[heat as usize] += 1;
        heat
    }

    fn warm(&mut self, load: f64) {
        let body = self.profile.heat;
        // A throttled machine produces less heat for the same work.
        let power = load.min(1.0) / body.slowdown(self.thermometer.heat());
        let celsius = f64::from(f32::from_bits(self.celsius.load(Ordering::Relaxed)));
        let towards = body.idle + body.rise * power;
        let celsius = celsius + (towards - celsius) * (1.0 - (-TICK.as_secs_f64() / body.seconds).exp());
        self.hottest = self.hottest.max(celsius);
        self.celsius.store((celsius as f32).to_bits(), Ordering::Relaxed);
    }

    fn change_programs(&mut self, now: Duration, random: &mut Random) {
        let others = self.profile.others;
        self.others.retain(|other| other.until > now);
        if random.share() < others.per_hour * TICK.as_secs_f64() / 3600.0 {
            let bytes = (others.largest as f64 * random.share()) as u64;
            self.others.push(Other { bytes, until: now + random.wait(others.minutes * 60.0) });
        }
        let limit = self.profile.memory.saturating_sub(others.system);
        // The system ends background programs before memory runs out: no more than half of the models' memory has to go.
        let most = limit.saturating_sub(self.profile.budget / 2);
        let taken = self.others.iter().map(|other| other.bytes).sum::<u64>().min(most);
        self.memory.others.store(others.system + taken, Ordering::Relaxed);
    }

    pub fn heat(&self) -> Heat {
        self.thermometer.heat()
    }

    /// Returns the bytes that can be taken before memory is short.
    pub fn available(&self) -> u64 {
        self.memory.pressure().available.unwrap_or(0)
    }

    /// Returns whether more memory is in use than exists.
    pub fn is_overcommitted(&self) -> bool {
        self.overcommitted > 0
    }
}
