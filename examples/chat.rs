//! A conversation: what was said before is remembered, and only what is new goes through the layers.
//!
//! `cargo run --release --example chat [MODEL]`

#![allow(clippy::print_stdout, reason = "an example talks to whoever runs it")]

use firebox::text::{ChatTemplate, Message, TemplateOptions};
use firebox::{Generation, GenerationConfig, Model, device};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).unwrap_or("assets/pocket".into());
    let model = Model::open(path, &device("cpu")?)?;
    let tokenizer = model.tokenizer()?.clone();
    let template = ChatTemplate::new(model.checkpoint().text(), &tokenizer)?;
    let mut session = model.session()?;
    let mut messages = Vec::new();
    for said in ["My dog is called Biscuit.", "I live in Oslo.", "What is my dog called?"] {
        messages.push(Message::user(said));
        let prompt = template.encode(&tokenizer, &messages, &TemplateOptions::default())?;
        let known =
            session.tokens().iter().zip(&prompt).take_while(|(known, wanted)| known == wanted).count();
        session.rewind(known);
        let config = GenerationConfig {
            max_tokens: Some(32),
            end_tokens: model.end_tokens(),
            ..GenerationConfig::default()
        };
        let mut generation =
            Generation::begin(&mut session, Some(tokenizer.clone()), &prompt[known..], config)?;
        while generation.next_piece()?.is_some() {}
        let summary = generation.finish()?;
        println!("{said}\n  {} ({} of {} tokens were known)", summary.text, known, prompt.len());
        messages.push(Message::assistant(summary.text));
    }
    Ok(())
}
