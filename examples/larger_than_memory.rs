//! Runs a model whose weights stay on disk: they are read layer by layer while it runs.
//!
//! `cargo run --release --example larger_than_memory -- MODEL [KEPT LAYERS]`

use firebox::model::StreamedConfig;
use firebox::store::Checkpoint;
use firebox::{Generation, GenerationConfig, Model, device, peak_resident_bytes};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().unwrap_or_else(|| "tests/fixtures/reference/qwen3".into());
    let kept: usize = arguments.next().map_or(Ok(0), |count| count.parse())?;

    let model = Model::streamed(Checkpoint::open(path)?, &device("cpu")?, &StreamedConfig::default())?;
    let decoder = model.decoder()?;
    let weights = decoder.streamed().ok_or("its weights are streamed")?;
    for layer in 0..kept.min(weights.layers()) {
        weights.keep(layer)?;
    }
    let mut session = model.session()?;
    let config = GenerationConfig { max_tokens: Some(16), ..GenerationConfig::default() };
    let mut generation = Generation::begin(&mut session, None, &[3, 1, 4, 1, 5, 9, 2, 6], config)?;
    while generation.next_piece()?.is_some() {}
    let summary = generation.finish()?;
    let read = weights.report();
    println!(
        "{} tokens, {:.1} a second; read {} MB, waited {:.1} s for them; peak memory {} MB",
        summary.tokens.len(),
        summary.decode_tps,
        read.bytes / 1_000_000,
        read.waiting.as_secs_f64(),
        peak_resident_bytes().unwrap_or(0) / 1_000_000
    );
    Ok(())
}
