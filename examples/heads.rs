//! One trunk and several heads: the same conversation, answered by each from one token to the next.
//!
//! `cargo run --release --example heads`

#![allow(clippy::print_stdout, reason = "an example prints its output")]

use firebox::heads::HeadPoolConfig;
use firebox::{Generation, GenerationConfig, Model, OWN_HEAD, device};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::open("assets/pocket", &device("cpu")?)?.with_heads(HeadPoolConfig::patient())?;
    let tokenizer = model.tokenizer()?.clone();
    let pool = model.heads().ok_or("the pocket model has heads")?;
    println!("heads: {}", pool.names().join(", "));

    let mut session = model.session()?;
    session.feed(
        &tokenizer.encode("<|user|>My dog is called Biscuit.<|end|><|assistant|>Noted.<|end|>", false)?,
    )?;
    let said = session.tokens().len();
    for head in ["chat", "code", "summarize", OWN_HEAD, "chat"] {
        // What the trunk remembers stays; the head reads it again, when it is next fed.
        let switched = session.use_head(head);
        if let Some(reason) = switched.fallback_reason {
            println!("{head}: {reason}");
        }
        let question = tokenizer.encode("<|user|>What is my dog called?<|end|><|assistant|>", false)?;
        let config = GenerationConfig::new().with_max_tokens(24);
        let generation = Generation::begin(&mut session, Some(tokenizer.clone()), &question, config)?;
        let answer = generation.complete()?;
        println!("{head:>10}, changed in {:.2} ms: {}", switched.took.as_secs_f64() * 1e3, answer.text);
        session.rewind(said);
    }
    Ok(())
}
