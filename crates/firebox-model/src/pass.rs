//! Forward passes, one layer at a time.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use burn::tensor::Tensor;
use firebox_cache::SequenceCache;
use firebox_kernels::likeliest::{Scored, likeliest, reference};
use firebox_kernels::transfers;

use crate::input::Input;
use crate::observer::Observer;
use crate::recording::StepResult;
use crate::rows::{Rows, indices};
use crate::{Decoder, Head, ModelError};

/// A forward pass as a value: it can stop between any two layers and continue later.
///
/// Whole, streamed, interleaved and head-switching runs are all loops over [`Pass::step`].
#[derive(Debug, Clone)]
pub struct Pass {
    /// One up to the decoder's split, then one for each head.
    parts: Vec<HeadGroup>,
    /// The head of each input.
    heads: Vec<Option<Arc<Head>>>,
    next_layer: usize,
    /// Observer of every layer.
    observer: Option<Arc<dyn Observer>>,
    /// A decode step that has not begun: it may run as a recorded one.
    step: Option<DecodeStep>,
    /// How many of the likeliest tokens are wanted, and no logits.
    most: Option<usize>,
    /// The result of a recorded step, if one ran.
    recorded: Option<StepResult>,
}

/// One token for each of several sequences.
#[derive(Debug, Clone)]
struct DecodeStep {
    tokens: Vec<u32>,
    /// The position and the expected length of each sequence.
    places: Vec<(usize, usize)>,
    /// The head of all of them.
    head: Option<Arc<Head>>,
}

impl DecodeStep {
    fn inputs(&self) -> Vec<Input<'_>> {
        let tokens = self.tokens.chunks(1).zip(&self.places);
        let head = self.head.as_ref();
        tokens
            .map(|(token, (position, length))| Input { head, ..Input::new(token, *position, *length) })
            .collect()
    }
}

/// Inputs that pass through the same layers.
#[derive(Debug, Clone)]
struct HeadGroup {
    /// Indices of the inputs, in order.
    inputs: Vec<usize>,
    rows: Rows,
    hidden: Tensor<2>,
    head: Option<Arc<Head>>,
}

/// The rows of a finished pass that are turned into logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitRows {
    /// The last token of each input.
    Last,
    /// Every token.
    All,
}

