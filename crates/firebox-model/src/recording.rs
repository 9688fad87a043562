//! The recorded decode step of a decoder, and whether it still describes its sequences.

use std::sync::{Mutex, PoisonError};
use std::thread::{self, ThreadId};

use burn::tensor::Tensor;
use firebox_cache::{PageTable, SequenceCache};
use firebox_kernels::step::{StepGraph, StepInput};

/// The recorded step of a decoder.
#[derive(Debug, Default)]
pub(crate) struct StepRecorder(pub Mutex<State>);

#[derive(Debug, Default)]
pub(crate) enum State {
    #[default]
    Empty,
    /// The last recording was of little use: some steps are not recorded.
    Waiting {
        steps: usize,
    },
    Recorded(RecordedStep),
    /// The device or the decoder does not support it.
    Unsupported,
}

#[derive(Debug)]
pub(crate) struct RecordedStep {
    /// The thread that recorded: devices order work by thread.
    pub thread: ThreadId,
    /// Where each sequence was stored.
    pub tables: Vec<PageTable>,
    pub input: StepInput,
    pub graph: StepGraph,
    /// The logits that the graph writes.
    pub logits: Tensor<2>,
    /// Steps that it ran for.
    pub runs: usize,
}

impl StepRecorder {
    /// Drops the recording, if there is one.
    pub fn release(&self) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*state, State::Recorded(_)) {
            *state = State::Empty;
        }
    }
}

impl RecordedStep {
    /// Returns the number of steps since the recording if nothing else has happened to these sequences.
    pub fn steps(&self, caches: &[&mut SequenceCache]) -> Option<usize> {
        if self.thread != thread::current().id() || self.tables.len() != caches.len() {
            return None;
        }
        let steps = self.tables.first()?.steps_to(caches.first()?)?;
        let goes_on = |(table, cache): (&PageTable, &&mut SequenceCache)| table.leads_to(cache, steps);
        self.tables.iter().zip(caches).all(goes_on).then_some(steps)
    }
}
