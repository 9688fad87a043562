//! `firebox man`

use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, CommandFactory as _};

use crate::args::Cli;
use crate::console::Console;
use crate::outcome::Outcome;

/// Options of `firebox man`.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// The folder to write them into, such as ~/.local/share/man/man1
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

/// Writes a page for every command.
pub fn man(args: &ManArgs, console: &Console) -> anyhow::Result<Outcome> {
    let write = || {
        fs::create_dir_all(&args.folder)?;
        clap_mangen::generate_to(Cli::command(), &args.folder)
    };
    write().with_context(|| format!("cannot write manual pages to {}", args.folder.display()))?;
    console.note(format!("`man -l {}` shows the first", args.folder.join("firebox.1").display()));
    Ok(Outcome::Done)
}
