//! An answer that fits a form: whatever the model would rather say, it is JSON by this schema.
//!
//! `cargo run --release --example structured`

#![allow(clippy::print_stdout, reason = "an example prints its output")]

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
    let config = GenerationConfig::new()
        .with_max_tokens(64)
        .with_end_tokens(model.end_tokens())
        .with_grammar(Grammar::JsonSchema(schema));
    let mut session = model.session()?;
    let generation = Generation::begin(&mut session, Some(tokenizer), &prompt, config)?;
    let answer: Value = serde_json::from_str(&generation.complete()?.text)?;
    println!("{answer}");
    println!("the dog is called {}", answer["dog"]);
    Ok(())
}
