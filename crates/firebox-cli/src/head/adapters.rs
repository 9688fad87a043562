//! Adapters and heads that are made from other files: reading, rebinding, cutting and exporting them.

use std::path::{Path, PathBuf};

use clap::Args;
use firebox_store::{Checkpoint, HeadFiles, Heads, SegmentId};
use firebox_train::{Adapter, adapter_of, cut_head, export_adapter, is_adapter, rebind_head};

use crate::console::{Console, human_bytes};
use crate::hub;
use crate::outcome::{Outcome, usage};

/// Options of `firebox head export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// The model
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// The head's name
    #[arg(value_name = "NAME")]
    name: String,
    /// The directory to write, which does not exist yet
    #[arg(value_name = "DST")]
    destination: PathBuf,
}

/// Options of `firebox head cut`.
#[derive(Debug, Args)]
pub struct CutArgs {
    /// The model, a bundle or a Hugging Face directory
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// The directory to write, which does not exist yet
    #[arg(value_name = "DST")]
    destination: PathBuf,
    /// How many of the last layers belong to the head
    #[arg(long, value_name = "N")]
    layers: usize,
}

/// Writes a head to `made` where `given` is an adapter or has to be bound to other numbers; returns the folder to install.
pub fn converted<'a>(
    heads: &Heads,
    given: &'a Path,
    rebind: bool,
    made: &'a Path,
) -> anyhow::Result<&'a Path> {
    if is_adapter(given) {
        export_adapter(&Adapter::read(given)?, heads.model(), made)?;
        Ok(made)
    } else if rebind {
        rebind_head(&HeadFiles::open(given)?, heads.model(), made)?;
        Ok(made)
    } else {
        Ok(given)
    }
}

/// Writes an installed adapter as the `peft` package reads it.
pub fn export(args: &ExportArgs, console: &Console) -> anyhow::Result<Outcome> {
    let model = hub::resolve(&args.model)?;
    let head = Heads::open(&model)?.head(&args.name)?;
    let Some(adapter) = adapter_of(&head, &model.display().to_string())? else {
        return Err(usage(format!(
            "{} is no adapter, and the peft package knows no other heads; train one by `firebox head train --lora RANK`",
            args.name
        )));
    };
    if args.destination.exists() {
        return Err(usage(format!(
            "{} is there already; name a folder that is not, or remove it",
            args.destination.display()
        )));
    }
    adapter.write(&args.destination)?;
    let modules = adapter.pairs.len();
    console.line(format!("{}: rank {}, {modules} modules", args.destination.display(), adapter.rank))?;
    Ok(Outcome::Done)
}

/// Writes a model's last layers as a head.
pub fn cut(args: &CutArgs, console: &Console) -> anyhow::Result<Outcome> {
    let checkpoint = Checkpoint::open(hub::resolve(&args.model)?)?;
    let segments = checkpoint.segments();
    let layers = segments.iter().filter(|segment| matches!(segment.id, SegmentId::Layer(_))).count();
    let Some(files) = cut_head(&checkpoint, args.layers, &args.destination)? else {
        return Err(usage(format!("--layers: should be from 1 to {}", layers.saturating_sub(1))));
    };
    console.line(format!(
        "{}: layers {} to {} of {layers}, {}",
        args.destination.display(),
        files.split(),
        layers - 1,
        human_bytes(files.bytes())
    ))?;
    Ok(Outcome::Done)
}
