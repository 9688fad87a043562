//! `firebox embed`

use std::io::{self, BufRead as _};
use std::num::NonZero;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use firebox_runtime::{EmbedOptions, Pooling};
use serde_json::json;

use crate::compute::DeviceArgs;
use crate::console::Console;
use crate::opening::open;
use crate::outcome::{Outcome, usage};

/// Options of `firebox embed`.
#[derive(Debug, Args)]
pub struct EmbedArgs {
    /// The model: a sentence encoder, or any decoder
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// What to embed; without any, every line of stdin is a text
    #[arg(value_name = "TEXT")]
    texts: Vec<String>,
    /// Put the texts in the order in which they answer this, the best first, instead
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["pooling", "no_normalize"])]
    query: Option<String>,
    /// How the tokens of a text become one vector; otherwise what the model's makers say, or their mean
    #[arg(long, value_name = "WAY", value_enum)]
    pooling: Option<Way>,
    /// Leave the vectors as long as they are
    #[arg(long)]
    no_normalize: bool,
    /// Keep the first numbers of every vector, as models may be trained for; all otherwise
    #[arg(long, value_name = "N", conflicts_with = "query")]
    dimensions: Option<NonZero<usize>>,
    #[command(flatten)]
    device: DeviceArgs,
}

/// How tokens become one vector.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Way {
    /// Their mean
    Mean,
    /// The first token's
    First,
    /// The last token's
    Last,
}

/// Prints a JSON object for every text.
pub fn embed(args: &EmbedArgs, console: &Console) -> anyhow::Result<Outcome> {
    let model = open(&args.model, &args.device, console)?;
    let texts = match args.texts.is_empty() {
        false => args.texts.clone(),
        true => io::stdin().lock().lines().collect::<Result<_, _>>().context("cannot read stdin")?,
    };
    if texts.is_empty() {
        return Err(usage("no text; give some, or pipe in one a line"));
    }
    if let Some(query) = &args.query {
        for ranked in model.rerank(query, &texts)? {
            let text = &texts[ranked.document];
            console.json(&json!({ "index": ranked.document, "score": ranked.score, "text": text }))?;
        }
        return Ok(Outcome::Done);
    }
    let pooling = args.pooling.map(|way| match way {
        Way::Mean => Pooling::Mean,
        Way::First => Pooling::First,
        Way::Last => Pooling::Last,
    });
    let width = model.embedding_width();
    if let Some(dimensions) = args.dimensions.filter(|dimensions| dimensions.get() > width) {
        return Err(usage(format!("--dimensions {dimensions}: this model's vectors have {width} numbers")));
    }
    let options = EmbedOptions { normalize: !args.no_normalize, pooling, dimensions: args.dimensions };
    for (index, embedding) in model.embed(&texts, &options)?.into_iter().enumerate() {
        console.json(&json!({ "index": index, "embedding": embedding }))?;
    }
    Ok(Outcome::Done)
}
