//! `firebox devices`

use clap::Args;
use firebox_runtime::available_devices;

use crate::console::Console;
use crate::outcome::Outcome;

/// Options of `firebox devices`.
#[derive(Debug, Args)]
pub struct DevicesArgs {
    /// Print a JSON list
    #[arg(long)]
    json: bool,
}

/// Lists what `--device` takes.
pub fn devices(args: &DevicesArgs, console: &Console) -> anyhow::Result<Outcome> {
    let names = available_devices();
    if args.json {
        console.json(&names)?;
    } else {
        console.line(names.join("\n"))?;
    }
    Ok(Outcome::Done)
}
