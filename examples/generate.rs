//! Continues a text: `cargo run --release --example generate -- MODEL "Once upon a time"`.

use std::error::Error;
use std::io::Write;

use firebox::{Generation, GenerationConfig, Model, SamplerConfig, device};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().unwrap_or_else(|| "tests/fixtures/gguf/qwen3/model.gguf".into());
    let text = arguments.next().unwrap_or_else(|| "hello".into());

    let model = Model::open(path, &device("cpu")?)?;
    let tokenizer = model.tokenizer()?.clone();
    let prompt = tokenizer.encode(&text, true)?;
    let mut session = model.session()?;
    let config = GenerationConfig::new()
        .with_max_tokens(32)
        .with_continues(true)
        .with_sampler(SamplerConfig::default().with_temperature(0.8).with_top_p(0.95).with_seed(7));
    let mut generation = Generation::begin(&mut session, Some(tokenizer), &prompt, config)?;
    let mut out = std::io::stdout().lock();
    while let Some(piece) = generation.next_piece()? {
        write!(out, "{}", piece.text)?;
        out.flush()?;
    }
    let summary = generation.finish()?;
    writeln!(out, "\n{} tokens, {:.1} per second", summary.tokens.len(), summary.decode_tps)?;
    Ok(())
}
