//! Ctrl-C: the first stops the work in hand, the next ends the program.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;

use crate::outcome::INTERRUPTED;

/// The handler of Ctrl-C.
#[derive(Debug, Clone, Default)]
pub struct Interrupt {
    requested: Arc<AtomicBool>,
    working: Arc<AtomicBool>,
}

/// While this lives, Ctrl-C stops the work and not the program.
#[derive(Debug)]
pub struct Working<'a>(&'a Interrupt);

impl Interrupt {
    /// Takes Ctrl-C over from the system.
    pub fn install() -> anyhow::Result<Self> {
        let interrupt = Self::default();
        let Self { requested, working } = interrupt.clone();
        ctrlc::set_handler(move || {
            if !working.load(Ordering::SeqCst) || requested.swap(true, Ordering::SeqCst) {
                std::process::exit(INTERRUPTED.into());
            }
        })
        .context("cannot handle Ctrl-C")?;
        Ok(interrupt)
    }

    /// Begins work that Ctrl-C is to stop. What was asked of the work before is over.
    pub fn work(&self) -> Working<'_> {
        self.requested.store(false, Ordering::SeqCst);
        self.working.store(true, Ordering::SeqCst);
        Working(self)
    }

    /// Returns the flag that Ctrl-C sets, for code that polls it.
    pub fn flag(&self) -> Arc<AtomicBool> {
        self.requested.clone()
    }
}

impl Working<'_> {
    /// Returns whether Ctrl-C has requested the work to stop.
    pub fn stop_requested(&self) -> bool {
        self.0.requested.load(Ordering::SeqCst)
    }
}

impl Drop for Working<'_> {
    fn drop(&mut self) {
        self.0.working.store(false, Ordering::SeqCst);
    }
}
