//! Options of the head pool beside a model that a command opens.

use std::time::Duration;

use clap::Args;
use firebox_runtime::heads::HeadPoolConfig;

/// Options of commands that answer with heads.
#[derive(Debug, Clone, Args)]
pub struct HeadPoolArgs {
    /// Milliseconds to wait for a head that is not in memory before the answer goes on without it
    #[arg(long, value_name = "MS", env = "FIREBOX_HEAD_WAIT", default_value_t = 500)]
    head_wait: u32,
}

impl HeadPoolArgs {
    /// The configuration of the head pool.
    pub fn config(&self) -> HeadPoolConfig {
        HeadPoolConfig { max_wait: Duration::from_millis(self.head_wait.into()), ..HeadPoolConfig::default() }
    }
}
