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
