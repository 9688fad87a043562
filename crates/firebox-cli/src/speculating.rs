//! The command-line options for drafting tokens, so that the model has to run less often.

use std::path::PathBuf;

use clap::Args;
use firebox_runtime::{DRAFT_TOKENS, LookupDrafter, Model, ModelDrafter, Session, Speculation};

use crate::compute::DeviceArgs;
use crate::console::Console;
use crate::opening::open;
use crate::outcome::usage;

/// Options of drafting.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Drafts (tokens come faster where they are good, and stay the same)")]
pub struct SpeculatingArgs {
    /// Draft what followed the last time that the text ended as it does now
    #[arg(long, conflicts_with = "draft")]
    pub lookup: bool,
    /// Draft by this model, smaller and with the same tokens; not with --memory, which says nothing of it
    #[arg(long, value_name = "MODEL", conflicts_with = "memory")]
    pub draft: Option<PathBuf>,
    /// Draft at most this many tokens at a time [default: 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub draft_tokens: Option<u16>,
}

impl SpeculatingArgs {
    /// Returns the drafter, if one is configured. The session of a draft model is set up by `configured`.
    pub fn speculation(
        &self,
        model: &Model,
        device: &DeviceArgs,
        configured: impl FnOnce(Session) -> Session,
        console: &Console,
    ) -> anyhow::Result<Option<Speculation>> {
        let speculation = match &self.draft {
            Some(draft) => {
                // The threads were set up when the model was opened.
                let device = DeviceArgs { threads: None, ..device.clone() };
                let draft = open(draft, &device, console)?.with_telemetry(model.telemetry(), "draft");
                let drafter = ModelDrafter::new(&draft, model)?;
                Speculation::new(drafter.with_session(configured))
            }
            None if self.lookup => Speculation::new(LookupDrafter::new()),
            None if self.draft_tokens.is_some() => {
                return Err(usage("--draft-tokens: say what drafts them, --lookup or --draft MODEL"));
            }
            None => return Ok(None),
        };
        let most = self.draft_tokens.map_or(DRAFT_TOKENS, usize::from);
        Ok(Some(speculation.with_draft_tokens(most)))
    }
}
