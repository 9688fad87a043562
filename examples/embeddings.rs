//! Texts as vectors, and texts by how well they answer a query.
//!
//! `cargo run --release --example embeddings [MODEL]`

#![allow(clippy::print_stdout, reason = "an example prints its output")]

use firebox::{EmbedOptions, Model, device};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // A sentence encoder does this best; any decoder does it somehow.
    let path = std::env::args().nth(1).unwrap_or("assets/pocket".into());
    let model = Model::open(path, &device("cpu")?)?;
    let texts = ["My dog is called Biscuit.", "My cat is called Pepper.", "Write a loop from 3 to 12."];
    let vectors = model.embed(&texts, &EmbedOptions::default())?;
    for (text, vector) in texts.iter().zip(&vectors) {
        let likeness: f32 = vector.iter().zip(&vectors[0]).map(|(one, other)| one * other).sum();
        println!("{likeness:.3} like the first, in {} numbers: {text}", vector.len());
    }
    for ranked in model.rerank("What is the name of the dog?", &texts)? {
        println!("{:.3} {}", ranked.score, texts[ranked.document]);
    }
    Ok(())
}
