//! Outlines: a sequence's structure without its numbers, to save it and to restore it.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::DType;
use firebox_kernels::attention::KvTensor;

use super::{Entry, SequenceCache};
use crate::error::CacheError;
use crate::kv_run::{KvRun, MappedKv, Source};
use crate::layer_kv::LayerKv;
use crate::layout::{KvType, LayerLayout, Layout};
use crate::page_buffers::PAGE_TOKENS;
use crate::pool::PagePool;
use crate::recurrent_state::RecurrentState;
use crate::turn::Turn;

/// A bound on positions and slots that rules out overflow in their arithmetic.
const MAX_POSITION: usize = u32::MAX as usize;

/// The structure of a sequence without its tensors. Together with the keys, values and recurrent states it suffices to
/// restore the sequence elsewhere.
#[derive(Debug, Clone, PartialEq)]
pub struct Outline {
    /// The slots it attends to, in order.
    pub slot_ranges: Vec<SlotRange>,
    /// Its turns, in order.
    pub turns: Vec<Turn>,
    /// The position of the next token.
    pub position: usize,
    /// The id of the next turn.
    pub next_turn: u64,
}

/// Slots of consecutive positions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotRange {
    /// The slots.
    pub slots: Range<usize>,
    /// The position of the first slot.
    pub position: usize,
}

impl Outline {
    /// The number of slots that the tensors need, in blocks of [`PAGE_TOKENS`], up to the last one used.
    pub fn slots(&self) -> usize {
        self.slot_ranges.last().map_or(0, |range| range.slots.end)
    }

    /// The number of tokens.
    pub fn tokens(&self) -> usize {
        self.slot_ranges.iter().map(|range| range.slots.len()).sum()
    }

    /// Checks that it describes a valid sequence over these keys and values.
    fn check(&self, layout: &Layout, mapped: &MappedKv) -> Result<(), CacheError> {
        let mismatch = |reason: String| Err(CacheError::Mismatch { reason });
        let (mut slot, mut position) = (0, 0);
        for SlotRange { slots, position: first } in &self.slot_ranges {
            if slots.start < slot || slots.end <= slots.start || slots.end > MAX_POSITION {
                return mismatch(format!("slots {slots:?} after {slot}"));
            }
            if *first < position || *first > MAX_POSITION {
                return mismatch(format!("position {first} after {position}"));
            }
            (slot, position) = (slots.end, first + slots.len());
        }
        if self.position < position || self.position > MAX_POSITION {
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
            return mismatch(format!(
                "the turns have {of_turns} tokens, and the slot ranges {}",
                self.tokens()
            ));
        }
        if self.next_turn == u64::MAX {
            return mismatch("no turn could come after".into());
        }
        if slot == 0 { Ok(()) } else { mapped.check(layout, slot) }
    }
}

impl MappedKv {
    /// Checks that the first `slots` have the shapes and types of this layout.
    fn check(&self, layout: &Layout, slots: usize) -> Result<(), CacheError> {
        let mismatch = |reason: String| Err(CacheError::Mismatch { reason });
        if self.layers.len() != layout.layers.len() {
            return mismatch(format!("{} layers instead of {}", self.layers.len(), layout.layers.len()));
        }
        for (index, (sides, layer)) in self.layers.iter().zip(&layout.layers).enumerate() {
            let fits = match (sides, *layer) {
                (None, LayerLayout::Shared { .. } | LayerLayout::Recurrent) => true,
                (
                    Some(LayerKv::Attention { keys, values }),
                    LayerLayout::Attention { kv_heads, head_dim },
                ) => {
                    [keys, values].iter().all(|side| fits(side, layout.kv_dtype, [kv_heads, slots, head_dim]))
                }
                (Some(LayerKv::Latents(rows)), LayerLayout::Latents { width }) => {
                    fits(rows, layout.kv_dtype, [1, slots, width])
                }
                (Some(LayerKv::HiddenStates(states)), LayerLayout::HiddenStates { width }) => {
                    fits(states, KvType::F32, [1, slots, width])
                }
                _ => false,
            };
            if !fits {
                return mismatch(format!("layer {index} is not {layer:?} in {:?}", layout.kv_dtype));
            }
        }
        Ok(())
    }
}

fn fits(side: &KvTensor, kv_dtype: KvType, [kv_heads, slots, head_dim]: [usize; 3]) -> bool {
    let has = |dims: [usize; 3], width| dims[0] == kv_heads && dims[1] >= slots && dims[2] == width;
    match (side, kv_dtype) {
        (KvTensor::Float(numbers), KvType::F32) => {
            numbers.dtype() == DType::F32 && has(numbers.dims(), head_dim)
        }
        (KvTensor::Float(numbers), KvType::F16) => {
            numbers.dtype() == DType::F16 && has(numbers.dims(), head_dim)
        }
        (KvTensor::Bytes { words, scales }, KvType::Int8) => {
            let [heads, positions, _] = words.dims();
            has(words.dims(), head_dim.div_ceil(4)) && scales.dims() == [heads, positions]
        }
        _ => false,
    }
}

