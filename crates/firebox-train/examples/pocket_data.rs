//! Writes conversations the pocket model learns from, or its tokenizer.
//!
//! ```sh
//! cargo run --example pocket_data -- train 1000 > conversations.jsonl
//! cargo run --example pocket_data -- held-out 300 --short --seed 5 --task chat
//! cargo run --example pocket_data -- tokenizer 768 assets/pocket
//! ```

use firebox_train::pocket::{Generator, PocketTokenizer, Shape, Split, Task};
use std::error::Error;
use std::io::Write;
use std::path::Path;

const USAGE: &str = "pocket_data (train|held-out) COUNT [--short|--distant] [--seed N] [--task NAME], or pocket_data tokenizer SIZE FOLDER";

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["tokenizer", size, folder] => {
            let tokenizer = PocketTokenizer::learn(1, size.parse()?, 4000)?;
            std::fs::write(Path::new(folder).join("tokenizer.json"), tokenizer.tokenizer)?;
            std::fs::write(Path::new(folder).join("tokenizer_config.json"), tokenizer.config)?;
        }
        ["train", count, options @ ..] => write(Split::Train, count.parse()?, options)?,
        ["held-out", count, options @ ..] => write(Split::HeldOut, count.parse()?, options)?,
        _ => return Err(USAGE.into()),
    }
    Ok(())
}

fn write(split: Split, count: usize, mut options: &[&str]) -> Result<(), Box<dyn Error>> {
    let (mut shape, mut seed, mut tasks) = (Shape::full(), 1, Task::ALL.to_vec());
    loop {
        options = match options {
            [] => break,
            ["--short", rest @ ..] => {
                shape = Shape::short();
                rest
            }
            ["--distant", rest @ ..] => {
                shape = Shape::distant();
                rest
            }
            ["--seed", number, rest @ ..] => {
                seed = number.parse()?;
                rest
            }
            ["--task", name, rest @ ..] => {
                tasks.retain(|task| task.name() == *name);
                rest
            }
            _ => return Err(USAGE.into()),
        };
    }
    if tasks.is_empty() {
        return Err("the tasks are chat, code and summarize".into());
    }
    let mut generator = Generator::new(seed, split, shape);
    let mut output = std::io::BufWriter::new(std::io::stdout().lock());
    for index in 0..count {
        serde_json::to_writer(&mut output, &generator.conversation(tasks[index % tasks.len()]))?;
        writeln!(output)?;
    }
    Ok(output.flush()?)
}
