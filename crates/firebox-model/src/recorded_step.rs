//! Decode steps that an accelerator records once and runs as a whole while the same sequences go on token by token.
//!
//! Launching the kernels of a step one by one takes a GPU's host longer than the GPU takes to run them. A recorded step runs
//! as a whole: only its input is uploaded, and kernels add the number of steps since the recording to slots and
//! positions. A recording holds until the last page of a sequence is full, or until anything but such a step changes a sequence.

use std::any::Any;
use std::sync::{Arc, PoisonError, Weak};
use std::thread;

use burn::tensor::Tensor;
use firebox_cache::{KvType, PageTable, SequenceCache};
use firebox_kernels::likeliest::{Likeliest, likeliest};
use firebox_kernels::step::{self, StepError, StepInput};

use crate::input::Input;
use crate::pass::unembed;
use crate::recording::{RecordedStep, State, StepResult};
use crate::rows::Rows;
use crate::{Decoder, Head, ModelError};

/// Sequences of a recorded step at most: as many rows as products fuse with the steps around them.
const MAX_SEQUENCES: usize = 16;
/// Steps that have to fit into the last pages for a recording to be worth while.
const MIN_STEPS: usize = 4;
/// Steps that are not recorded after a recording that ran less often than [`MIN_STEPS`].
const PAUSE: usize = 8;

impl Decoder {
    /// Runs a decode step of one token for each input by running a recorded one, recording it first where necessary. Returns
    /// the logits or the likeliest `most` tokens, or `None` where there is none: on the CPU, with streamed weights, several heads,
    /// heads without layers or with adapters, custom components, masks or quantized caches, or for more than one token.
    ///
    /// The logits are equal to those of [`forward_together`](Self::forward_together), to the last bit.
    pub(crate) fn run_recorded(
        &self,
        inputs: &[Input<'_>],
        caches: &mut [&mut SequenceCache],
        most: Option<usize>,
    ) -> Result<Option<StepResult>, ModelError> {
        let fits = |(input, cache): (&Input<'_>, &&mut SequenceCache)| {
            let layout = cache.pool().layout();
            input.position == cache.position()
                && layout.kv_dtype != KvType::Int8
                && layout.device == *self.device()
        };
        let place = inputs.first().and_then(|input| input.head).map(|head| Arc::as_ptr(head).cast());
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
            State::Recorded(recorded) if !recorded.finds(most) || !recorded.is_of(place) => {
                *state = State::Empty
            }
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
            self.record(inputs, caches, most, &mut state)?;
        }
        let State::Recorded(recorded) = &mut *state else { return Ok(None) };
        recorded.runs += 1;
        // The page tables are those of the recording, and pages count every write and reallocation that is not a recorded step.
        // SAFETY: so pages have the buffers they had; the decoder and the head of the inputs own the weights and, behind the lock, the
        // decoder input and logits. The thread is the one that recorded, and caches are borrowed exclusively: others that share pages read other slots.
        unsafe { recorded.graph.run() }?;
        let result = match (most, &recorded.likeliest) {
            (Some(most), Some(likeliest)) => StepResult::Likeliest(likeliest.read(most)?),
            _ => StepResult::Logits(step::copy(&recorded.logits)),
        };
        for cache in caches {
            cache.advance();
        }
        Ok(Some(result))
    }

    /// Returns whether passes of these inputs have the form of a recorded step.
    pub(crate) fn can_record(&self, inputs: &[Input<'_>]) -> bool {
        let head = inputs.first().and_then(|input| input.head);
        let fits = |input: &Input<'_>| {
            matches!(input.tokens, [token] if (*token as usize) < self.config().vocab_size)
                && input.head.map(Arc::as_ptr) == head.map(Arc::as_ptr)
        };
        step::supports(self.device())
            && (1..=MAX_SEQUENCES).contains(&inputs.len())
            && self.streamed().is_none()
            && head.is_none_or(|head| self.split().is_some() && head.can_record())
            && self.changes().is_empty()
            && self.observer().is_none_or(|observer| !observer.follows())
            && inputs.iter().all(fits)
    }

    /// Records a step whose slots are reserved, if that is worth while now and supported. Its kernels have not run afterwards.
    fn record(
        &self,
        inputs: &[Input<'_>],
        caches: &mut [&mut SequenceCache],
        most: Option<usize>,
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
        let pass = || self.recorded_pass(inputs, caches, most, &input);
        let ((logits, likeliest), graph) = match input.record(pass) {
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
            let head = inputs.first().and_then(|input| input.head).map(|head| {
                let head: Weak<Head> = Arc::downgrade(head);
                head as Weak<dyn Any + Send + Sync>
            });
            *state = State::Recorded(RecordedStep {
                thread,
                tables,
                input,
                graph,
                logits,
                likeliest,
                head,
                runs: 0,
            });
        }
        Ok(())
    }

    /// Runs a step with tokens and angles from `input`. Returns logits, and the likeliest tokens if they are asked for.
    fn recorded_pass(
        &self,
        inputs: &[Input<'_>],
        caches: &mut [&mut SequenceCache],
        most: Option<usize>,
        input: &StepInput,
    ) -> Result<(Tensor<2>, Option<Likeliest>), ModelError> {
        let mut hidden = self.embed_indices(input.integers(0))?;
        let rows = Rows::recorded(self.config(), inputs.iter().map(Input::span), input);
        let head = inputs.first().and_then(|input| input.head);
        for layer in 0..self.layers() {
            if self.split() == Some(layer) {
                for (row, cache) in caches.iter_mut().enumerate() {
                    if let Some(states) = self.states_layer(cache.pool().layout()) {
                        cache.store_recorded_state(states, &hidden, row, &input.counter());
                    }
                }
            }
            let block = match head.filter(|_| self.split().is_some_and(|split| layer >= split)) {
                Some(head) => head.block(layer, self)?,
                None => Some(self.block(layer)?),
            };
            let Some(block) = block else {
                return Err(StepError::Unsupported { reason: "the head has no layers".into() }.into());
            };
            let caches = caches.iter_mut().map(|cache| cache.layer(layer));
            hidden = block.forward(hidden, &rows, caches)?;
        }
        let logits = unembed(self, head.map(Arc::as_ref), hidden)?;
        let likeliest = most.and_then(|most| likeliest(logits.clone(), most));
        Ok((logits, likeliest))
    }

    /// The sections of a step's input: tokens, then cosines and sines of every position scheme.
    fn sections(&self, inputs: &[Input<'_>]) -> Vec<Vec<u32>> {
        let tokens = inputs.iter().flat_map(|input| input.tokens).copied().collect();
        let angles = Rows::angles(self.config(), inputs.iter().map(Input::span)).into_iter().flatten();
        let bits = angles.map(|values| values.into_iter().map(f32::to_bits).collect());
        [tokens].into_iter().chain(bits).collect()
    }
}
