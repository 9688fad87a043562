//! Replay: upper layers computed again from stored hidden states.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;
use firebox_kernels::attention::KvTensor;
use firebox_kernels::step::{StepCounter, write_row};

use super::SequenceCache;
use crate::error::CacheError;
use crate::kv_run::KvRun;
use crate::layer_kv::LayerKv;
use crate::layout::LayerLayout;
use crate::recurrent_state::RecurrentState;

/// Tokens to run through upper layers again, from stored [hidden states](LayerLayout::HiddenStates).
#[derive(Debug)]
pub struct Replay {
    /// Their range, counted from the first token in the cache. Their positions are consecutive.
    pub tokens: Range<usize>,
    /// The sequence as these layers see it during the replay.
    pub view: SequenceCache,
    /// The stored states of the tokens, `[tokens, width]`.
    pub states: Tensor<2>,
}

impl SequenceCache {
    /// Stores the hidden states `[tokens of the pass, width]` of a pass.
    ///
    /// # Panics
    /// If the layer stores something else.
    pub fn store_hidden_states(&mut self, layer: usize, states: Tensor<2>) {
        let states = LayerKv::HiddenStates(KvTensor::Float(states.unsqueeze_dim(0)));
        self.write_pass(layer, |tokens| states.part(tokens));
    }

    /// Stores row `row` of `states`, `[rows, width]`, as the hidden state of the only token of a recorded step.
    pub fn store_recorded_state(
        &mut self,
        layer: usize,
        states: &Tensor<2>,
        row: usize,
        steps: &StepCounter,
    ) {
        self.for_each_pass_page(|_, page, at| {
            page.write_states_with(layer, at, |kept| {
                if let KvTensor::Float(kept) = kept {
                    kept.inplace(|kept| write_row(kept, at, states.clone(), row, steps));
                }
            });
        });
    }

    /// Prepares layers from `first` on to be computed again from stored hidden states. Returns chunks of at most `most`
    /// tokens, to be [replayed](Self::replay) in order. Pages shared with other sequences are copied.
    ///
    /// An error leaves the cache unchanged.
    pub fn begin_replay(&mut self, first: usize, most: usize) -> Result<Vec<Range<usize>>, CacheError> {
        self.discard_pass();
        self.copy_shared_pages()?;
        // The replayed layers no longer attend to hidden turns.
        let seen = self.visible().position(|visible| !visible);
        self.pristine = self.pristine.min(seen.unwrap_or(self.len));
        for (state, layer) in self.states[first..].iter_mut().zip(&self.pool.layout().layers[first..]) {
            if *layer == LayerLayout::Recurrent {
                *state = Some(RecurrentState::default());
            }
        }
        // Saved states at turns belong to the layers as they were before the replay.
        if self.pool.layout().layers[first..].contains(&LayerLayout::Recurrent) {
            for entry in Arc::make_mut(&mut self.turns) {
                entry.before = None;
            }
        }
        Ok(self.chunks(most.max(1)))
    }

    /// All tokens in chunks of at most `most`, each of consecutive positions and either within one hidden turn or outside of
    /// all.
    fn chunks(&self, most: usize) -> Vec<Range<usize>> {
        let mut ends = vec![self.len];
        let (mut at, mut position) = (0, 0);
        for run in self.runs.iter() {
            if run.position != position {
                ends.push(at);
            }
            (at, position) = (at + run.len(), run.end());
        }
        let mut at = 0;
        for turn in self.turns() {
            if turn.hidden.is_some() {
                ends.extend([at, at + turn.tokens]);
            }
            at += turn.tokens;
        }
        ends.sort_unstable();
        let mut start = 0;
        let mut chunks = Vec::new();
        for end in ends {
            chunks.extend((start..end).step_by(most).map(|from| from..end.min(from + most)));
            start = end;
        }
        chunks
    }

    /// The sequence as it was before `tokens` passed. Layers that run on the view write where the sequence itself reads.
    /// `states_layer` is the layer that stores hidden states. A hidden turn attends to itself.
    pub fn replay(&self, states_layer: usize, tokens: Range<usize>) -> Option<Replay> {
        let mut view = self.clone();
        let mut at = 0;
        for entry in Arc::make_mut(&mut view.turns) {
            let held = at..at + entry.turn.tokens;
            at = held.end;
            if held.start <= tokens.start && tokens.end <= held.end {
                entry.turn.hidden = None;
            }
        }
        view.truncate_runs(tokens.end);
        view.position = self.position_of(tokens.start);
        (view.len, view.pending) = (tokens.start, tokens.len());
        // Visibility follows from the turns.
        view.refresh_visibility();
        let mut parts = Vec::new();
        let mut at = 0;
        for run in view.runs.iter() {
            let (from, to) = (at.max(tokens.start), at + run.len());
            if from < to {
                match run.part(from - at..to - at).read(states_layer)? {
                    LayerKv::HiddenStates(KvTensor::Float(states)) => parts.push(states),
                    _ => return None,
                }
            }
            at = to;
        }
        let states = Tensor::cat(parts, 1).squeeze_dim(0);
        Some(Replay { tokens, view, states })
    }

    /// Takes over the recurrent states that a replay has produced.
    pub fn finish_replay(&mut self, replay: Replay, first: usize) {
        self.states.truncate(first);
        self.states.extend(replay.view.states.into_iter().skip(first));
    }

    /// Copies all pages shared with other sequences, so that they can be overwritten.
    fn copy_shared_pages(&mut self) -> Result<(), CacheError> {
        let alone = Arc::get_mut(&mut self.runs).is_some();
        let mut runs = Vec::with_capacity(self.runs.len());
        for together in self.runs.chunk_by(KvRun::lies_with) {
            runs.extend(self.exclusive_runs(together, alone)?);
        }
        self.runs = Arc::new(runs);
        self.refresh_visibility();
        Ok(())
    }
}
