use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::DType;
use firebox_kernels::attend::Stored;

use super::{Entry, SequenceCache};
use crate::error::CacheError;
use crate::layout::{KvType, LayerLayout, Layout};
use crate::page::PAGE;
use crate::pool::Pool;
use crate::recurrent::RecurrentState;
use crate::remembered::Remembered;
use crate::run::{Mapped, Run, Source};
use crate::turn::Turn;

/// Beyond any position there is, so that reckoning with positions cannot overflow.
const MOST: usize = u32::MAX as usize;

/// What a sequence remembers, but for numbers: together with its keys, its values and its recurrent states enough to
/// go on elsewhere as if nothing had happened.
#[derive(Debug, Clone, PartialEq)]
pub struct Outline {
    /// Which slots it sees, in order.
    pub stretches: Vec<Stretch>,
    /// Its turns, in order.
    pub turns: Vec<Turn>,
    /// The position of the next token.
    pub position: usize,
    /// What the next turn is called.
    pub next_turn: u64,
}

/// Slots of consecutive positions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stretch {
    /// Which ones.
    pub slots: Range<usize>,
    /// The position of the first.
    pub position: usize,
}

impl Outline {
    /// How many slots there have to be, in blocks of [`PAGE`] or up to the last that is seen.
    pub fn slots(&self) -> usize {
        self.stretches.last().map_or(0, |stretch| stretch.slots.end)
    }

    /// How many tokens are remembered.
    pub fn tokens(&self) -> usize {
        self.stretches.iter().map(|stretch| stretch.slots.len()).sum()
    }

    /// Whether it can be that of a sequence with these keys and values.
    fn check(&self, layout: &Layout, mapped: &Mapped) -> Result<(), CacheError> {
        let mismatch = |reason: String| Err(CacheError::Mismatch { reason });
        let (mut slot, mut position) = (0, 0);
        for Stretch { slots, position: first } in &self.stretches {
            if slots.start < slot || slots.end <= slots.start || slots.end > MOST {
                return mismatch(format!("slots {slots:?} after {slot}"));
            }
            if *first < position || *first > MOST {
                return mismatch(format!("position {first} after {position}"));
            }
            (slot, position) = (slots.end, first + slots.len());
        }
        if self.position < position || self.position > MOST {
            return mismatch(format!("{} as the next position after {position}", self.position));
        }
        let (mut of_turns, mut ids) = (0usize, HashSet::new());
        for turn in &self.turns {
            of_turns = of_turns.saturating_add(turn.tokens);
            if turn.id.0 >= self.next_turn || !ids.insert(turn.id) {
                return mismatch(format!("turn {}, which is there already or is still to come", turn.id.0));
            }
        }
        if of_turns != self.tokens() {
            return mismatch(format!("{of_turns} tokens of turns, and {} that are kept", self.tokens()));
        }
        if self.next_turn == u64::MAX {
            return mismatch("no turn could come after".into());
        }
        if slot == 0 { Ok(()) } else { mapped.check(layout, slot) }
    }
}

impl Mapped {
    /// Whether a model of this layout could have made the first `slots` of it.
    fn check(&self, layout: &Layout, slots: usize) -> Result<(), CacheError> {
        let mismatch = |reason: String| Err(CacheError::Mismatch { reason });
        if self.layers.len() != layout.layers.len() {
            return mismatch(format!("{} layers instead of {}", self.layers.len(), layout.layers.len()));
        }
        for (index, (sides, layer)) in self.layers.iter().zip(&layout.layers).enumerate() {
            let fits = match (sides, *layer) {
                (None, LayerLayout::Recurrent) => true,
                (
                    Some(Remembered::Attention { keys, values }),
                    LayerLayout::Attention { kv_heads, head_dim },
                ) => [keys, values].iter().all(|side| fits(side, layout.kept, [kv_heads, slots, head_dim])),
                (Some(Remembered::States(states)), LayerLayout::States { width }) => {
                    fits(states, KvType::F32, [1, slots, width])
                }
                _ => false,
            };
            if !fits {
                return mismatch(format!("layer {index} is not {layer:?} in {:?}", layout.kept));
            }
        }
        Ok(())
    }
}

fn fits(side: &Stored, kept: KvType, [kv_heads, slots, head_dim]: [usize; 3]) -> bool {
    let has = |dims: [usize; 3], width| dims[0] == kv_heads && dims[1] >= slots && dims[2] == width;
    match (side, kept) {
        (Stored::Float(numbers), KvType::F32) => {
            numbers.dtype() == DType::F32 && has(numbers.dims(), head_dim)
        }
        (Stored::Float(numbers), KvType::F16) => {
            numbers.dtype() == DType::F16 && has(numbers.dims(), head_dim)
        }
        (Stored::Bytes { words, scales }, KvType::Int8) => {
            let [heads, positions, _] = words.dims();
            has(words.dims(), head_dim.div_ceil(4)) && scales.dims() == [heads, positions]
        }
        _ => false,
    }
}

impl SequenceCache {
    /// What it remembers, but for numbers. Slots are counted in blocks: tokens that lie in one page have those of one
    /// block, at the same places. Where some were forgotten, theirs are nobody's.
    pub fn outline(&self) -> Outline {
        let mut stretches = Vec::with_capacity(self.runs.len());
        let (mut before, mut block): (Option<&Run>, usize) = (None, 0);
        let mut left = self.len;
        for run in self.runs.iter() {
            // A pass that was not completed may have taken room behind what is remembered.
            let len = run.len().min(left);
            left -= len;
            if len == 0 {
                break;
            }
            let within = run.slots.start % PAGE;
            let together =
                before.is_some_and(|before| before.lies_with(run) && before.slots.end <= run.slots.start);
            if let (Some(before), false) = (before, together) {
                block += (before.slots.start % PAGE + before.len()).div_ceil(PAGE);
            }
            let first = block * PAGE + within;
            stretches.push(Stretch { slots: first..first + len, position: run.position });
            before = Some(run);
        }
        let turns = self.turns().cloned().collect();
        Outline { stretches, turns, position: self.position, next_turn: self.next_turn }
    }

