//! The command line.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use crate::bench::BenchArgs;
use crate::chat::ChatArgs;
use crate::completions::CompletionsArgs;
use crate::console::OutputArgs;
use crate::devices::DevicesArgs;
use crate::doctor::DoctorArgs;
use crate::embed::EmbedArgs;
use crate::export::ExportArgs;
use crate::head::HeadCommand;
use crate::import::ImportArgs;
use crate::inspect::InspectArgs;
use crate::man::ManArgs;
use crate::perplexity::PerplexityArgs;
use crate::plan::PlanArgs;
#[cfg(feature = "hub")]
use crate::pull::PullArgs;
use crate::run::RunArgs;
use crate::serve::ServeArgs;
use crate::sessions::SessionCommand;
use crate::simulate::SimulateArgs;
use crate::tokenize::TokenizeArgs;
#[cfg(feature = "top")]
use crate::top::TopArgs;
#[cfg(feature = "train")]
use crate::train::TrainArgs;
use crate::verify::VerifyArgs;

#[cfg(not(all(feature = "hub", feature = "top", feature = "train", feature = "plot")))]
const LEFT_OUT: &str = "
This build leaves out commands (pull, top, train, head train and others);
`cargo install --path crates/firebox-cli --features full` has them.

";
#[cfg(all(feature = "hub", feature = "top", feature = "train", feature = "plot"))]
const LEFT_OUT: &str = "";

const AFTER_HELP: &str = "\
MODEL is a Hugging Face directory, a GGUF file, a bundle that `firebox import` wrote,
ORG/NAME for what `firebox pull` has fetched, or the name of a model in firebox.toml.

Results go to stdout, remarks and errors to stderr.

What the help shows with an environment variable may stand in firebox.toml as well: a flag
outranks the variable, and that outranks the file.

Exit codes:
  0    done
  1    a check failed: `verify` past the tolerance, or a hash that does not match
  2    the command line or a setting makes no sense
  3    a model or a file could not be opened, read or used
  4    out of context: the text is longer than the model, or --ctx-size, allows
  130  interrupted by Ctrl-C";

/// Runs transformer language models on the machines people carry
#[derive(Debug, Parser)]
#[command(name = "firebox", version, after_help = format!("{LEFT_OUT}{AFTER_HELP}"), propagate_version = true)]
pub struct Cli {
    #[command(flatten)]
    pub output: OutputArgs,
    /// The file with the defaults of options [default: ./firebox.toml, else firebox/firebox.toml among the user's settings]
    #[arg(long, global = true, value_name = "FILE", env = "FIREBOX_CONFIG")]
    pub config: Option<PathBuf>,
    #[command(subcommand)]
    pub command: Command,
}

/// What there is to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answer one prompt
    Run(RunArgs),
    /// Talk with a model
    Chat(ChatArgs),
    /// Answer over HTTP, as OpenAI's API does
    Serve(ServeArgs),
    /// Fetch a model from the Hugging Face hub
    #[cfg(feature = "hub")]
    Pull(PullArgs),
    /// Write a model as a bundle, quantizing it if asked to
    Import(ImportArgs),
    /// Write a model for other engines: as a directory of safetensors, or as a GGUF file
    Export(ExportArgs),
    /// Show what is in a model
    Inspect(InspectArgs),
    /// Check that a model is intact, or that it computes what it should
    Verify(VerifyArgs),
    /// Measure how well a model predicts a text, and how far it is from another
    Perplexity(PerplexityArgs),
    /// Say how many layers to keep in so much memory, and how fast that will be
    Plan(PlanArgs),
    /// Install, change and make heads: last layers for a task, over a trunk that stays
    Head {
        #[command(subcommand)]
        command: HeadCommand,
    },
    /// Turn texts into vectors, or put them in the order in which they answer a query
    Embed(EmbedArgs),
    /// Run the scheduler through a day on a phone, a tablet or another device that is not there
    Simulate(SimulateArgs),
    /// Make a model with its heads by a recipe, on text that is generated on the way
    #[cfg(feature = "train")]
    Train(TrainArgs),
    /// Turn text into token ids and back
    Tokenize(TokenizeArgs),
    /// Measure how fast a model runs
    Bench(BenchArgs),
    /// List the devices of this build
    Devices(DevicesArgs),
    /// Say what this machine can run, and what stands in its way
    Doctor(DoctorArgs),
    /// Watch a server at work
    #[cfg(feature = "top")]
    Top(TopArgs),
    /// List, show, copy and shorten the conversations that `chat --session` keeps
    Session {
        #[command(subcommand)]
        command: SessionCommand,
    },
    /// Write what a shell needs to complete commands and options
    Completions(CompletionsArgs),
    /// Write the manual pages
    Man(ManArgs),
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }
}
