//! The heartbeat of an engine's thread, from which others tell whether it is alive.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The state of an engine's thread.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EngineHealth {
    /// It computes, or waits for requests.
    Running,
    /// It has been in one step for longer than [`EngineConfig::stall_after`](crate::EngineConfig::stall_after).
    Stalled {
        /// How long.
        since: Duration,
    },
    /// A step panicked, and it starts again.
    Restarting,
    /// It has ended, and answers no more requests.
    Ended,
}

const IDLE: u8 = 0;
const BUSY: u8 = 1;
const RESTARTING: u8 = 2;
const ENDED: u8 = 3;

/// What an engine's thread reports about itself.
#[derive(Debug)]
pub(crate) struct Heartbeat {
    began: Instant,
    phase: AtomicU8,
    /// When the step under way began, in milliseconds since `began`.
    beat: AtomicU64,
    failures: AtomicU64,
    reason: Mutex<Option<String>>,
}

impl Heartbeat {
    pub fn new() -> Self {
        Self {
            began: Instant::now(),
            phase: AtomicU8::new(IDLE),
            beat: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            reason: Mutex::new(None),
        }
    }

    /// A step begins.
    pub fn beat(&self) {
        self.beat.store(self.began.elapsed().as_millis() as u64, Ordering::Relaxed);
        self.phase.store(BUSY, Ordering::Release);
    }

    /// The thread waits for a command.
    pub fn rest(&self) {
        self.phase.store(IDLE, Ordering::Release);
    }

    /// A step panicked.
    pub fn failed(&self, reason: &str) {
        self.phase.store(RESTARTING, Ordering::Release);
        self.failures.fetch_add(1, Ordering::Relaxed);
        *self.reason.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason.to_owned());
    }

    /// The thread ends.
    pub fn ended(&self) {
        self.phase.store(ENDED, Ordering::Release);
    }

    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Returns the message of the last panic.
    pub fn last_failure(&self) -> Option<String> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn health(&self, stall_after: Duration) -> EngineHealth {
        match self.phase.load(Ordering::Acquire) {
            IDLE => EngineHealth::Running,
            RESTARTING => EngineHealth::Restarting,
            ENDED => EngineHealth::Ended,
            _ => {
                let beat = Duration::from_millis(self.beat.load(Ordering::Relaxed));
                let since = self.began.elapsed().saturating_sub(beat);
                if since > stall_after { EngineHealth::Stalled { since } } else { EngineHealth::Running }
            }
        }
    }
}
