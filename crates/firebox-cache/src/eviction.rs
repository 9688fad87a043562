//! Eviction policies: which tokens leave a full cache, and what happens to the rest.

use std::fmt::Debug;
use std::ops::Range;

use crate::error::CacheError;
use crate::turn::{Turn, TurnKind};

/// What happens to the remaining tokens after an eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterEviction {
    /// They keep their positions.
    KeepPositions,
    /// Later tokens move up: their keys are rotated to the positions that became free.
    CompactPositions,
    /// They are computed again, as if the evicted tokens had never been there.
    Recompute,
}

/// Tokens to evict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Eviction {
    /// Disjoint ranges in order, counted from the first token in the cache.
    pub tokens: Vec<Range<usize>>,
    /// What happens to the remaining tokens.
    pub after: AfterEviction,
}

/// Chooses the tokens to evict when a sequence needs room.
pub trait EvictionPolicy: Debug + Send + Sync {
    /// Chooses what to evict so that `needed` more tokens fit at the end of the last turn, where all turns together,
    /// facts excluded, may have `capacity` tokens. Evicts nothing where they fit already.
    ///
    /// `turns` are all turns in the cache in order, facts included; the last one needs the room.
    fn make_room(&self, turns: &[Turn], capacity: usize, needed: usize) -> Result<Eviction, CacheError>;
}

/// Evicts the oldest turns as a whole. Pinned turns and the last one stay; if that leaves too little room, the result is
/// an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WholeTurns {
    /// What happens to the remaining tokens.
    pub after: AfterEviction,
}

/// Evicts the oldest turns as a whole until half the capacity is free, and recomputes the rest, so that no remaining
/// token has attended to an evicted one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlidingWindow;

/// Keeps the first tokens, the attention sinks, and the latest ones, whatever turns they belong to; the remaining
/// positions are compacted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionSinks {
    /// The number of first tokens that stay.
    pub first: usize,
}

/// Keeps the latest tokens, whatever turns they belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Truncation;

impl EvictionPolicy for WholeTurns {
    fn make_room(&self, turns: &[Turn], capacity: usize, needed: usize) -> Result<Eviction, CacheError> {
        let tokens = oldest_turns(turns, capacity, needed, capacity)?;
        Ok(Eviction { tokens, after: self.after })
    }
}

impl EvictionPolicy for SlidingWindow {
    fn make_room(&self, turns: &[Turn], capacity: usize, needed: usize) -> Result<Eviction, CacheError> {
        let tokens = oldest_turns(turns, capacity, needed, capacity / 2)?;
        Ok(Eviction { tokens, after: AfterEviction::Recompute })
    }
}

impl EvictionPolicy for AttentionSinks {
    fn make_room(&self, turns: &[Turn], capacity: usize, needed: usize) -> Result<Eviction, CacheError> {
        let tokens = excess_tokens(turns, self.first, capacity, needed)?;
        Ok(Eviction { tokens, after: AfterEviction::CompactPositions })
    }
}

impl EvictionPolicy for Truncation {
    fn make_room(&self, turns: &[Turn], capacity: usize, needed: usize) -> Result<Eviction, CacheError> {
        let tokens = excess_tokens(turns, 0, capacity, needed)?;
        Ok(Eviction { tokens, after: AfterEviction::KeepPositions })
    }
}

/// Turns that are not facts, each with its token range.
fn conversation_turns(turns: &[Turn]) -> impl Iterator<Item = (&Turn, Range<usize>)> {
    let starts = turns.iter().scan(0, |next, turn| {
        let start = *next;
        *next += turn.tokens;
        Some((turn, start..*next))
    });
    starts.filter(|(turn, _)| turn.kind == TurnKind::Turn)
}

/// Chooses whole turns, oldest first. Returns none while all fit `capacity`; otherwise continues until they fit `target`,
/// or as close to it as evictable turns allow.
fn oldest_turns(
    turns: &[Turn],
    capacity: usize,
    needed: usize,
    target: usize,
) -> Result<Vec<Range<usize>>, CacheError> {
    let mut held: usize = conversation_turns(turns).map(|(turn, _)| turn.tokens).sum();
    if held + needed <= capacity {
        return Ok(Vec::new());
    }
    let last = turns.last().map(|turn| turn.id);
    let mut evicted = Vec::new();
    for (turn, tokens) in conversation_turns(turns) {
        if held + needed <= target {
            break;
        }
        if !turn.pinned && Some(turn.id) != last && turn.tokens > 0 {
            held -= turn.tokens;
            evicted.push(tokens);
        }
    }
    if held + needed <= capacity {
        return Ok(evicted);
    }
    let own = turns.last().filter(|turn| turn.kind == TurnKind::Turn).map_or(0, |turn| turn.tokens);
    Err(CacheError::TurnTooLong { tokens: own + needed, room: capacity.saturating_sub(held - own), capacity })
}

