//! Decode steps that an accelerator records once and runs as a whole while the same sequences go on token by token.
//!
//! Launching the kernels of a step one by one takes a GPU's host longer than the GPU takes to run them. A recorded step runs
//! as a whole: only its input is uploaded, and kernels add the number of steps since the recording to slots and
//! positions. A recording holds until the last page of a sequence is full, or until anything but such a step changes a sequence.

use std::sync::PoisonError;
use std::thread;

use burn::tensor::Tensor;
use firebox_cache::{KvType, PageTable, SequenceCache};
use firebox_kernels::step::{self, StepError, StepInput};

use crate::input::Input;
use crate::pass::unembed;
use crate::recording::{RecordedStep, State};
use crate::rows::Rows;
use crate::{Decoder, ModelError};

/// Sequences of a recorded step at most: as many rows as products fuse with the steps around them.
const MAX_SEQUENCES: usize = 16;
/// Steps that have to fit into the last pages for a recording to be worth while.
const MIN_STEPS: usize = 4;
/// Steps that are not recorded after a recording that ran less often than [`MIN_STEPS`].
const PAUSE: usize = 8;

impl Decoder {
    /// Runs a decode step of one token for each input by running a recorded one, recording it first where necessary. Returns
    /// the logits, `[inputs, vocab_size]`, or `None` where there is none: on the CPU, with streamed weights,
    /// heads, custom components, masks or quantized caches, or for more than one token.
    ///
    /// The logits are equal to those of [`forward_together`](Self::forward_together), to the last bit.
    pub(crate) fn run_recorded(
        &self,
        inputs: &[Input<'_>],
        caches: &mut [&mut SequenceCache],
    ) -> Result<Option<Tensor<2>>, ModelError> {
        let fits = |(input, cache): (&Input<'_>, &&mut SequenceCache)| {
            let layout = cache.pool().layout();
            input.position == cache.position()
                && layout.kv_dtype != KvType::Int8
                && layout.device == *self.device()
        };
        if inputs.len() != caches.len() || !inputs.iter().zip(&*caches).all(fits) {
            return Ok(None);
        }
        let mut state = self.recorder().0.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*state, State::Unsupported) {
            return Ok(None);
        }
        for cache in &mut *caches {
            cache.reserve(1)?;
        }
        match &mut *state {
            State::Recorded(recorded) => match recorded.steps(caches) {
                Some(steps) => recorded.input.write(steps as u32, &self.sections(inputs)),
                // The old recording makes room for the next.
                None if recorded.runs < MIN_STEPS => *state = State::Waiting { steps: PAUSE },
                None => *state = State::Empty,
            },
            State::Waiting { steps: 0 } => *state = State::Empty,
            State::Waiting { steps } => *steps -= 1,
            State::Empty | State::Unsupported => {}
        }
        if matches!(*state, State::Empty) {
            self.record(inputs, caches, &mut state)?;
        }
        let State::Recorded(recorded) = &mut *state else { return Ok(None) };
        recorded.runs += 1;
        // The page tables are those of the recording, and pages count every write and reallocation that is not a recorded step.
        // SAFETY: so pages have the buffers they had; the decoder owns the weights and, behind the lock, input and logits. The
        // thread is the one that recorded, and caches are borrowed exclusively: others that share pages read other slots.
        unsafe { recorded.graph.run() }?;
        let logits = step::copy(&recorded.logits);
        for cache in caches {
            cache.advance();
        }
        Ok(Some(logits))
    }

    /// Returns whether passes of these inputs have the form of a recorded step.
    pub(crate) fn can_record(&self, inputs: &[Input<'_>]) -> bool {
        let fits = |input: &Input<'_>| {
            matches!(input.tokens, [token] if (*token as usize) < self.config().vocab_size)
                && input.head.is_none()
        };
        step::supports(self.device())
            && (1..=MAX_SEQUENCES).contains(&inputs.len())
            && self.streamed().is_none()
            && self.split().is_none()
            && self.changes().is_empty()
            && self.observer().is_none_or(|observer| !observer.follows())
            && inputs.iter().all(fits)
    }

    /// Records a step whose slots are reserved, if that is worth while now and supported. Its kernels have not run afterwards.
    fn record(
        &self,
        inputs: &[Input<'_>],
        caches: &mut [&mut SequenceCache],
        state: &mut State,
    ) -> Result<(), ModelError> {
        let worth_while = |cache: &&mut SequenceCache| {
            cache.page_table().is_some_and(|table| table.steps_left() >= MIN_STEPS)
        };
        if !caches.iter().all(worth_while) {
            return Ok(());
        }
        for cache in &mut *caches {
            cache.grow_last_page();
        }
        let sections = self.sections(inputs);
        let lengths: Vec<usize> = sections.iter().map(Vec::len).collect();
        let Some(input) = StepInput::new(self.device(), &lengths) else {
            *state = State::Unsupported;
            return Ok(());
        };
        input.write(0, &sections);
        let (logits, graph) = match input.record(|| self.recorded_pass(inputs, caches, &input)) {
            Ok(recorded) => recorded,
            Err(ModelError::Recording(StepError::Unsupported { .. })) => {
                *state = State::Unsupported;
                return Ok(());
            }
            Err(error) => {
                *state = State::Unsupported;
                return Err(error);
            }
        };
        let tables: Option<Vec<PageTable>> = caches.iter().map(|cache| cache.page_table()).collect();
        if let Some(tables) = tables {
            let thread = thread::current().id();
            *state = State::Recorded(RecordedStep { thread, tables, input, graph, logits, runs: 0 });
        }
        Ok(())
    }

    /// Runs a step with tokens and angles from `input`.
    fn recorded_pass(
        &self,
        inputs: &[Input<'_>],
        caches: &mut [&mut SequenceCache],
        input: &StepInput,
    ) -> Result<Tensor<2>, ModelError> {
        let mut hidden = self.embed_indices(input.integers(0))?;
        let rows = Rows::recorded(self.config(), inputs.iter().map(Input::span), input);
        for layer in 0..self.layers() {
            let caches = caches.iter_mut().map(|cache| cache.layer(layer));
            hidden = self.block(layer)?.forward(hidden, &rows, caches)?;
        }
        unembed(self, None, hidden)
    }

    /// The sections of a step's input: tokens, then cosines and sines of every position scheme.
    fn sections(&self, inputs: &[Input<'_>]) -> Vec<Vec<u32>> {
        let tokens = inputs.iter().flat_map(|input| input.tokens).copied().collect();
        let angles = Rows::angles(self.config(), inputs.iter().map(Input::span)).into_iter().flatten();
        let bits = angles.map(|values| values.into_iter().map(f32::to_bits).collect());
        [tokens].into_iter().chain(bits).collect()
    }
}
