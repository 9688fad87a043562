//! A forward pass as a value: two sequences share the weights, and something else happens between two layers.
//!
//! `cargo run --release --example layer_by_layer [MODEL]`

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example prints its output")]

use std::error::Error;

use firebox::internals::model::{Input, LogitRows, Pass};
use firebox::internals::runtime::likeliest;
use firebox::{Model, device};

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).unwrap_or_else(|| "tests/fixtures/reference/qwen3".into());
    let model = Model::open(path, &device("cpu")?)?;
    let decoder = model.decoder()?;

    let prompts: [&[u32]; 2] = [&[5, 6, 7, 8], &[9, 10]];
    let (mut first, mut second) = (decoder.cache(), decoder.cache());
    let inputs = prompts.map(|tokens| Input::new(tokens, 0, tokens.len()));
    let mut pass = Pass::begin(&decoder, &inputs)?;
    while pass.next_layer() < decoder.layers() {
        eprintln!("before layer {}", pass.next_layer());
        pass.step(&decoder, &mut [&mut first, &mut second])?;
    }
    let logits = pass.logits(&decoder, LogitRows::Last)?.try_into_vec_as::<f32>()?;
    for (prompt, logits) in prompts.iter().zip(logits.chunks(decoder.config().vocab_size)) {
        println!("{prompt:?} goes on with {}", likeliest(logits));
    }
    Ok(())
}
