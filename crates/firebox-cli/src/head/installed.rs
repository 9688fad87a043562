//! Installing, listing, removing and rolling back heads.

use std::path::PathBuf;

use clap::Args;
use firebox_store::{HeadInfo, Heads};
use serde_json::json;

use crate::columns::table;
use crate::console::{Console, human_bytes};
use crate::hub;
use crate::outcome::{Outcome, usage};

/// Options of `firebox head add`.
#[derive(Debug, Args)]
pub struct AddArgs {
    /// The model, a bundle or a Hugging Face directory
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// The head, a directory with a head.json, or an adapter's, with an adapter_config.json
    #[arg(value_name = "HEAD")]
    head: PathBuf,
    /// What it is to be called [default: what its directory is called]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Take a head that was made for the same model in another number format, and quantize it as the model is
    #[cfg(feature = "train")]
    #[arg(long)]
    rebind: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Options of `firebox head list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// The model
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// A head that is installed.
#[derive(Debug, Args)]
pub struct NamedArgs {
    /// The model
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// The head's name
    #[arg(value_name = "NAME")]
    name: String,
}

/// Installs a head.
pub fn add(args: &AddArgs, console: &Console) -> anyhow::Result<Outcome> {
    let heads = Heads::open(hub::resolve(&args.model)?)?;
    let named = args.head.file_name().and_then(|name| name.to_str());
    let Some(name) = args.name.as_deref().or(named) else {
        return Err(usage(
            "--name: say what the head is to be called; its folder has no name that a head can have",
        ));
    };
    #[cfg(feature = "train")]
    let scratch = tempfile::tempdir()?;
    #[cfg(feature = "train")]
    let made = scratch.path().join("head");
    #[cfg(feature = "train")]
    let head = super::adapters::converted(&heads, &args.head, args.rebind, &made)?;
    #[cfg(not(feature = "train"))]
    let head = &args.head;
    let info = heads.install(head, name)?;
    if args.json {
        console.json(&described(&heads, &info)?)?;
    } else {
        console.line(format!(
            "{name}: generation {}, from layer {} on, {}",
            info.generation,
            info.split,
            human_bytes(heads.head(name)?.bytes())
        ))?;
    }
    Ok(Outcome::Done)
}

/// Lists heads.
pub fn list(args: &ListArgs, console: &Console) -> anyhow::Result<Outcome> {
    let heads = Heads::open(hub::resolve(&args.model)?)?;
    let list = heads.list()?;
    if args.json {
        let all = list.iter().map(|info| described(&heads, info)).collect::<anyhow::Result<Vec<_>>>()?;
        console.json(&json!({ "heads": all }))?;
        return Ok(Outcome::Done);
    }
    if list.is_empty() {
        console.note("no head is installed; `firebox head add` installs one");
        return Ok(Outcome::Done);
    }
    let mut rows = Vec::new();
    for info in &list {
        let files = heads.head(&info.name)?;
        let kind = files.spec().get("kind").and_then(|kind| kind.as_str()).unwrap_or("unknown").to_owned();
        rows.push([
            info.name.clone(),
            kind,
            info.generation.to_string(),
            info.split.to_string(),
            human_bytes(files.bytes()),
            files.quantization().map_or_else(|| "floats".into(), |scheme| scheme.to_string()),
        ]);
    }
    let header = ["name", "kind", "generation", "from layer", "size", "numbers"];
    console.line(table(Some(header), &[2, 3, 4], rows))?;
    Ok(Outcome::Done)
}

fn described(heads: &Heads, info: &HeadInfo) -> anyhow::Result<serde_json::Value> {
    let files = heads.head(&info.name)?;
    Ok(json!({
        "name": info.name,
        "generation": info.generation,
        "previous": info.previous,
        "hash": info.hash,
        "split": info.split,
        "bytes": files.bytes(),
        "spec": files.spec(),
        "quantization": files.quantization(),
    }))
}

/// Removes a head.
pub fn remove(args: &NamedArgs, console: &Console) -> anyhow::Result<Outcome> {
    Heads::open(hub::resolve(&args.model)?)?.remove(&args.name)?;
    console.line(format!("{}: removed", args.name))?;
    Ok(Outcome::Done)
}

/// Goes back to the generation before.
pub fn rollback(args: &NamedArgs, console: &Console) -> anyhow::Result<Outcome> {
    let info = Heads::open(hub::resolve(&args.model)?)?.rollback(&args.name)?;
    console.line(format!("{}: generation {} again", args.name, info.generation))?;
    Ok(Outcome::Done)
}
