//! A fact stays when all turns around it are forgotten, and a newer one takes its place.
//!
//! `cargo run --release --example facts`

#![allow(clippy::print_stdout, reason = "an example prints its output")]

use firebox::heads::HeadPoolConfig;
use firebox::{
    AfterEviction, Generation, GenerationConfig, Model, Role, RuntimeError, Session, TurnKind, WholeTurns,
    device,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::open("assets/pocket", &device("cpu")?)?.with_heads(HeadPoolConfig::patient())?;
    let tokens = |text: &str| model.tokenizer()?.encode(text, false).map_err(RuntimeError::from);
    // Turns have 128 tokens; who needs more forgets the oldest as a whole, and the rest closes up.
    let policy = WholeTurns { after: AfterEviction::CompactPositions };
    let mut session = model.session()?.with_turn_capacity(128, policy);
    session.use_head("chat");

    let dog = session.add_fact(&tokens("<|system|>The user's dog is called Biscuit.<|end|>")?)?;
    session.add_fact(&tokens("<|system|>The user lives in Oslo.<|end|>")?)?;
    let mut said = 0;
    for turn in 0..40 {
        session.begin_turn(&[Role::User, Role::Assistant])?;
        session
            .feed(&tokens(&format!("<|user|>I am {turn} years old.<|end|><|assistant|>Noted.<|end|>"))?)?;
        said += 1;
    }
    let held = session.turns().filter(|turn| turn.kind == TurnKind::Turn).count();
    println!("{} of {said} turns are forgotten", said - held);
    println!("where the user lives: {}", asked(&model, &session, "Where do I live?")?);
    println!("the dog: {}", asked(&model, &session, "What is my dog called?")?);

    session.supersede(dog, &tokens("<|system|>The user's dog is called Pepper.<|end|>")?)?;
    println!("and now: {}", asked(&model, &session, "What is my dog called?")?);
    Ok(())
}

/// Asks on a branch, so that the session itself stays unchanged.
fn asked(model: &Model, session: &Session, question: &str) -> Result<String, Box<dyn std::error::Error>> {
    let tokenizer = model.tokenizer()?.clone();
    let mut branch = session.clone();
    branch.begin_turn(&[Role::User, Role::Assistant])?;
    let prompt = tokenizer.encode(&format!("<|user|>{question}<|end|><|assistant|>"), false)?;
    let config = GenerationConfig::new().with_max_tokens(24);
    let generation = Generation::begin(&mut branch, Some(tokenizer), &prompt, config)?;
    Ok(generation.complete()?.text)
}
