//! Two models that decode beside each other, on all cores together and on cores of their own.
//!
//! `FIREBOX_BENCH_MODEL=LARGE FIREBOX_BENCH_SMALL=SMALL cargo bench --bench placement -- [ROUNDS [SECONDS]]`. Rounds take
//! turns; printed are medians over them, with the lowest and the highest.
#![allow(clippy::print_stdout, reason = "a benchmark's result")]

use std::error::Error;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use firebox::placement::{Cores, CpuPolicy, Placed};
use firebox::telemetry::{Histogram, Meters};
use firebox::{Model, RuntimeError, Session, device};

/// What the command line uses too.
#[global_allocator]
static ALLOCATOR: firebox_allocator::Allocator = firebox_allocator::Allocator;

/// What steps are measured after.
const DEPTH: u32 = 32;

/// Decodes until it is told to stop. Returns steps a second, and milliseconds that all but one in a hundred took at most.
fn decode(model: &Model, placed: &Placed, cores: Cores, stop: &AtomicBool) -> Result<[f64; 2], RuntimeError> {
    placed.run(cores, || {
        let mut session: Session = model.session()?;
        let tokens: Vec<u32> = (0..DEPTH).map(|at| 3 + at * 31 % 150).collect();
        session.feed(&tokens)?;
        let times = Meters::default();
        let began = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            let began = Instant::now();
            session.feed(&[5])?;
            times.took(Histogram::InterToken, began.elapsed());
            session.rewind(DEPTH as usize);
        }
        let times = times.distribution(Histogram::InterToken);
        let longest = times.quantile(0.99).unwrap_or(f64::NAN) / 1e3;
        Ok([times.count() as f64 / began.elapsed().as_secs_f64(), longest])
    })
}

/// Both at the same time.
fn both(models: &[Model; 2], placed: &Placed, time: Duration) -> Result<[[f64; 2]; 2], RuntimeError> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let [small, large] = [Cores::Small, Cores::Large].map(|cores| {
            let (model, stop) = (&models[cores as usize], &stop);
            scope.spawn(move || decode(model, placed, cores, stop))
        });
        std::thread::sleep(time);
        stop.store(true, Ordering::Relaxed);
        let joined = |thread: std::thread::ScopedJoinHandle<'_, _>| match thread.join() {
            Ok(measured) => measured,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        Ok([joined(small)?, joined(large)?])
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let numbers: Vec<usize> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    let rounds = numbers.first().copied().unwrap_or(5);
    let time = Duration::from_secs(numbers.get(1).copied().unwrap_or(4) as u64);
    let path = |variable: &str, fixture: &str| {
        let own = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference").join(fixture);
        std::env::var_os(variable).map_or(own, PathBuf::from)
    };
    let cpu = device("cpu")?;
    let models = [
        Model::open(path("FIREBOX_BENCH_SMALL", "llama"), &cpu)?,
        Model::open(path("FIREBOX_BENCH_MODEL", "qwen3"), &cpu)?,
    ];
    let cores = std::thread::available_parallelism()?.get();
    let ways = [
        ("together", Placed::new(CpuPolicy::Off)?),
        ("apart", Placed::new(CpuPolicy::Split { small: (cores / 4).max(1) })?),
    ];
    let mut measured = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        for way in [round % 2, 1 - round % 2] {
            measured[way].push(both(&models, &ways[way].1, time)?);
        }
    }
    for ((name, _), rounds) in ways.iter().zip(&measured) {
        for (model, which) in ["small", "large"].into_iter().enumerate() {
            let sorted = |what: usize| {
                let mut values: Vec<f64> = rounds.iter().map(|round| round[model][what]).collect();
                values.sort_by(f64::total_cmp);
                (values[values.len() / 2], values[0], values[values.len() - 1])
            };
            let ((speed, low, high), (longest, ..)) = (sorted(0), sorted(1));
            println!("{name:<9} {which}: {speed:>8.1} tok/s ({low:.1}-{high:.1}), p99 {longest:.2} ms");
        }
    }
    Ok(())
}
