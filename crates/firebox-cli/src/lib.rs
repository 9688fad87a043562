//! The command `firebox`: runs, chats with, imports, inspects and checks transformer language models.
//!
//! Results go to stdout and everything said about them to stderr, so that stdout can be read by a program; `--json`
//! makes it one JSON object. Errors are one line, `error: …`. The exit codes:
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | a check failed: `verify` past the tolerance, or a hash that does not match |
//! | 2 | the command line or a setting makes no sense |
//! | 3 | a model or a file could not be opened, read or used |
//! | 4 | out of context: the text is longer than the model, or `--ctx-size`, allows |
//! | 130 | interrupted by Ctrl-C |
//!
//! Features add commands that need more dependencies: `hub` (`pull`), `top`, `train` (`train`, `head train`, adapters) and `plot`;
//! `full` is all of them.

mod answer_printer;
mod args;
mod bench;
#[cfg(test)]
mod book;
mod chat;
mod chat_session;
mod columns;
mod completions;
mod compute;
mod configuration;
mod console;
mod credentials;
mod devices;
mod doctor;
mod embed;
mod export;
mod fitting;
mod generating;
mod grammar;
mod head;
mod head_pool;
mod hub;
mod import;
mod inspect;
mod interrupt;
mod layers;
mod lines;
mod man;
mod opening;
mod outcome;
mod panic_log;
mod perplexity;
mod plan;
#[cfg(feature = "plot")]
mod plot;
mod pocket;
mod prompt;
#[cfg(feature = "hub")]
mod pull;
mod router;
mod run;
mod sampling;
mod serve;
mod sessions;
mod settings;
mod sharing;
mod simulate;
mod speculating;
mod tokenize;
mod tokens;
#[cfg(feature = "top")]
mod top;
mod tracing;
#[cfg(feature = "train")]
mod train;
mod transcript;
mod verify;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _};

use args::{Cli, Command};
use configuration::Configuration;
use console::Console;
use outcome::Outcome;

/// Runs the command line of this process and returns its exit code.
pub fn run() -> ExitCode {
    let (cli, configuration) = match parsed() {
        Ok(parsed) => parsed,
        Err(error) => return failed(&Console::default(), &error),
    };
    let console = Console::new(&cli.output);
    match act(cli.command, &configuration, &console) {
        Ok(outcome) => outcome.code(),
        Err(error) if outcome::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => failed(&console, &error),
    }
}

/// The command line, with what firebox.toml says where it says nothing.
fn parsed() -> anyhow::Result<(Cli, Configuration)> {
    let args: Vec<OsString> = std::env::args_os().collect();
    let mut configuration = Configuration::of(&Cli::command(), &args)?;
    let matches = configuration.over(Cli::command()).get_matches_from(args);
    configuration.note(&matches);
    let models = configuration.models();
    configuration::expect_memory(&matches, &models)?;
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    hub::know(models);
    Ok((cli, configuration))
}

fn act(command: Command, configuration: &Configuration, console: &Console) -> anyhow::Result<Outcome> {
    match command {
        Command::Run(args) => run::run(&args, console),
        Command::Chat(args) => chat::chat(&args, console),
        Command::Serve(args) => serve::serve(&args, configuration, console),
        #[cfg(feature = "hub")]
        Command::Pull(args) => pull::pull(&args, console),
        Command::Import(args) => import::import(&args, console),
        Command::Export(args) => export::export(&args, console),
        Command::Inspect(args) => inspect::inspect(&args, console),
        Command::Verify(args) => verify::verify(&args, console),
        Command::Perplexity(args) => perplexity::perplexity(&args, console),
        Command::Plan(args) => plan::plan(&args, console),
        Command::Head { command } => head::head(&command, console),
        Command::Embed(args) => embed::embed(&args, console),
        Command::Simulate(args) => simulate::run(&args, console),
        #[cfg(feature = "train")]
        Command::Train(args) => train::train(&args, console),
        Command::Tokenize(args) => tokenize::tokenize(&args, console),
        Command::Bench(args) => bench::bench(&args, console),
        Command::Devices(args) => devices::devices(&args, console),
        Command::Doctor(args) => doctor::doctor(&args, console),
        #[cfg(feature = "top")]
        Command::Top(args) => top::top(&args, console),
        Command::Session { command } => sessions::session(&command, console),
        Command::Completions(args) => completions::completions(&args, Cli::command(), console),
        Command::Man(args) => man::man(&args, Cli::command(), console),
    }
}

fn failed(console: &Console, error: &anyhow::Error) -> ExitCode {
    console.error(&outcome::in_one_line(error));
    ExitCode::from(outcome::code_of(error))
}
