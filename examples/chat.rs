//! A conversation: what was said before is remembered, and only what is new goes through the layers.
//!
//! `cargo run --release --example chat [MODEL]`

#![allow(clippy::print_stdout, reason = "an example prints its output")]

use firebox::{GenerationConfig, Model, device};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).unwrap_or("assets/pocket".into());
    let model = Model::open(path, &device("cpu")?)?;
    let mut chat = model.chat()?.with_config(GenerationConfig::new().with_max_tokens(32));
    for question in ["My dog is called Biscuit.", "I live in Oslo.", "What is my dog called?"] {
        let known = chat.session().tokens().len();
        print!("{question}\n  ");
        for piece in chat.ask(question)? {
            print!("{}", piece?.text);
        }
        println!(" ({} of {} tokens were known)", known, chat.session().tokens().len());
    }
    Ok(())
}
