use std::fmt::Debug;
use std::ops::Range;

use crate::error::CacheError;
use crate::turn::{Turn, TurnKind};

/// What becomes of the rest once something was forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Afterwards {
    /// Everything stays at its position.
    Stay,
    /// What comes behind moves up: its keys are rotated to the positions that became free.
    CloseUp,
    /// What is left is computed again, as if nothing else had ever been said.
    Encode,
}

/// What to forget.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forgetting {
    /// Tokens, counted from the first that is remembered; in order, none twice.
    pub tokens: Vec<Range<usize>>,
    /// What becomes of the rest.
    pub afterwards: Afterwards,
}

/// Decides what is forgotten when there is no room.
pub trait EvictionPolicy: Debug + Send + Sync {
    /// Makes room for `needed` more tokens at the end of the last turn, where the tokens of all turns, facts apart,
    /// are to be `capacity` at most. Nothing needs to be forgotten where they fit.
    ///
    /// `turns` are all that are remembered, facts among them, in order; the last is the one that needs room.
    fn make_room(&self, turns: &[Turn], capacity: usize, needed: usize) -> Result<Forgetting, CacheError>;
}

/// Forgets the oldest turns as a whole. Pinned turns and the last one stay; where that leaves no room, the last turn
/// is too long, and that is an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WholeTurns {
    /// What becomes of the rest.
    pub afterwards: Afterwards,
}

/// Forgets the oldest turns as a whole until half the capacity is free, and computes the rest again, so that nothing
/// in it has seen what was forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlidingWindow;

/// Keeps the first tokens, on which much attention rests that has nowhere else to go, and the last ones, whatever
/// turns they are of; what is left closes up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionSinks {
    /// How many of the first tokens stay.
    pub first: usize,
}

/// Keeps the last tokens, whatever turns they are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Truncation;

impl EvictionPolicy for WholeTurns {
    fn make_room(&self, turns: &[Turn], capacity: usize, needed: usize) -> Result<Forgetting, CacheError> {
        let tokens = oldest(turns, capacity, needed, capacity)?;
        Ok(Forgetting { tokens, afterwards: self.afterwards })
    }
}

impl EvictionPolicy for SlidingWindow {
    fn make_room(&self, turns: &[Turn], capacity: usize, needed: usize) -> Result<Forgetting, CacheError> {
        let tokens = oldest(turns, capacity, needed, capacity / 2)?;
        Ok(Forgetting { tokens, afterwards: Afterwards::Encode })
    }
}

impl EvictionPolicy for AttentionSinks {
    fn make_room(&self, turns: &[Turn], capacity: usize, needed: usize) -> Result<Forgetting, CacheError> {
        let tokens = tokens_after(turns, self.first, capacity, needed)?;
        Ok(Forgetting { tokens, afterwards: Afterwards::CloseUp })
    }
}

impl EvictionPolicy for Truncation {
    fn make_room(&self, turns: &[Turn], capacity: usize, needed: usize) -> Result<Forgetting, CacheError> {
        let tokens = tokens_after(turns, 0, capacity, needed)?;
        Ok(Forgetting { tokens, afterwards: Afterwards::Stay })
    }
}

/// Turns that are no facts, each with its tokens.
fn spoken(turns: &[Turn]) -> impl Iterator<Item = (&Turn, Range<usize>)> {
    let starts = turns.iter().scan(0, |next, turn| {
        let start = *next;
        *next += turn.tokens;
        Some((turn, start..*next))
    });
    starts.filter(|(turn, _)| turn.kind == TurnKind::Turn)
}

/// Whole turns, oldest first. Forgets nothing while all fit `capacity`; once they do not, goes on until they fit
/// `target`, or as near as turns that may be forgotten bring it.
fn oldest(
    turns: &[Turn],
    capacity: usize,
    needed: usize,
    target: usize,
) -> Result<Vec<Range<usize>>, CacheError> {
    let mut held: usize = spoken(turns).map(|(turn, _)| turn.tokens).sum();
    if held + needed <= capacity {
        return Ok(Vec::new());
    }
    let last = turns.last().map(|turn| turn.id);
    let mut forgotten = Vec::new();
    for (turn, tokens) in spoken(turns) {
        if held + needed <= target {
            break;
        }
        if !turn.pinned && Some(turn.id) != last && turn.tokens > 0 {
            held -= turn.tokens;
            forgotten.push(tokens);
        }
    }
    if held + needed <= capacity {
        return Ok(forgotten);
    }
    let own = turns.last().filter(|turn| turn.kind == TurnKind::Turn).map_or(0, |turn| turn.tokens);
    Err(CacheError::TurnTooLong { tokens: own + needed, room: capacity.saturating_sub(held - own), capacity })
}

/// As many tokens as are too many, from the `first` on. Facts and pinned turns stay.
fn tokens_after(
    turns: &[Turn],
    first: usize,
    capacity: usize,
    needed: usize,
) -> Result<Vec<Range<usize>>, CacheError> {
    let held: usize = spoken(turns).map(|(turn, _)| turn.tokens).sum();
    let mut excess = (held + needed).saturating_sub(capacity);
    let (mut forgotten, mut kept) = (Vec::new(), 0);
    for (turn, tokens) in spoken(turns) {
        let spared = (first - kept).min(tokens.len());
        kept += spared;
        let taken = if turn.pinned { 0 } else { excess.min(tokens.len() - spared) };
        if taken > 0 {
            forgotten.push(tokens.start + spared..tokens.start + spared + taken);
            excess -= taken;
        }
    }
    if excess == 0 {
        return Ok(forgotten);
    }
    // What the last turn has already may go as well, so that only what is needed has to fit.
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

    /// Firsts and ends of what goes.
    fn room(policy: &dyn EvictionPolicy, turns: &[Turn], needed: usize) -> Vec<[usize; 2]> {
        let forgotten = policy.make_room(turns, 100, needed).unwrap().tokens;
        forgotten.into_iter().map(|tokens| [tokens.start, tokens.end]).collect()
    }

    const STAYING: WholeTurns = WholeTurns { afterwards: Afterwards::Stay };

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

    /// A fact takes no room of the turns.
    #[test]
    fn a_fact_may_be_last() {
        let mut all = turns(&[40, 30, 90]);
        all[2].kind = TurnKind::Fact;
        assert_eq!(room(&STAYING, &all, 50), [[0, 40]]);
        let error = STAYING.make_room(&all, 100, 101).unwrap_err();
        assert_eq!(error, CacheError::TurnTooLong { tokens: 101, room: 100, capacity: 100 });
    }
}
