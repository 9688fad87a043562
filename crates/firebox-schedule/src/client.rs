//! The clients of a queue, and what each may have of it.

use std::sync::Arc;

/// Who asks: the tasks of one client share its part of a queue and of the batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Client {
    /// Tells clients apart. Tasks that name none are one client together.
    pub name: Arc<str>,
    /// The client's part of the batch and of the queue, relative to that of others; at least 1.
    pub weight: u32,
    /// The most tasks of the client that run at once; absent for as many as others leave.
    pub most_running: Option<usize>,
    /// The most tasks of the client that wait before another one is refused; absent for its part of the queue.
    pub most_waiting: Option<usize>,
}

impl Default for Client {
    fn default() -> Self {
        Self { name: "".into(), weight: 1, most_running: None, most_waiting: None }
    }
}

impl Client {
    /// A client of weight 1 without limits of its own.
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// Sets the weight.
    pub fn with_weight(self, weight: u32) -> Self {
        Self { weight: weight.max(1), ..self }
    }

    /// Returns what `amount` is in units of the client's weight.
    pub fn by_weight(&self, amount: f64) -> f64 {
        amount / f64::from(self.weight.max(1))
    }
}

/// A client with tasks in a queue, or one that had more of the batch than those that have.
#[derive(Debug, Clone)]
pub(crate) struct ClientUsage {
    pub client: Client,
    /// The rows that passes have computed for it, by its weight.
    pub served: f64,
}

/// How many tasks of a client run and wait.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ClientTasks {
    pub running: usize,
    pub waiting: usize,
}
