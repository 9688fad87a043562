//! What a model does, in numbers, and on a timeline for chrome://tracing or ui.perfetto.dev.
//!
//! `cargo run --release --example telemetry [TRACE]`

#![allow(clippy::print_stdout, reason = "an example prints its output")]

use firebox::telemetry::{Counter, Histogram, TIMELINE_EVENTS, Telemetry, render};
use firebox::{Generation, GenerationConfig, Model, device};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let telemetry = Telemetry::default();
    let model = Model::open("assets/pocket", &device("cpu")?)?.with_telemetry(&telemetry, "pocket");
    let tokenizer = model.tokenizer()?.clone();
    telemetry.timeline().start(TIMELINE_EVENTS);
    for question in ["Who are you?", "Write a loop from 3 to 12."] {
        let prompt = tokenizer.encode(&format!("<|user|>{question}<|end|><|assistant|>"), false)?;
        let config = GenerationConfig::new().with_max_tokens(24);
        let mut session = model.session()?;
        let generation = Generation::begin(&mut session, Some(tokenizer.clone()), &prompt, config)?;
        generation.complete()?;
    }
    telemetry.timeline().stop();

    let snapshot = telemetry.snapshot();
    for model in &snapshot.models {
        let count = |counter| model.count(counter);
        println!(
            "{}: {} tokens in {} passes",
            model.name,
            count(Counter::GeneratedTokens),
            count(Counter::Passes)
        );
        if let Some(first) = model.meters.histograms.get(&Histogram::TimeToFirstToken) {
            println!(
                "first token: {:.1} ms at most for half of them",
                first.quantile(0.5).unwrap_or(0.0) / 1e3
            );
        }
    }
    println!("{} lines for Prometheus", render(&snapshot).lines().count());
    let (events, _) = telemetry.timeline().counts();
    println!("{events} events on the timeline");
    if let Some(path) = std::env::args().nth(1) {
        telemetry.timeline().save(path.as_ref())?;
    }
    Ok(())
}
