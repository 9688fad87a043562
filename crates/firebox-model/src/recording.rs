//! The recorded decode step of a decoder, and whether it still describes its sequences.

use std::any::Any;
use std::sync::{Mutex, PoisonError, Weak};
use std::thread::{self, ThreadId};

use burn::tensor::Tensor;
use firebox_cache::{PageTable, SequenceCache};
use firebox_kernels::likeliest::{Likeliest, Scored};
use firebox_kernels::step::{StepGraph, StepInput};

use crate::ModelError;

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
    /// The likeliest tokens that the graph finds, if they were asked for when it was recorded.
    pub likeliest: Option<Likeliest>,
    /// The head whose layers it runs. It stays in memory only as long as something else uses it.
    pub head: Option<Weak<dyn Any + Send + Sync>>,
    /// Steps that it ran for.
    pub runs: usize,
}

/// The result of a recorded step.
#[derive(Debug, Clone)]
pub(crate) enum StepResult {
    /// Logits, `[inputs, vocab_size]`.
    Logits(Tensor<2>),
    /// The likeliest tokens of each input.
    Likeliest(Vec<Vec<Scored>>),
}

impl StepResult {
    /// Returns the logits.
    pub fn logits(self) -> Result<Tensor<2>, ModelError> {
        match self {
            Self::Logits(logits) => Ok(logits),
            Self::Likeliest(_) => Err(ModelError::NoLogits),
        }
    }
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
    /// Returns whether the graph runs the layers of the head at this place. No other head is allocated at the place of one that is gone, while
    /// there is a weak reference.
    pub fn is_of(&self, head: Option<*const ()>) -> bool {
        self.head.as_ref().map(|head| head.as_ptr().cast()) == head
    }

    /// Returns whether the graph finds so many of the likeliest tokens. Its logits are there in any case.
    pub fn finds(&self, most: Option<usize>) -> bool {
        most.unwrap_or(0) <= self.likeliest.as_ref().map_or(0, Likeliest::most)
    }

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
