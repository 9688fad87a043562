//! `firebox completions`

use clap::{Args, Command};
use clap_complete::Shell;

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

/// Prints the completion script of a shell.
pub fn completions(
    args: &CompletionsArgs,
    mut program: Command,
    console: &Console,
) -> anyhow::Result<Outcome> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut program, "firebox", &mut script);
    console.print(&String::from_utf8_lossy(&script))?;
    Ok(Outcome::Done)
}