impl Pass {
    /// Looks up the embeddings of the tokens of one or more sequences.
    pub fn begin(model: &Decoder, inputs: &[Input<'_>]) -> Result<Self, ModelError> {
        let vocab_size = model.config().vocab_size;
        if inputs.iter().any(|input| input.tokens.is_empty()) {
            return Err(ModelError::NoTokens);
        }
        let tokens: Vec<u32> = inputs.iter().flat_map(|input| input.tokens).copied().collect();
        if let Some(&token) = tokens.iter().find(|token| **token as usize >= vocab_size) {
            return Err(ModelError::Token { token, vocab_size });
        }
        if tokens.is_empty() {
            return Err(ModelError::NoTokens);
        }
        let embedded = model.embed(&tokens, inputs.iter().map(Input::span))?;
        Self::over(model, inputs, embedded, 0)
    }

    /// Begins a pass whose logits are wanted. Unlike one that is [begun](Self::begin) for its hidden states, its first step may
    /// run all layers, as a recorded decode step.
    pub(crate) fn begin_step(model: &Decoder, inputs: &[Input<'_>]) -> Result<Self, ModelError> {
        if !model.can_record(inputs) {
            return Self::begin(model, inputs);
        }
        let step = DecodeStep {
            tokens: inputs.iter().flat_map(|input| input.tokens).copied().collect(),
            places: inputs.iter().map(|input| (input.position, input.length)).collect(),
            head: inputs.first().and_then(|input| input.head).cloned(),
        };
        let heads = inputs.iter().map(|input| input.head.cloned()).collect();
        let step = Some(step);
        Ok(Self { parts: Vec::new(), heads, next_layer: 0, observer: None, step, most: None, recorded: None })
    }

    /// Sets how many of the [likeliest](Self::likeliest) tokens will be asked of it instead of logits, before its first step.
    #[must_use]
    pub fn with_likeliest(self, most: usize) -> Self {
        Self { most: Some(most), ..self }
    }

    /// Continues from stored hidden states before layer `next_layer`, those of the inputs' tokens.
    pub(crate) fn over(
        model: &Decoder,
        inputs: &[Input<'_>],
        hidden: Tensor<2>,
        next_layer: usize,
    ) -> Result<Self, ModelError> {
        let heads: Vec<_> = inputs.iter().map(|input| input.head.cloned()).collect();
        if heads.iter().any(Option::is_some) && model.split().is_none() {
            return Err(ModelError::NoSplit);
        }
        let classifying = heads.iter().filter(|head| head.as_ref().is_some_and(|head| head.is_classifier()));
        if heads.len() > 1 && classifying.count() > 0 {
            // Its output has one column per label.
            return Err(ModelError::Kind {
                model_type: model.config().family.into(),
                found: "a head that classifies",
                wanted: "one head among several that continue text",
                remedy: "let a sequence that is classified pass alone",
            });
        }
        let mut rows = Rows::new(&model.config().ropes, inputs.iter().map(Input::span), model.device());
        if model.config().layer_inputs.is_some() {
            let tokens: Vec<u32> = inputs.iter().flat_map(|input| input.tokens).copied().collect();
            let embedded = (next_layer == 0).then(|| hidden.clone());
            rows.layer_inputs = model.layer_inputs(&tokens, embedded)?;
        }
        let part = HeadGroup { inputs: (0..inputs.len()).collect(), rows, hidden, head: None };
        let observer = model.observer().filter(|observer| observer.follows());
        Ok(Self { parts: vec![part], heads, next_layer, observer, step: None, most: None, recorded: None })
    }

    /// Returns the layer that [`step`](Self::step) runs next, or the number of layers when all have run.
    pub fn next_layer(&self) -> usize {
        self.next_layer
    }

    /// Returns the hidden state before the next layer, `[rows, hidden_size]`; after the split, the rows of
    /// one head follow those of another.
    ///
    /// # Panics
    /// If the pass is a [decode step](Decoder::begin_pass) that has not begun, or was a recorded one: those have logits only.
    pub fn hidden(&self) -> Tensor<2> {
        match &self.parts[..] {
            [part] => part.hidden.clone(),
            parts => Tensor::cat(parts.iter().map(|part| part.hidden.clone()).collect(), 0),
        }
    }

    /// Returns the states of some inputs without a head after all layers and the final norm, `[tokens, hidden_size]` each.
    pub fn states(&self, model: &Decoder, inputs: Range<usize>) -> Vec<Tensor<2>> {
        let mut states = Vec::with_capacity(inputs.len());
        for part in &self.parts {
            let mine = part.inputs.iter().zip(&part.rows.groups).filter(|(input, _)| inputs.contains(input));
            let rows: Vec<Range<usize>> = mine.map(|(_, group)| group.rows.clone()).collect();
            let (Some(first), Some(last)) = (rows.first(), rows.last()) else { continue };
            let all = model.normalize(part.hidden.clone().narrow(0, first.start, last.end - first.start));
            states.extend(rows.iter().map(|of| all.clone().narrow(0, of.start - first.start, of.len())));
        }
        states
    }

    /// Runs one layer. `caches` are those of the inputs, in order, each at its input's position.
    ///
    /// After an error a cache may hold the tokens of only some layers: clear or rewind it.
    pub fn step(&mut self, model: &Decoder, caches: &mut [&mut SequenceCache]) -> Result<(), ModelError> {
        let Some(observer) = self.observer.clone() else { return self.run_layer(model, caches) };
        let (layer, began) = (self.next_layer, Instant::now());
        self.run_layer(model, caches)?;
        observer.layer(layer, self.rows(), began);
        Ok(())
    }

    fn rows(&self) -> usize {
        self.parts.iter().flat_map(|part| &part.rows.groups).map(|group| group.rows.len()).sum()
    }

    fn run_layer(&mut self, model: &Decoder, caches: &mut [&mut SequenceCache]) -> Result<(), ModelError> {
        if let Some(step) = self.step.take() {
            let inputs = step.inputs();
            if let Some(result) = model.run_recorded(&inputs, caches, self.most)? {
                (self.recorded, self.next_layer) = (Some(result), model.layers());
                return Ok(());
            }
            *self = Self { most: self.most, ..Self::begin(model, &inputs)? };
        }
        let layer = self.next_layer;
        let positions_fit = self.parts.iter().all(|part| {
            let mut groups = part.rows.groups.iter().zip(&part.inputs);
            groups.all(|(group, &member)| {
                caches.get(member).is_some_and(|cache| group.position == cache.position())
            })
        });
        if layer >= model.layers() || caches.len() != self.heads.len() || !positions_fit {
            return Err(ModelError::Step { layer, layers: model.layers() });
        }
        if layer == 0 {
            let groups = self.parts.iter().flat_map(|part| &part.rows.groups);
            for (group, cache) in groups.zip(&mut *caches) {
                cache.reserve(group.rows.len())?;
            }
        }
        if model.split() == Some(layer) {
            self.store_hidden_states(model, caches);
            self.split_by_head(model);
        }
        for part in &mut self.parts {
            let block = match &part.head {
                Some(head) => head.block(layer, model)?,
                None => Some(model.block(layer)?),
            };
            // A head without layers waits for the others.
            let Some(block) = block else { continue };
            let mut inputs = part.inputs.iter().peekable();
            let caches = caches.iter_mut().enumerate().filter_map(|(index, cache)| {
                inputs.next_if(|member| **member == index).map(|_| cache.layer(layer))
            });
            part.hidden = block.forward(part.hidden.clone(), &part.rows, caches)?;
        }
        self.next_layer += 1;
        if self.next_layer == model.layers() {
            for cache in caches {
                cache.advance();
            }
        }
        Ok(())
    }

    /// Skips the next layer: its contribution to the hidden state is missing from there on, and so are its
    /// keys and values. For measuring what a layer contributes.
    pub fn skip(&mut self, model: &Decoder) {
        self.next_layer = (self.next_layer + 1).min(model.layers());
    }

    /// Stores the hidden states that heads are replayed from, in caches that have room for them.
    fn store_hidden_states(&self, model: &Decoder, caches: &mut [&mut SequenceCache]) {
        for part in &self.parts {
            for (group, &member) in part.rows.groups.iter().zip(&part.inputs) {
                if let Some(layer) = model.states_layer(caches[member].pool().layout()) {
                    let states = part.hidden.clone().narrow(0, group.rows.start, group.rows.len());
                    caches[member].store_hidden_states(layer, states);
                }
            }
        }
    }

    /// Splits the inputs by head.
    fn split_by_head(&mut self, model: &Decoder) {
        let same = |one: &Option<Arc<Head>>, other: &Option<Arc<Head>>| match (one, other) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (None, None) => true,
            _ => false,
        };
        let mut parts: Vec<(Option<Arc<Head>>, Vec<usize>)> = Vec::new();
        for (member, head) in self.heads.iter().enumerate() {
            match parts.iter_mut().find(|(other, _)| same(head, other)) {
                Some((_, inputs)) => inputs.push(member),
                None => parts.push((head.clone(), vec![member])),
            }
        }
        if let ([(head, _)], [part]) = (&parts[..], &mut self.parts[..]) {
            part.head = head.clone();
            return;
        }
        let all = self.parts.remove(0);
        let part = |(head, inputs): (Option<Arc<Head>>, Vec<usize>)| {
            let groups = inputs.iter().map(|&member| &all.rows.groups[member]);
            let rows: Vec<u32> =
                groups.flat_map(|group| group.rows.start as u32..group.rows.end as u32).collect();
            HeadGroup {
                rows: all.rows.some(&inputs, model.config(), model.device()),
                hidden: all.hidden.clone().select(0, indices(&rows, model.device())),
                inputs,
                head,
            }
        };
        self.parts = parts.into_iter().map(part).collect();
    }

    /// Applies final norm and unembedding: `[wanted rows, vocab_size]`.
    pub fn logits(mut self, model: &Decoder, wanted: LogitRows) -> Result<Tensor<2>, ModelError> {
        let Some(observer) = self.observer.take() else { return self.unembedded(model, wanted) };
        let began = Instant::now();
        let logits = self.unembedded(model, wanted)?;
        observer.logits(logits.dims()[0], began);
        Ok(logits)
    }

    /// Final norm and unembedding of the last `counts` rows of each input: `[all counts, vocab_size]`. Where a count is 0,
    /// the input has no logits.
    pub fn last_logits(mut self, model: &Decoder, counts: &[usize]) -> Result<Tensor<2>, ModelError> {
        let Some(observer) = self.observer.take() else { return self.unembedded_last(model, counts) };
        let began = Instant::now();
        let logits = self.unembedded_last(model, counts)?;
        observer.logits(logits.dims()[0], began);
        Ok(logits)
    }

    /// Returns the likeliest tokens after the last token of each input of which `wanted` says so, likeliest first, as many as
    /// the pass [was begun for](Self::with_likeliest) at most. Accelerators find them themselves, so that logits are not read.
    pub fn likeliest(mut self, model: &Decoder, wanted: &[bool]) -> Result<Vec<Vec<Scored>>, ModelError> {
        if let Some(StepResult::Likeliest(all)) = self.recorded {
            let wanted = all.into_iter().zip(wanted).filter(|(_, wanted)| **wanted);
            return Ok(wanted.map(|(likeliest, _)| likeliest).collect());
        }
        let most = self.most.unwrap_or(1);
        let counts: Vec<usize> = wanted.iter().map(|wanted| usize::from(*wanted)).collect();
        let (observer, began) = (self.observer.take(), Instant::now());
        let logits = self.unembedded_last(model, &counts)?;
        if let Some(observer) = observer {
            observer.logits(logits.dims()[0], began);
        }
        if let Some(likeliest) = likeliest(logits.clone(), most) {
            return Ok(likeliest.read(most)?);
        }
        let [rows, vocab] = logits.dims();
        let logits = logits
            .try_into_vec_as::<f32>()
            .map_err(|error| ModelError::Readback { reason: error.to_string() })?;
        transfers::count_read(rows * vocab * size_of::<f32>());
        Ok(logits.chunks(vocab).map(|logits| reference(logits, most)).collect())
    }

    fn unembedded_last(self, model: &Decoder, counts: &[usize]) -> Result<Tensor<2>, ModelError> {
        if let Some(result) = self.recorded {
            let logits = result.logits()?;
            let wanted: Vec<u32> =
                (0..).zip(counts).filter(|(_, count)| **count > 0).map(|(row, _)| row).collect();
            return match wanted.len() {
                0 => Err(ModelError::NoTokens),
                count if count == logits.dims()[0] => Ok(logits),
                _ => Ok(logits.select(0, indices(&wanted, model.device()))),
            };
        }
        let mut of_members: Vec<(usize, Tensor<2>)> = Vec::with_capacity(self.heads.len());
        let alone = self.parts.len() == 1;
        for HeadGroup { inputs, rows, hidden, head } in self.parts {
            let counts = inputs.iter().map(|input| counts.get(*input).copied().unwrap_or_default());
            let groups = rows.groups.iter().zip(counts);
            let wanted: Vec<Range<usize>> = groups
                .map(|(group, count)| group.rows.end - count.min(group.rows.len())..group.rows.end)
                .collect();
            let indexes: Vec<u32> =
                wanted.iter().flat_map(|rows| rows.start as u32..rows.end as u32).collect();
            if indexes.is_empty() {
                continue;
            }
            let all = indexes.len() == hidden.dims()[0];
            let hidden = if all { hidden } else { hidden.select(0, indices(&indexes, model.device())) };
            let logits = unembed(model, head.as_deref(), hidden)?;
            if alone {
                return Ok(logits);
            }
            let mut at = 0;
            for (member, rows) in inputs.into_iter().zip(wanted).filter(|(_, rows)| !rows.is_empty()) {
                of_members.push((member, logits.clone().narrow(0, at, rows.len())));
                at += rows.len();
            }
        }
        if of_members.is_empty() {
            return Err(ModelError::NoTokens);
        }
        of_members.sort_by_key(|(member, _)| *member);
        Ok(Tensor::cat(of_members.into_iter().map(|(_, logits)| logits).collect(), 0))
    }

    fn unembedded(self, model: &Decoder, wanted: LogitRows) -> Result<Tensor<2>, ModelError> {
        if let Some(result) = self.recorded {
            return result.logits();
        }
        let mut of_members: Vec<(usize, Tensor<2>)> = Vec::with_capacity(self.heads.len());
        let alone = self.parts.len() == 1;
        for HeadGroup { inputs, rows, hidden, head } in self.parts {
            let hidden = match wanted {
                LogitRows::All => hidden,
                LogitRows::Last if rows.groups.iter().all(|group| group.rows.len() == 1) => hidden,
                LogitRows::Last => {
                    let ends = rows.groups.iter().filter(|group| !group.rows.is_empty());
                    let last: Vec<u32> = ends.map(|group| group.rows.end as u32 - 1).collect();
                    hidden.select(0, indices(&last, model.device()))
                }
            };
            let logits = unembed(model, head.as_deref(), hidden)?;
            if alone {
                return Ok(logits);
            }
            let mut at = 0;
            for (member, group) in inputs.into_iter().zip(&rows.groups) {
                let count = if wanted == LogitRows::All { group.rows.len() } else { 1 };
                of_members.push((member, logits.clone().narrow(0, at, count)));
                at += count;
            }
        }
        of_members.sort_by_key(|(member, _)| *member);
        Ok(Tensor::cat(of_members.into_iter().map(|(_, logits)| logits).collect(), 0))
    }
}

/// Applies the final norm and the unembedding of a head, or the decoder's own: `[rows, vocab_size]`.
pub(crate) fn unembed(
    model: &Decoder,
    head: Option<&Head>,
    hidden: Tensor<2>,
) -> Result<Tensor<2>, ModelError> {
    let hidden = match head {
        Some(head) => head.completed(hidden),
        None => model.normalize(hidden),
    };
    let logits = match head.and_then(Head::unembedding) {
        Some(own) => own.multiply(hidden),
        None => model.unembed(&hidden)?,
    };
    Ok(model.config().capped(logits))
}