    /// A sequence that remembers what another one did: its outline, keys and values, and its recurrent states by
    /// layer. It does not go back into turns where there are recurrent states, because those are the only ones.
    pub fn resume(
        pool: &Pool,
        outline: &Outline,
        mapped: &Arc<Mapped>,
        states: Vec<Option<RecurrentState>>,
    ) -> Result<Self, CacheError> {
        let layout = pool.layout();
        outline.check(layout, mapped)?;
        let recurrent = layout.layers.iter().map(|layer| *layer == LayerLayout::Recurrent);
        if !recurrent.eq(states.iter().map(Option::is_some)) {
            return Err(CacheError::Mismatch { reason: "other layers have a recurrent state".into() });
        }
        let runs = outline.stretches.iter().map(|Stretch { slots, position }| {
            Run::new(Source::Mapped(mapped.clone()), slots.clone(), *position)
        });
        let turns = outline.turns.iter().map(|turn| Entry { turn: turn.clone(), before: None });
        let mut sequence = Self {
            runs: Arc::new(runs.collect()),
            turns: Arc::new(turns.collect()),
            states,
            len: outline.tokens(),
            position: outline.position,
            next_turn: outline.next_turn,
            // No file says what else had been there.
            unaltered: 0,
            mixed: true,
            ..Self::new(pool)
        };
        sequence.cover();
        Ok(sequence)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor};

    use super::*;
    use crate::sequence::LayerCache;
    use crate::turn::TurnKind;

    fn feed(sequence: &mut SequenceCache, count: usize, number: f32) {
        let numbers = || Tensor::full([1, count, 2], number, &Device::flex());
        sequence.reserve(count).unwrap();
        if let LayerCache::Attention(mut cache) = sequence.layer(0) {
            cache.append(numbers(), numbers());
        }
        sequence.advance();
    }

    /// Which spans are read, and what they hold.
    fn spans(sequence: &mut SequenceCache) -> Vec<(usize, Vec<f32>)> {
        let position = sequence.position();
        let LayerCache::Attention(cache) = sequence.layer(0) else { unreachable!("it has one layer") };
        let spans = cache.spans(position, None).into_iter().map(|span| {
            let keys = span.keys.dequantize(2).try_into_vec_as::<f32>().unwrap();
            (span.position, keys)
        });
        spans.collect()
    }

    /// What is done to a sequence that was in a file leaves it as if it had been in pages all the time.
    #[test]
    fn what_was_in_a_file_lies_as_it_would_in_pages() {
        let layers = vec![LayerLayout::Attention { kv_heads: 1, head_dim: 2 }];
        let pool = Pool::new(Layout { layers, kept: KvType::F32, device: Device::flex() });
        let paged = |last: usize| {
            let mut paged = SequenceCache::new(&pool);
            for (number, count) in [20, 10, 20, last].into_iter().enumerate() {
                paged.begin_turn(TurnKind::Turn, Vec::new());
                feed(&mut paged, count, number as f32);
            }
            paged.forget(20..30);
            paged
        };
        let restored = |paged: &SequenceCache| {
            let side = || {
                let pages = paged.runs.chunk_by(Run::lies_with).map(|together| {
                    let last = &together[together.len() - 1];
                    match (Run { slots: 0..last.slots.end, ..last.clone() }).read(0) {
                        Some(Remembered::Attention { keys: Stored::Float(keys), .. }) => keys,
                        other => panic!("{other:?}"),
                    }
                });
                Stored::Float(Tensor::cat(pages.collect(), 1))
            };
            let held = Remembered::Attention { keys: side(), values: side() };
            let mapped = Arc::new(Mapped { layers: vec![Some(held)] });
            SequenceCache::resume(&pool, &paged.outline(), &mapped, vec![None]).unwrap()
        };
        let acts: [fn(&mut SequenceCache); 5] = [
            |_| {},
            |sequence| sequence.close_up(|_, keys, back| keys.add_scalar(back as f32)).unwrap(),
            |sequence| drop(sequence.begin_replay(0, 100).unwrap()),
            |sequence| {
                feed(sequence, 3, 7.0);
                sequence.forget(0..20);
                sequence.close_up(|_, keys, back| keys.add_scalar(back as f32)).unwrap();
            },
            // What is left stays where it is, with slots behind it that others remember.
            |sequence| {
                sequence.forget(20..sequence.len());
                sequence.close_up(|_, keys, back| keys.add_scalar(back as f32)).unwrap();
            },
        ];
        // Up to the end of a page, before it and beyond.
        for last in [78, 40, 120] {
            for (at, act) in acts.into_iter().enumerate() {
                // Others have what it was, as they do while an answer is being made.
                let before = paged(last);
                let (mut one, mut other) = (before.clone(), restored(&before));
                for sequence in [&mut one, &mut other] {
                    act(sequence);
                    feed(sequence, 15, 8.0);
                }
                assert_eq!(spans(&mut other), spans(&mut one), "{last}, {at}");
            }
        }
    }
}
