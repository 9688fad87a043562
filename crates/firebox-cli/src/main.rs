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

mod args;
mod bench;
mod chat;
mod columns;
mod console;
mod conversation;
mod devices;
mod embed;
mod fitting;
mod generating;
mod grammar;
mod head;
mod hub;
mod import;
mod inspect;
mod interrupt;
mod layers;
mod lines;
mod outcome;
mod perplexity;
mod plan;
mod plot;
mod pocket;
mod prompt;
mod pull;
mod router;
mod run;
mod sampling;
mod serve;
mod settings;
mod simulate;
mod speculating;
mod tokenize;
mod tokens;
mod tracing;
mod train;
mod verify;

use std::process::ExitCode;

use clap::Parser as _;

use args::{Cli, Command};
use console::Console;

/// Keeps the memory of one operation for the next. The system's allocator gives large pieces back at once, and every
/// page of a prompt's intermediate results would be cleared by the kernel again and again.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let console = Console::new(&cli.output);
    let result = match cli.command {
        Command::Run(args) => run::run(&args, &console),
        Command::Chat(args) => chat::chat(&args, &console),
        Command::Serve(args) => serve::serve(&args, &console),
        Command::Pull(args) => pull::pull(&args, &console),
        Command::Import(args) => import::import(&args, &console),
        Command::Inspect(args) => inspect::inspect(&args, &console),
        Command::Verify(args) => verify::verify(&args, &console),
        Command::Perplexity(args) => perplexity::perplexity(&args, &console),
        Command::Plan(args) => plan::plan(&args, &console),
        Command::Head { command } => head::head(&command, &console),
        Command::Embed(args) => embed::embed(&args, &console),
        Command::Simulate(args) => simulate::run(&args, &console),
        Command::Train(args) => train::train(&args, &console),
        Command::Tokenize(args) => tokenize::tokenize(&args, &console),
        Command::Bench(args) => bench::bench(&args, &console),
        Command::Devices(args) => devices::devices(&args, &console),
    };
    match result {
        Ok(outcome) => outcome.code(),
        Err(error) if outcome::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            console.error(&outcome::in_one_line(&error));
            ExitCode::from(outcome::code_of(&error))
        }
    }
}
