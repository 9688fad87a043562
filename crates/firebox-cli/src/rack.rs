//! Heads beside a model that a command has opened.

use std::time::Duration;

use clap::Args;
use firebox_runtime::heads::HeadPoolConfig;

/// Options of whatever answers with heads.
#[derive(Debug, Clone, Args)]
pub struct RackArgs {
    /// Milliseconds to wait for a head that is not in memory before it is given up for now
    #[arg(long, value_name = "MS", env = "FIREBOX_HEAD_WAIT", default_value_t = 500)]
    head_wait: u32,
}

impl RackArgs {
    /// The rack that they say.
    pub fn config(&self) -> HeadPoolConfig {
        HeadPoolConfig { max_wait: Duration::from_millis(self.head_wait.into()), ..HeadPoolConfig::default() }
    }
}
