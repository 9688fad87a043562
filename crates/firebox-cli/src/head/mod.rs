//! `firebox head`

#[cfg(feature = "train")]
mod adapters;
mod installed;
#[cfg(feature = "train")]
mod profile;
mod swap;
#[cfg(feature = "train")]
mod train;

use clap::Subcommand;

use crate::console::Console;
use crate::outcome::Outcome;

/// A subcommand of `firebox head`.
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
    #[cfg(feature = "train")]
    Cut(adapters::CutArgs),
    /// Write an installed adapter for the peft package
    #[cfg(feature = "train")]
    Export(adapters::ExportArgs),
    /// Say what each layer is for, on a file of examples, and where a head could begin
    #[cfg(feature = "train")]
    Profile(profile::ProfileArgs),
    /// Train a head on a file of examples, with the trunk as it is
    #[cfg(feature = "train")]
    Train(Box<train::TrainArgs>),
    /// Measure how long a change of heads takes: in memory, from disk, and against opening the model
    Swap(swap::SwapArgs),
}

/// Runs a subcommand of `firebox head`.
pub fn head(command: &HeadCommand, console: &Console) -> anyhow::Result<Outcome> {
    match command {
        HeadCommand::Add(args) => installed::add(args, console),
        HeadCommand::List(args) => installed::list(args, console),
        HeadCommand::Remove(args) => installed::remove(args, console),
        HeadCommand::Rollback(args) => installed::rollback(args, console),
        #[cfg(feature = "train")]
        HeadCommand::Cut(args) => adapters::cut(args, console),
        #[cfg(feature = "train")]
        HeadCommand::Export(args) => adapters::export(args, console),
        #[cfg(feature = "train")]
        HeadCommand::Profile(args) => profile::profile(args, console),
        #[cfg(feature = "train")]
        HeadCommand::Train(args) => train::train(args, console),
        HeadCommand::Swap(args) => swap::swap(args, console),
    }
}
