//! Runs a model in so much memory: what does not fit is read from disk, layer by layer, while it runs.
//!
//! `cargo run --release --example larger_than_memory -- MODEL 600M`

#![allow(clippy::print_stdout, reason = "an example prints its output")]

use std::error::Error;

use firebox::residency::ResidencyOptions;
use firebox::{Generation, GenerationConfig, Model, device, human_bytes, parse_bytes, peak_resident_bytes};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().unwrap_or_else(|| "tests/fixtures/reference/qwen3".into());
    let memory = parse_bytes(&arguments.next().unwrap_or_else(|| "200M".into()))?;

    let model = Model::open_within(path, &device("cpu")?, &ResidencyOptions::new(memory))?;
    let mut session = model.session()?;
    let config = GenerationConfig::new().with_max_tokens(16);
    let generation = Generation::begin(&mut session, None, &[3, 1, 4, 1, 5, 9, 2, 6], config)?;
    let summary = generation.complete()?;

    let (residency, decoder) = (model.residency().ok_or("it was fitted")?, model.decoder()?);
    let read = decoder.streamed().ok_or("its weights are streamed")?.report();
    println!("keeps {} layers; {}", residency.plan().kept_layers.len(), residency.plan().explanation);
    println!(
        "{:.1} tokens a second, {:.1} expected",
        summary.decode_tps,
        residency.plan().prediction.tokens_per_second
    );
    println!("{} read, {:.1} s waited for", human_bytes(read.bytes), read.waiting.as_secs_f64());
    println!("at most {} of memory", human_bytes(peak_resident_bytes().unwrap_or(0)));
    Ok(())
}
