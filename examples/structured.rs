//! An answer that fits a form: whatever the model would rather say, it is JSON by this schema.
//!
//! `cargo run --release --example structured`

#![allow(clippy::print_stdout, reason = "an example talks to whoever runs it")]

use firebox::{Generation, GenerationConfig, Grammar, Model, device};
use serde_json::{Value, json};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::open("assets/pocket", &device("cpu")?)?;
    let tokenizer = model.tokenizer()?.clone();
    let schema = json!({
        "type": "object",
        "properties": {
            "dog": { "type": "string", "maxLength": 12 },
            "age": { "type": "integer", "minimum": 0, "maximum": 30 },
            "barks": { "type": "boolean" },
        },
        "required": ["dog", "age", "barks"],
        "additionalProperties": false,
    });
    let prompt = tokenizer.encode("<|user|>My dog is called Biscuit.<|end|><|assistant|>", false)?;
    let config = GenerationConfig {
        max_tokens: Some(64),
        end_tokens: model.end_tokens(),
        grammar: Some(Grammar::JsonSchema(schema)),
        ..GenerationConfig::default()
    };
    let mut session = model.session()?;
    let mut generation = Generation::begin(&mut session, Some(tokenizer), &prompt, config)?;
    while generation.next_piece()?.is_some() {}
    let answer: Value = serde_json::from_str(&generation.finish()?.text)?;
    println!("{answer}");
    println!("the dog is called {}", answer["dog"]);
    Ok(())
}
