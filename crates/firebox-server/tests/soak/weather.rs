//! What happens to a machine: memory gets short, it gets hot, and both pass.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use firebox_runtime::Model;
use firebox_runtime::engine::Engine;
use firebox_runtime::pressure::{Level, Pressure};
use firebox_runtime::thermal::Thermometer;

use crate::visitor::Dice;

const STEP: Duration = Duration::from_millis(40);
/// Degrees from one step to the next: up and down again in ten seconds.
const RAMP: f32 = 0.5;
const COOL: f32 = 45.0;
const HOT: f32 = 105.0;
/// One step in so many brings a shortage of memory.
const SHORTAGES: u64 = 15;

/// How often what has happened.
#[derive(Debug, Clone, Copy, Default)]
pub struct Happened {
    pub shortages: u64,
    pub emergencies: u64,
    pub heats: u64,
}

pub struct Weather {
    over: Arc<AtomicBool>,
    thread: JoinHandle<Happened>,
}

impl Weather {
    pub fn begin(engine: Engine, models: Arc<Mutex<Vec<Model>>>, seed: u64) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let ends = over.clone();
        let thread = std::thread::spawn(move || {
            let (mut dice, mut happened, celsius) =
                (Dice::new(seed), Happened::default(), Celsius::default());
            let (mut thermometer, mut degrees, mut rises) = (celsius.thermometer(), COOL, true);
            let mut told = 0;
            while !ends.load(Ordering::Relaxed) {
                std::thread::sleep(STEP);
                degrees += if rises { RAMP } else { -RAMP };
                rises = if rises { degrees < HOT } else { degrees <= COOL };
                celsius.set(degrees);
                let before = thermometer.heat();
                if thermometer.read() != before {
                    let heat = thermometer.heat();
                    engine.with_host(move |host| host.set_heat(heat)).unwrap();
                    happened.heats += 1;
                }
                let models = models.lock().unwrap().clone();
                for model in models.iter().skip(told).filter_map(Model::fit) {
                    model.set_thermometer(celsius.thermometer());
                }
                told = models.len();
                if !dice.one_in(SHORTAGES) {
                    continue;
                }
                let level = if dice.one_in(4) { Level::Critical } else { Level::Some };
                if level == Level::Critical {
                    happened.emergencies += 1;
                } else {
                    happened.shortages += 1;
                }
                for fit in models.iter().filter_map(Model::fit) {
                    fit.warn(Pressure { level, available: Some(0) });
                }
            }
            happened
        });
        Self { over, thread }
    }

    pub fn end(self) -> Happened {
        self.over.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

/// A temperature that thermometers read.
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
