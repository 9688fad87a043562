//! `firebox tokenize`

use std::io::{self, BufRead as _};
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use clap::Args;
use firebox_store::Checkpoint;
use firebox_text::Tokenizer;
use serde::de::DeserializeOwned;

use crate::columns::table;
use crate::console::Console;
use crate::hub;
use crate::outcome::Outcome;

/// Options of `firebox tokenize`.
#[derive(Debug, Args)]
pub struct TokenizeArgs {
    /// The model
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// A text to show the tokens of; without one, stdin has one JSON string a line and gets one JSON id list a line
    #[arg(value_name = "TEXT", conflicts_with = "decode")]
    text: Option<String>,
    /// Print ids as a JSON list, for a given TEXT too
    #[arg(long, conflicts_with = "decode")]
    ids: bool,
    /// The other way round: one JSON id list a line in, one JSON string a line out
    #[arg(long)]
    decode: bool,
    /// Leave out the special tokens that the model wants around a text; with --decode, all special tokens
    #[arg(long)]
    no_special: bool,
    /// Take the spellings of special tokens for plain text
    #[arg(long, conflicts_with = "decode")]
    literal: bool,
}

impl TokenizeArgs {
    fn encode(&self, tokenizer: &Tokenizer, text: &str) -> anyhow::Result<Vec<u32>> {
        Ok(if self.literal {
            tokenizer.encode_literal(text, !self.no_special)?
        } else {
            tokenizer.encode(text, !self.no_special)?
        })
    }
}

/// Turns text into ids, or ids into text.
pub fn tokenize(args: &TokenizeArgs, console: &Console) -> anyhow::Result<Outcome> {
    let checkpoint = Checkpoint::open_text(hub::resolve(&args.model)?)?;
    let tokenizer = Tokenizer::new(checkpoint.text(), checkpoint.config())?;
    match &args.text {
        Some(text) => {
            let ids = args.encode(&tokenizer, text)?;
            if args.ids { console.json(&ids)? } else { console.line(pieces(&tokenizer, &ids))? }
        }
        None if args.decode => {
            each_line("list of ids", "[1, 2, 3]", |ids: Vec<u32>| {
                console.json(&tokenizer.decode(&ids, args.no_special))
            })?;
        }
        None => each_line("string", "\"some text\"", |text: String| {
            console.json(&args.encode(&tokenizer, &text)?)
        })?,
    }
    Ok(Outcome::Done)
}

/// Hands the JSON value of every line of stdin on, as soon as it is there.
fn each_line<T: DeserializeOwned>(
    wanted: &str,
    like: &str,
    mut take: impl FnMut(T) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    for (index, line) in io::stdin().lock().lines().enumerate() {
        let number = index + 1;
        let line = line.with_context(|| format!("stdin, line {number}"))?;
        match serde_json::from_str(&line) {
            Ok(value) => take(value)?,
            Err(error) => bail!("stdin, line {number}: expected a JSON {wanted}, such as {like}: {error}"),
        }
    }
    Ok(())
}

fn pieces(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let row = |&id: &u32| {
        let text = if tokenizer.is_special(id) {
            "special".to_owned()
        } else {
            let bytes = tokenizer.token_bytes(id).unwrap_or_default();
            format!("{:?}", String::from_utf8_lossy(bytes))
        };
        [id.to_string(), tokenizer.id_to_token(id).unwrap_or("?").to_owned(), text]
    };
    table(Some(["id", "token", "text"]), &[0], ids.iter().map(row))
}