/// Chooses as many tokens as exceed the capacity, from the `first` on. Facts and pinned turns stay.
fn excess_tokens(
    turns: &[Turn],
    first: usize,
    capacity: usize,
    needed: usize,
) -> Result<Vec<Range<usize>>, CacheError> {
    let held: usize = conversation_turns(turns).map(|(turn, _)| turn.tokens).sum();
    let mut excess = (held + needed).saturating_sub(capacity);
    let (mut evicted, mut kept) = (Vec::new(), 0);
    for (turn, tokens) in conversation_turns(turns) {
        let spared = (first - kept).min(tokens.len());
        kept += spared;
        let taken = if turn.pinned { 0 } else { excess.min(tokens.len() - spared) };
        if taken > 0 {
            evicted.push(tokens.start + spared..tokens.start + spared + taken);
            excess -= taken;
        }
    }
    if excess == 0 {
        return Ok(evicted);
    }
    // Earlier tokens of the last turn may be evicted as well, so only `needed` has to fit.
    Err(CacheError::TurnTooLong { tokens: needed, room: needed.saturating_sub(excess), capacity })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::turn::TurnId;

    fn turns(lengths: &[usize]) -> Vec<Turn> {
        lengths
            .iter()
            .enumerate()
            .map(|(id, &tokens)| Turn { tokens, ..Turn::new(TurnId(id as u64), TurnKind::Turn, Vec::new()) })
            .collect()
    }

    /// Starts and ends of the evicted ranges.
    fn room(policy: &dyn EvictionPolicy, turns: &[Turn], needed: usize) -> Vec<[usize; 2]> {
        let evicted = policy.make_room(turns, 100, needed).unwrap().tokens;
        evicted.into_iter().map(|tokens| [tokens.start, tokens.end]).collect()
    }

    const STAYING: WholeTurns = WholeTurns { after: AfterEviction::KeepPositions };

    #[test]
    fn the_oldest_turns_go_as_a_whole() {
        assert!(room(&STAYING, &turns(&[40, 30, 20]), 10).is_empty());
        assert_eq!(room(&STAYING, &turns(&[40, 30, 20]), 11), [[0, 40]]);
        assert_eq!(room(&STAYING, &turns(&[40, 30, 20]), 60), [[0, 40], [40, 70]]);
    }

    #[test]
    fn pinned_turns_and_facts_stay() {
        let mut all = turns(&[30, 20, 25, 25]);
        all[0].kind = TurnKind::Fact;
        all[1].pinned = true;
        assert_eq!(room(&STAYING, &all, 40), [[50, 75]]);
        let error = STAYING.make_room(&all, 100, 60).unwrap_err();
        assert_eq!(error, CacheError::TurnTooLong { tokens: 85, room: 80, capacity: 100 });
    }

    #[test]
    fn a_turn_longer_than_the_capacity_is_refused() {
        for policy in [&STAYING as &dyn EvictionPolicy, &SlidingWindow] {
            let error = policy.make_room(&turns(&[10, 0]), 100, 101).unwrap_err();
            assert_eq!(error, CacheError::TurnTooLong { tokens: 101, room: 100, capacity: 100 });
        }
    }

    #[test]
    fn a_window_slides_by_half_its_capacity() {
        assert_eq!(room(&SlidingWindow, &turns(&[30, 30, 30, 5]), 6), [[0, 30], [30, 60]]);
        assert!(room(&SlidingWindow, &turns(&[30, 30, 30]), 10).is_empty());
    }

    #[test]
    fn sinks_stay() {
        assert_eq!(room(&AttentionSinks { first: 4 }, &turns(&[2, 50, 40]), 20), [[4, 16]]);
        assert_eq!(room(&Truncation, &turns(&[2, 50, 40]), 20), [[0, 2], [2, 12]]);
        let too_long = |room| Err(CacheError::TurnTooLong { tokens: 101, room, capacity: 100 });
        assert_eq!(Truncation.make_room(&turns(&[2, 50]), 100, 101), too_long(100));
        assert_eq!(AttentionSinks { first: 4 }.make_room(&turns(&[2, 50]), 100, 101), too_long(96));
        let mut pinned = turns(&[130, 50]);
        pinned[0].pinned = true;
        assert_eq!(Truncation.make_room(&pinned, 100, 101), too_long(0));
    }

    /// Facts do not count towards the capacity of turns.
    #[test]
    fn a_fact_may_be_last() {
        let mut all = turns(&[40, 30, 90]);
        all[2].kind = TurnKind::Fact;
        assert_eq!(room(&STAYING, &all, 50), [[0, 40]]);
        let error = STAYING.make_room(&all, 100, 101).unwrap_err();
        assert_eq!(error, CacheError::TurnTooLong { tokens: 101, room: 100, capacity: 100 });
    }
}
