//! `firebox completions`

use clap::{Args, CommandFactory as _};
use clap_complete::Shell;

use crate::args::Cli;
use crate::console::Console;
use crate::outcome::Outcome;

/// Options of `firebox completions`.
#[derive(Debug, Args)]
#[command(after_help = "\
Where to write it, for the shells people use:
  bash  firebox completions bash > ~/.local/share/bash-completion/completions/firebox
  zsh   firebox completions zsh > \"${fpath[1]}/_firebox\"
  fish  firebox completions fish > ~/.config/fish/completions/firebox.fish")]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// Prints the script that a shell completes by.
pub fn completions(args: &CompletionsArgs, console: &Console) -> anyhow::Result<Outcome> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "firebox", &mut script);
    console.print(&String::from_utf8_lossy(&script))?;
    Ok(Outcome::Done)
}
