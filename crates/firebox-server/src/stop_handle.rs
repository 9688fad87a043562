//! The handle that stops a server.

use std::sync::Arc;

use tokio::sync::watch;

/// Stops a server from any thread.
#[derive(Debug, Clone)]
pub struct StopHandle(Arc<watch::Sender<bool>>);

impl StopHandle {
    /// Creates a handle of a running server.
    pub(crate) fn new() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }

    /// Returns a receiver that observes the stop.
    pub(crate) fn watch(&self) -> watch::Receiver<bool> {
        self.0.subscribe()
    }

    /// Stops accepting connections. Running requests have [`ServerConfig::shutdown_grace`](crate::ServerConfig::shutdown_grace) to finish.
    pub fn stop(&self) {
        self.0.send_replace(true);
    }
}
