//! `firebox perplexity`

use std::path::{Path, PathBuf};

use clap::Args;
use firebox_eval::Perplexity;
use firebox_runtime::Model;
use serde::Serialize;

use crate::compute::{CacheType, DeviceArgs};
use crate::console::Console;
use crate::hub;
use crate::opening::open;
use crate::outcome::Outcome;
use crate::tokens::read_tokens;

/// The context length that llama.cpp uses, so that results can be compared.
const CONTEXT: usize = 512;

/// Options of `firebox perplexity`.
#[derive(Debug, Args)]
pub struct PerplexityArgs {
    /// The model
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// A text file, or - for stdin; of a safetensors file, its `input_ids`
    #[arg(value_name = "TEXT")]
    text: PathBuf,
    /// Another model, to say how far this one is from it
    #[arg(long, value_name = "MODEL")]
    against: Option<PathBuf>,
    /// Tokens the model sees at a time [default: 512, or what the model was trained for]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    ctx_size: Option<u32>,
    /// What keys and values are kept in; those of --against are exact
    #[arg(long, value_name = "TYPE", value_enum, default_value_t = CacheType::F32)]
    cache_type: CacheType,
    /// The file holds token ids, as a JSON list or one after the other
    #[arg(long)]
    ids: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    model: &'a Path,
    against: Option<&'a Path>,
    device: &'a str,
    context: usize,
    #[serde(flatten)]
    found: Perplexity,
}

/// Measures a model on a text.
pub fn perplexity(args: &PerplexityArgs, console: &Console) -> anyhow::Result<Outcome> {
    let model = open(&args.model, &args.device, console)?;
    let other = match &args.against {
        Some(other) => {
            Some(Model::open(hub::resolve(other)?, &firebox_runtime::device(&args.device.device)?)?)
        }
        None => None,
    };
    let tokens = read_tokens(&args.text, args.ids, &model)?;
    let trained = model.decoder()?.config().max_positions;
    let context = args.ctx_size.map_or(CONTEXT.min(trained), |tokens| tokens as usize);
    console.detail(format!("{} tokens in windows of {context}", tokens.len()));
    let waiting = console.waiting(format!("reading {} tokens", tokens.len()));
    let found = firebox_eval::perplexity(&model, &tokens, context, args.cache_type.into(), other.as_ref());
    waiting.finish_and_clear();
    let found = found?;
    if args.json {
        console.json(&Report {
            model: &args.model,
            against: args.against.as_deref(),
            device: &args.device.device,
            context,
            found,
        })?;
        return Ok(Outcome::Done);
    }
    console.line(format!("perplexity  {:.4} over {} tokens", found.perplexity, found.tokens))?;
    if let (Some(divergence), Some(other)) = (&found.divergence, &args.against) {
        console.line(format!(
            "of {}  {:.4}\nmean KL     {:.6e} nats\nmax KL      {:.6e} nats\nsame top    {:.2} %",
            other.display(),
            divergence.other_perplexity,
            divergence.mean_kl,
            divergence.max_kl,
            100.0 * divergence.same_top,
        ))?;
    }
    Ok(Outcome::Done)
}
