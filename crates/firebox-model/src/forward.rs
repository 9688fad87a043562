//! Whole passes of a decoder: with logits, for a cache alone, and replays for another head.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use firebox_cache::SequenceCache;
use firebox_kernels::likeliest::Scored;
use firebox_kernels::on_pool;

use crate::input::Input;
use crate::observer::Passed;
use crate::pass::{LogitRows, Pass};
use crate::{Decoder, Head, ModelError};

impl Decoder {
    /// A whole pass: the logits of some tokens that follow what is cached.
    pub fn forward(
        &self,
        tokens: &[u32],
        length: usize,
        cache: &mut SequenceCache,
        wanted: LogitRows,
    ) -> Result<Tensor<2>, ModelError> {
        let input = Input::new(tokens, cache.position(), length);
        self.forward_together(&[input], &mut [cache], wanted)
    }

    /// Runs a whole pass for several sequences at once, each with its own cache.
    pub fn forward_together(
        &self,
        inputs: &[Input<'_>],
        caches: &mut [&mut SequenceCache],
        wanted: LogitRows,
    ) -> Result<Tensor<2>, ModelError> {
        let _turn = self.stream_guard();
        on_pool(self.device(), || {
            let began = Instant::now();
            self.expect(inputs, true);
            let pass = self.finished(Pass::begin_step(self, inputs)?, caches)?;
            let logits = pass.logits(self, wanted)?;
            self.passed(inputs, logits.dims()[0], began);
            Ok(logits)
        })
    }

    /// Runs a whole pass for several sequences like [`forward_together`](Self::forward_together), and returns the likeliest `most`
    /// tokens after each, likeliest first. Accelerators find them themselves, so that logits are not read.
    pub fn forward_likeliest(
        &self,
        inputs: &[Input<'_>],
        caches: &mut [&mut SequenceCache],
        most: usize,
    ) -> Result<Vec<Vec<Scored>>, ModelError> {
        let _turn = self.stream_guard();
        on_pool(self.device(), || {
            let began = Instant::now();
            self.expect(inputs, true);
            let pass = Pass::begin_step(self, inputs)?.with_likeliest(most);
            let likeliest = self.finished(pass, caches)?.likeliest(self, &vec![true; inputs.len()])?;
            self.passed(inputs, likeliest.len(), began);
            Ok(likeliest)
        })
    }

    /// Begins a pass that the caller steps through; `logits` says whether logits will be asked of it, and nothing but logits.
    /// One step may then run all layers. With streamed weights, only one pass may be under way at a time.
    pub fn begin_pass(&self, inputs: &[Input<'_>], logits: bool) -> Result<Pass, ModelError> {
        self.expect(inputs, logits);
        if logits { Pass::begin_step(self, inputs) } else { Pass::begin(self, inputs) }
    }

    /// Begins a pass like [`begin_pass`](Self::begin_pass) whose [states](Pass::states) are wanted, and logits as well if
    /// `logits` says so. Every step runs one layer.
    pub fn begin_pass_with_states(&self, inputs: &[Input<'_>], logits: bool) -> Result<Pass, ModelError> {
        self.expect(inputs, logits);
        Pass::begin(self, inputs)
    }

    /// Reports the end of such a pass; `time` excludes what came between its layers.
    pub fn end_pass(&self, passed: Passed, time: Duration) {
        if let Some(observer) = self.observer() {
            observer.pass(passed, Instant::now().checked_sub(time).unwrap_or_else(Instant::now));
        }
        if let Some(streamed) = self.streamed() {
            streamed.pass_ended(passed.rows, time);
        }
    }

    /// Runs a whole pass without computing logits.
    pub fn encode(&self, input: Input<'_>, cache: &mut SequenceCache) -> Result<(), ModelError> {
        let _turn = self.stream_guard();
        on_pool(self.device(), || {
            let began = Instant::now();
            self.expect(&[input], false);
            self.finished(Pass::begin(self, &[input])?, &mut [cache])?;
            self.passed(&[input], 0, began);
            Ok(())
        })
    }

    /// Makes a sequence's cache ready to be [taken through another head](Self::replay), in pieces of at most `most`
    /// tokens. An error leaves it as it was; otherwise it is that of no head, until the last piece went through.
    pub fn begin_replay(
        &self,
        cache: &mut SequenceCache,
        most: usize,
    ) -> Result<Vec<Range<usize>>, ModelError> {
        let split = self.split().ok_or(ModelError::NoSplit)?;
        Ok(cache.begin_replay(split, most)?)
    }

    /// Takes what a sequence keeps of its tokens through another head, which the sequence's cache is then that of. The
    /// trunk does not run. `tokens` are those of the sequence.
    pub fn replay(
        &self,
        head: Option<&Arc<Head>>,
        tokens: &[u32],
        length: usize,
        pieces: Vec<Range<usize>>,
        cache: &mut SequenceCache,
    ) -> Result<(), ModelError> {
        let layout = cache.pool().layout();
        let (Some(split), Some(states)) = (self.split(), self.states_layer(layout)) else {
            return Err(ModelError::NoSplit);
        };
        let _turn = self.stream_guard();
        let began = Instant::now();
        for piece in pieces {
            let Some(mut replay) = cache.replay(states, piece.clone()) else {
                return Err(ModelError::NoSplit);
            };
            on_pool(self.device(), || {
                let position = replay.view.position();
                let input = Input { tokens: &tokens[piece], position, length, head };
                self.expect(&[input], false);
                let mut pass = Pass::over(self, &[input], replay.states.clone(), split)?;
                while pass.next_layer() < self.layers() {
                    pass.step(self, &mut [&mut replay.view])?;
                }
                Ok::<_, ModelError>(())
            })?;
            cache.finish_replay(replay, split);
        }
        if let Some(observer) = self.observer() {
            observer.replay(tokens.len(), began);
        }
        Ok(())
    }

    /// Takes a pass through all layers.
    fn finished(&self, mut pass: Pass, caches: &mut [&mut SequenceCache]) -> Result<Pass, ModelError> {
        while pass.next_layer() < self.layers() {
            pass.step(self, caches)?;
        }
        Ok(pass)
    }

    /// The hidden states after the first `layers` layers of a sequence that is nothing but `tokens`, `[tokens,
    /// hidden_size]`. Later layers do not run.
    pub fn hidden_after(&self, tokens: &[u32], layers: usize) -> Result<Tensor<2>, ModelError> {
        let _turn = self.stream_guard();
        on_pool(self.device(), || {
            let layers = layers.min(self.layers());
            self.read_ahead(layers, false);
            let mut cache = self.cache();
            let mut pass = Pass::begin(self, &[Input::new(tokens, 0, tokens.len())])?;
            while pass.next_layer() < layers {
                pass.step(self, &mut [&mut cache])?;
            }
            Ok(pass.hidden())
        })
    }

    /// The hidden states of several sequences that are nothing but their tokens, after all layers and the final norm:
    /// `[tokens, hidden_size]` for each. None sees another.
    pub fn states(&self, texts: &[&[u32]]) -> Result<Vec<Tensor<2>>, ModelError> {
        let _turn = self.stream_guard();
        on_pool(self.device(), || {
            self.read_ahead(self.layers(), false);
            let inputs: Vec<_> = texts.iter().map(|tokens| Input::new(tokens, 0, tokens.len())).collect();
            let mut caches: Vec<_> = texts.iter().map(|_| self.cache()).collect();
            let pass =
                self.finished(Pass::begin(self, &inputs)?, &mut caches.iter_mut().collect::<Vec<_>>())?;
            let states = self.normalize(pass.hidden());
            let mut row = 0;
            let of = |tokens: &&[u32]| {
                row += tokens.len();
                states.clone().narrow(0, row - tokens.len(), tokens.len())
            };
            Ok(texts.iter().map(of).collect())
        })
    }

    /// Says what the next passes will ask for, so that nothing else is read ahead.
    fn expect(&self, inputs: &[Input<'_>], logits: bool) {
        match self.split() {
            Some(split) if inputs.iter().all(|input| input.head.is_some()) => self.read_ahead(split, false),
            _ => self.read_ahead(self.layers(), logits),
        }
    }

    fn read_ahead(&self, layers: usize, logits: bool) {
        if let Some(streamed) = self.streamed() {
            streamed.read_ahead_layers(layers, logits);
        }
    }

    fn passed(&self, inputs: &[Input<'_>], logits: usize, began: Instant) {
        let rows = inputs.iter().map(|input| input.tokens.len()).sum();
        self.end_pass(Passed { sequences: inputs.len(), rows, logits }, began.elapsed());
    }
}
