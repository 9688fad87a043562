//! `firebox head`

mod installed;
mod profile;
mod swap;
mod train;

use clap::Subcommand;

use crate::console::Console;
use crate::outcome::Outcome;

/// What can be done with heads.
#[derive(Debug, Subcommand)]
pub enum HeadCommand {
    /// Install a head under a name, or a newer one in its place
    Add(installed::AddArgs),
    /// List the installed heads
    List(installed::ListArgs),
    /// Remove a head
    Remove(installed::NamedArgs),
    /// Go back to the head that was in use before the last update; a second time undoes the first
    Rollback(installed::NamedArgs),
    /// Write a model's own last layers as a head
    Cut(installed::CutArgs),
    /// Write an installed adapter for the peft package
    Export(installed::ExportArgs),
    /// Say what each layer is for, on a file of examples, and where a head could begin
    Profile(profile::ProfileArgs),
    /// Train a head on a file of examples, with the trunk as it is
    Train(Box<train::TrainArgs>),
    /// Measure how long a change of heads takes: in memory, from disk, and against opening the model
    Swap(swap::SwapArgs),
}

/// Does one of them.
pub fn head(command: &HeadCommand, console: &Console) -> anyhow::Result<Outcome> {
    match command {
        HeadCommand::Add(args) => installed::add(args, console),
        HeadCommand::List(args) => installed::list(args, console),
        HeadCommand::Remove(args) => installed::remove(args, console),
        HeadCommand::Rollback(args) => installed::rollback(args, console),
        HeadCommand::Cut(args) => installed::cut(args, console),
        HeadCommand::Export(args) => installed::export(args, console),
        HeadCommand::Profile(args) => profile::profile(args, console),
        HeadCommand::Train(args) => train::train(args, console),
        HeadCommand::Swap(args) => swap::swap(args, console),
    }
}
