//! Many requests at once, each a stream of events; together they go through the layers faster than one by one.
//!
//! `cargo run --release --example several_requests`

#![allow(clippy::print_stdout, reason = "an example prints its output")]

use firebox::engine::{Engine, EngineConfig, Priority, Request};
use firebox::{GenerationConfig, Model, device};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::open("assets/pocket", &device("cpu")?)?;
    let (tokenizer, end_tokens) = (model.tokenizer()?.clone(), model.end_tokens());
    let engine = Engine::start(EngineConfig::default())?;
    engine.add("pocket", model)?;

    let mut answers = Vec::new();
    for (said, priority) in [
        ("My dog is called Biscuit.", Priority::Interactive),
        ("Write a loop from 3 to 12.", Priority::Normal),
        ("Summarize: Anna lives in Oslo. It rained all night.", Priority::Background),
    ] {
        let prompt = tokenizer.encode(&format!("<|user|>{said}<|end|><|assistant|>"), false)?;
        let config = GenerationConfig::new().with_max_tokens(32).with_end_tokens(end_tokens.clone());
        let request = Request::new("pocket", prompt).with_config(config).with_priority(priority);
        // Who drops an answer cancels it.
        answers.push((said, engine.generate(request)));
    }
    for (said, answer) in answers {
        println!("{said}\n  {}", answer.wait()?.summary.text);
    }
    Ok(())
}