impl SequenceCache {
    /// Returns its structure. Slots are numbered in blocks: tokens of one page get slots of one block, at the same places;
    /// slots of evicted tokens are skipped.
    pub fn outline(&self) -> Outline {
        let mut slot_ranges = Vec::with_capacity(self.runs.len());
        let (mut before, mut block): (Option<&KvRun>, usize) = (None, 0);
        let mut left = self.len;
        for run in self.runs.iter() {
            // A pass that was not completed may have reserved slots behind the last tokens.
            let len = run.len().min(left);
            left -= len;
            if len == 0 {
                break;
            }
            let within = run.slots.start % PAGE_TOKENS;
            let together =
                before.is_some_and(|before| before.lies_with(run) && before.slots.end <= run.slots.start);
            if let (Some(before), false) = (before, together) {
                block += (before.slots.start % PAGE_TOKENS + before.len()).div_ceil(PAGE_TOKENS);
            }
            let first = block * PAGE_TOKENS + within;
            slot_ranges.push(SlotRange { slots: first..first + len, position: run.position });
            before = Some(run);
        }
        let turns = self.turns().cloned().collect();
        Outline { slot_ranges, turns, position: self.position, next_turn: self.next_turn }
    }

    /// Restores a sequence from its outline, its keys and values, and its recurrent states by layer. With recurrent layers it
    /// cannot be rewound to earlier turns, because only the latest states are known.
    pub fn from_outline(
        pool: &PagePool,
        outline: &Outline,
        mapped: &Arc<MappedKv>,
        states: Vec<Option<RecurrentState>>,
    ) -> Result<Self, CacheError> {
        let layout = pool.layout();
        outline.check(layout, mapped)?;
        let recurrent = layout.layers.iter().map(|layer| *layer == LayerLayout::Recurrent);
        if !recurrent.eq(states.iter().map(Option::is_some)) {
            return Err(CacheError::Mismatch { reason: "other layers have a recurrent state".into() });
        }
        let runs = outline.slot_ranges.iter().map(|SlotRange { slots, position }| {
            KvRun::new(Source::Mapped(mapped.clone()), slots.clone(), *position)
        });
        let turns = outline.turns.iter().map(|turn| Entry { turn: turn.clone(), before: None });
        let mut sequence = Self {
            runs: Arc::new(runs.collect()),
            turns: Arc::new(turns.collect()),
            states,
            len: outline.tokens(),
            position: outline.position,
            next_turn: outline.next_turn,
            // The file does not tell what else the tokens had attended to.
            pristine: 0,
            states_tainted: true,
            ..Self::new(pool)
        };
        sequence.refresh_visibility();
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

    /// The position and keys of every span.
    fn spans(sequence: &mut SequenceCache) -> Vec<(usize, Vec<f32>)> {
        let position = sequence.position();
        let LayerCache::Attention(cache) = sequence.layer(0) else { unreachable!("it has one layer") };
        let spans = cache.spans(position, None).into_iter().map(|span| {
            let keys = span.keys.dequantize(2).try_into_vec_as::<f32>().unwrap();
            (span.position, keys)
        });
        spans.collect()
    }

    /// The same operations on a restored sequence and on the original give the same spans.
    #[test]
    fn a_restored_sequence_has_the_spans_of_the_original() {
        let layers = vec![LayerLayout::Attention { kv_heads: 1, head_dim: 2 }];
        let pool = PagePool::new(Layout { layers, kv_dtype: KvType::F32, device: Device::flex() });
        let paged = |last: usize| {
            let mut paged = SequenceCache::new(&pool);
            for (number, count) in [20, 10, 20, last].into_iter().enumerate() {
                paged.begin_turn(TurnKind::Turn, Vec::new());
                feed(&mut paged, count, number as f32);
            }
            paged.evict(20..30);
            paged
        };
        let restored = |paged: &SequenceCache| {
            let side = || {
                let pages = paged.runs.chunk_by(KvRun::lies_with).map(|together| {
                    let last = &together[together.len() - 1];
                    match (KvRun { slots: 0..last.slots.end, ..last.clone() }).read(0) {
                        Some(LayerKv::Attention { keys: KvTensor::Float(keys), .. }) => keys,
                        other => panic!("{other:?}"),
                    }
                });
                KvTensor::Float(Tensor::cat(pages.collect(), 1))
            };
            let held = LayerKv::Attention { keys: side(), values: side() };
            let mapped = Arc::new(MappedKv { layers: vec![Some(held)] });
            SequenceCache::from_outline(&pool, &paged.outline(), &mapped, vec![None]).unwrap()
        };
        let acts: [fn(&mut SequenceCache); 5] = [
            |_| {},
            |sequence| sequence.compact_positions(|_, keys, back| keys.add_scalar(back as f32)).unwrap(),
            |sequence| drop(sequence.begin_replay(0, 100).unwrap()),
            |sequence| {
                feed(sequence, 3, 7.0);
                sequence.evict(0..20);
                sequence.compact_positions(|_, keys, back| keys.add_scalar(back as f32)).unwrap();
            },
            // The rest stays in place, with slots behind it that the clone still uses.
            |sequence| {
                sequence.evict(20..sequence.len());
                sequence.compact_positions(|_, keys, back| keys.add_scalar(back as f32)).unwrap();
            },
        ];
        // The last block ends within the page, before its end, and beyond it.
        for last in [78, 40, 120] {
            for (at, act) in acts.into_iter().enumerate() {
                // A clone shares the pages, as during the generation of an answer.
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
