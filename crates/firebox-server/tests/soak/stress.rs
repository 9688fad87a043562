//! Stress on the machine: memory pressure and heat.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use firebox_engine::Engine;
use firebox_runtime::Model;
use firebox_runtime::pressure::{Level, Pressure};
use firebox_runtime::thermal::Thermometer;

use crate::user::Random;

const STEP: Duration = Duration::from_millis(40);
/// Degrees per step: up and down in ten seconds.
const DEGREES_PER_STEP: f32 = 0.5;
const COOL: f32 = 45.0;
const HOT: f32 = 105.0;
/// One step in this many causes memory pressure.
const STEPS_PER_SHORTAGE: u64 = 15;

/// Counts of events.
#[derive(Debug, Clone, Copy, Default)]
pub struct EventCounts {
    pub shortages: u64,
    pub emergencies: u64,
    pub heats: u64,
}

pub struct Stress {
    over: Arc<AtomicBool>,
    thread: JoinHandle<EventCounts>,
}

impl Stress {
    pub fn begin(engine: Engine, models: Arc<Mutex<Vec<Model>>>, seed: u64) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let ends = over.clone();
        let thread = std::thread::spawn(move || {
            let (mut random, mut happened, celsius) =
                (Random::new(seed), EventCounts::default(), Celsius::default());
            let (mut thermometer, mut degrees, mut rises) = (celsius.thermometer(), COOL, true);
            let mut told = 0;
            while !ends.load(Ordering::Relaxed) {
                std::thread::sleep(STEP);
                degrees += if rises { DEGREES_PER_STEP } else { -DEGREES_PER_STEP };
                rises = if rises { degrees < HOT } else { degrees <= COOL };
                celsius.set(degrees);
                let before = thermometer.heat();
                if thermometer.read() != before {
                    let heat = thermometer.heat();
                    engine.with_core(move |core| core.set_heat(heat)).unwrap();
                    happened.heats += 1;
                }
                let models = models.lock().unwrap().clone();
                for model in models.iter().skip(told).filter_map(Model::residency) {
                    model.set_thermometer(celsius.thermometer());
                }
                told = models.len();
                if !random.one_in(STEPS_PER_SHORTAGE) {
                    continue;
                }
                let level = if random.one_in(4) { Level::Critical } else { Level::Some };
                if level == Level::Critical {
                    happened.emergencies += 1;
                } else {
                    happened.shortages += 1;
                }
                for fit in models.iter().filter_map(Model::residency) {
                    fit.warn(Pressure { level, available: Some(0) });
                }
            }
            happened
        });
        Self { over, thread }
    }

    pub fn end(self) -> EventCounts {
        self.over.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

/// A temperature that the thermometers read.
#[derive(Default, Clone)]
struct Celsius(Arc<AtomicU32>);

impl Celsius {
    fn set(&self, degrees: f32) {
        self.0.store(degrees.to_bits(), Ordering::Relaxed);
    }

    fn thermometer(&self) -> Thermometer {
        let degrees = self.0.clone();
        Thermometer::new(move || Some(f32::from_bits(degrees.load(Ordering::Relaxed))))
    }
}
