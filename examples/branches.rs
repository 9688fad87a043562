//! Branches: a conversation goes on in several ways at once, and one of them is kept.
//!
//! `cargo run --release --example branches`

#![allow(clippy::print_stdout, reason = "an example prints its output")]

use std::time::Instant;

use firebox::{Branches, Generation, GenerationConfig, Model, device};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::open("assets/pocket", &device("cpu")?)?;
    let tokenizer = model.tokenizer()?.clone();
    let mut session = model.session()?;
    session.feed(
        &tokenizer.encode("<|user|>My dog is called Biscuit.<|end|><|assistant|>Noted.<|end|>", false)?,
    )?;

    let mut tree = Branches::new(session);
    let mut branches = Vec::new();
    for question in ["What is my dog called?", "Write a loop from 3 to 12.", "Who are you?"] {
        let began = Instant::now();
        let branch = tree.fork(tree.root())?;
        let forked = began.elapsed();
        let prompt = tokenizer.encode(&format!("<|user|>{question}<|end|><|assistant|>"), false)?;
        let config = GenerationConfig::new().with_max_tokens(24);
        let generation = Generation::begin(tree.session(branch)?, Some(tokenizer.clone()), &prompt, config)?;
        println!("{question} {} (forked in {} ns)", generation.complete()?.text, forked.as_nanos());
        branches.push(branch);
    }
    for branch in tree.iter() {
        println!("{branch:?}");
    }
    // The others' pages go back to the pool; the one that is kept takes the place of what it came from.
    let kept = tree.promote(branches[0])?;
    tree.drop_branch(branches[1])?;
    tree.drop_branch(branches[2])?;
    println!("{} tokens are kept", tree.session(kept)?.tokens().len());
    Ok(())
}
