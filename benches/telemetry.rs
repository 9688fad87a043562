//! What it costs to count and to draw: single operations, and decode steps with and without, one after the other.
//!
//! `FIREBOX_BENCH_MODEL=MODEL cargo bench --bench telemetry -- [STEPS]`
#![allow(clippy::print_stdout, reason = "a benchmark's result")]

use std::error::Error;
use std::hint::black_box;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firebox::internals::model::Decoder;
use firebox::internals::store::Checkpoint;
use firebox::telemetry::{Counter, Histogram, Kind, TIMELINE_EVENTS, Telemetry, render};
use firebox::{Model, Session, device};

/// What the command line uses too.
#[global_allocator]
static ALLOCATOR: firebox_allocator::Allocator = firebox_allocator::Allocator;

/// Short enough to fall between two interruptions.
const TIMES: u32 = 10_000;
const ROUNDS: u32 = 200;
/// What a step is measured after.
const DEPTH: u32 = 32;

fn each(name: &str, mut work: impl FnMut()) {
    let round = |work: &mut dyn FnMut()| {
        let began = Instant::now();
        (0..TIMES).for_each(|_| work());
        began.elapsed().as_nanos() as f64 / f64::from(TIMES)
    };
    let least = (0..ROUNDS).map(|_| round(&mut work)).fold(f64::INFINITY, f64::min);
    println!("{name:<40} {least:>8.1} ns");
}

fn operations() {
    let telemetry = Telemetry::default();
    let model = telemetry.model("a");
    let session = telemetry.session(&model, "1");
    each("a model's counter", || black_box(&model).add(Counter::Passes, 1));
    each("a session's counter", || black_box(&session).add(Counter::Passes, 1));
    each("a session's histogram", || black_box(&session).record(Histogram::InterToken, 10_000));
    each("a span that is off", || drop(black_box(&model).span(Kind::Layer, [1, 2])));
    telemetry.timeline().start(TIMELINE_EVENTS);
    each("a span that is on", || drop(black_box(&model).span(Kind::Layer, [1, 2])));
    std::thread::scope(|scope| {
        scope.spawn(|| (0..ROUNDS * TIMES).for_each(|_| drop(model.span(Kind::Layer, [1, 2]))));
        each("a span beside another thread's", || drop(model.span(Kind::Layer, [1, 2])));
    });
    telemetry.timeline().stop();
    let began = Instant::now();
    each("a whole pass", || model.passed(Kind::Decode, 1, 1, began));
    let began = Instant::now();
    let snapshot = telemetry.snapshot();
    let taken = began.elapsed();
    println!("{:<40} {:>8.1} µs", "a snapshot", taken.as_secs_f64() * 1e6);
    black_box(render(&snapshot));
    println!("{:<40} {:>8.1} µs", "the same, rendered", (began.elapsed() - taken).as_secs_f64() * 1e6);
}

/// A sequence that decodes the same step again and again.
fn begun(mut session: Session) -> Result<Session, Box<dyn Error>> {
    let tokens: Vec<u32> = (0..DEPTH).map(|at| 3 + at * 31 % 150).collect();
    session.feed(&tokens)?;
    Ok(session)
}

fn step(session: &mut Session) -> Result<Duration, Box<dyn Error>> {
    let began = Instant::now();
    black_box(session.feed(&[5])?);
    let took = began.elapsed();
    session.rewind(DEPTH as usize);
    Ok(took)
}

fn main() -> Result<(), Box<dyn Error>> {
    operations();
    let steps = std::env::args().skip(1).find_map(|arg| arg.parse().ok()).unwrap_or(400);
    let path = std::env::var_os("FIREBOX_BENCH_MODEL").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/reference/qwen3")),
        PathBuf::from,
    );
    let cpu = device("cpu")?;
    let silent = Decoder::load(&Checkpoint::open(&path)?, &cpu)?;
    let reporting = Model::open(&path, &cpu)?;
    let drawn = Model::open(&path, &cpu)?;
    drawn.telemetry().timeline().start(TIMELINE_EVENTS);
    let sessions = [Session::new(Arc::new(silent)), reporting.session()?, drawn.session()?];
    let [silent, reporting, drawn] = sessions.map(begun);
    let mut sessions = [silent?, reporting?, drawn?];
    let mut times: [Vec<f64>; 3] = Default::default();
    for round in 0..steps {
        // Each goes first as often as the others.
        for at in (0..3).map(|at| (at + round) % 3) {
            times[at].push(step(&mut sessions[at])?.as_secs_f64());
        }
    }
    times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
    for (name, share) in [("median", 2), ("tenth", 10)] {
        let [silent, counted, drawn] = times.each_ref().map(|times| times[times.len() / share]);
        println!(
            "decode step, {name}: {:.3} ms; counted {:.4}, drawn {:.4} of it",
            silent * 1e3,
            counted / silent,
            drawn / silent
        );
    }
    Ok(())
}
