//! `firebox man`

use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, Command};

use crate::console::Console;
use crate::outcome::Outcome;

/// Options of `firebox man`.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// The folder to write them into, such as ~/.local/share/man/man1
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

/// Writes a manual page for the program and each of its commands.
pub fn man(args: &ManArgs, program: Command, console: &Console) -> anyhow::Result<Outcome> {
    fs::create_dir_all(&args.folder)
        .and_then(|()| clap_mangen::generate_to(program, &args.folder))
        .with_context(|| format!("cannot write manual pages to {}", args.folder.display()))?;
    console.note(format!("`man -l {}` shows the first", args.folder.join("firebox.1").display()));
    Ok(Outcome::Done)
}
