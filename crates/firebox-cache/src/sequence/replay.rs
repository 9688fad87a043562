use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;
use firebox_kernels::attend::Stored;

use super::SequenceCache;
use crate::error::CacheError;
use crate::layout::LayerLayout;
use crate::recurrent::RecurrentState;
use crate::remembered::Remembered;
use crate::run::Run;

/// Tokens that layers behind the kept [hidden states](LayerLayout::States) see once more.
#[derive(Debug)]
pub struct Replay {
    /// Which ones, counted as the sequence counts them. Their positions are consecutive.
    pub tokens: Range<usize>,
    /// The sequence as those layers see it then.
    pub view: SequenceCache,
    /// What was kept of the tokens, `[tokens, width]`.
    pub states: Tensor<2>,
}

impl SequenceCache {
    /// Keeps the hidden states `[tokens of the pass, width]` of a pass.
    ///
    /// # Panics
    /// If the layer keeps none.
    pub fn keep_states(&mut self, layer: usize, states: Tensor<2>) {
        let states = Remembered::States(Stored::Float(states.unsqueeze_dim(0)));
        self.fill(layer, |tokens| states.part(tokens));
    }

    /// Makes ready for layers from `first` on to be filled anew from the hidden states that `kept` keeps, in pieces
    /// of at most `most` tokens, each to be [replayed](Self::replay) in order. What other sequences see as well is
    /// copied, since it stays what it is for them.
    ///
    /// An error leaves everything as it was.
    pub fn begin_replay(&mut self, first: usize, most: usize) -> Result<Vec<Range<usize>>, CacheError> {
        self.give_up_pass();
        self.own_pages()?;
        // They do not see hidden turns any more.
        let seen = self.visible().position(|visible| !visible);
        self.unaltered = self.unaltered.min(seen.unwrap_or(self.len));
        for (state, layer) in self.states[first..].iter_mut().zip(&self.pool.layout().layers[first..]) {
            if *layer == LayerLayout::Recurrent {
                *state = Some(RecurrentState::default());
            }
        }
        // They are those of what was there before.
        if self.pool.layout().layers[first..].contains(&LayerLayout::Recurrent) {
            for entry in Arc::make_mut(&mut self.turns) {
                entry.before = None;
            }
        }
        Ok(self.pieces(most.max(1)))
    }

    /// All tokens in pieces of at most `most`, each of consecutive positions and either within a hidden turn or outside
    /// of all.
    fn pieces(&self, most: usize) -> Vec<Range<usize>> {
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
        let mut pieces = Vec::new();
        for end in ends {
            pieces.extend((start..end).step_by(most).map(|from| from..end.min(from + most)));
            start = end;
        }
        pieces
    }

    /// The sequence as it was when `tokens` were about to pass: what layers write then, they write where the sequence
    /// itself reads it. `kept` is the layer that keeps hidden states. A hidden turn sees itself.
    pub fn replay(&self, kept: usize, tokens: Range<usize>) -> Option<Replay> {
        let mut view = self.clone();
        let mut at = 0;
        for entry in Arc::make_mut(&mut view.turns) {
            let held = at..at + entry.turn.tokens;
            at = held.end;
            if held.start <= tokens.start && tokens.end <= held.end {
                entry.turn.hidden = None;
            }
        }
        view.keep(tokens.end);
        view.position = self.position_of(tokens.start);
        (view.len, view.pending) = (tokens.start, tokens.len());
        // Turns say what of the runs may be seen.
        view.cover();
        let mut parts = Vec::new();
        let mut at = 0;
        for run in view.runs.iter() {
            let (from, to) = (at.max(tokens.start), at + run.len());
            if from < to {
                match run.part(from - at..to - at).read(kept)? {
                    Remembered::States(Stored::Float(states)) => parts.push(states),
                    _ => return None,
                }
            }
            at = to;
        }
        let states = Tensor::cat(parts, 1).squeeze_dim(0);
        Some(Replay { tokens, view, states })
    }

    /// Takes over the recurrent states that a replay has left.
    pub fn replayed(&mut self, replay: Replay, first: usize) {
        self.states.truncate(first);
        self.states.extend(replay.view.states.into_iter().skip(first));
    }

    /// Copies whatever it shares with other sequences, so that it can be written over.
    fn own_pages(&mut self) -> Result<(), CacheError> {
        let alone = Arc::get_mut(&mut self.runs).is_some();
        let mut runs = Vec::with_capacity(self.runs.len());
        for together in self.runs.chunk_by(Run::lies_with) {
            runs.extend(self.owned(together, alone)?);
        }
        self.runs = Arc::new(runs);
        self.cover();
        Ok(())
    }
}
