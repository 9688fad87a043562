//! What a session remembers, turn by turn.

use std::ops::Range;
use std::sync::Arc;

use firebox_cache::{
    Afterwards, CacheError, EvictionPolicy, Forgetting, Hidden, Role, Turn, TurnId, TurnKind,
};

use crate::{RuntimeError, Session};

/// Tokens of facts that a session holds at most, unless told otherwise.
const FACTS: usize = 512;

/// How much a session remembers.
#[derive(Debug, Clone)]
pub(crate) struct Memory {
    /// Tokens that turns have at most, and what goes when there are more; absent where all is remembered.
    turns: Option<(usize, Arc<dyn EvictionPolicy>)>,
    /// Tokens that facts have at most.
    facts: usize,
}

impl Default for Memory {
    fn default() -> Self {
        Self { turns: None, facts: FACTS }
    }
}

impl Session {
    /// The same, holding at most `capacity` tokens of turns, and forgetting by `policy` when there are more.
    pub fn with_turn_capacity(mut self, capacity: usize, policy: impl EvictionPolicy + 'static) -> Self {
        self.memory.turns = Some((capacity, Arc::new(policy)));
        self
    }

    /// The same, holding at most `capacity` tokens of facts.
    pub fn with_fact_capacity(mut self, capacity: usize) -> Self {
        self.memory.facts = capacity;
        self
    }

    /// What is remembered, in order.
    pub fn turns(&self) -> impl ExactSizeIterator<Item = &Turn> {
        self.cache.turns()
    }

    /// Tokens fed from now on belong to a new turn.
    pub fn begin_turn(&mut self, roles: &[Role]) -> Result<TurnId, RuntimeError> {
        self.settle()?;
        Ok(self.cache.begin_turn(TurnKind::Turn, roles.to_vec()))
    }

    /// Keeps a turn when room is needed, or no longer.
    pub fn pin(&mut self, turn: TurnId, pinned: bool) -> Result<(), RuntimeError> {
        Ok(self.cache.pin(turn, pinned)?)
    }

    /// Hides a turn from tokens to come for having little to do with them, or shows it again. What earlier tokens took
    /// in from it stays with them.
    pub fn mask(&mut self, turn: TurnId, masked: bool) -> Result<(), RuntimeError> {
        Ok(self.cache.hide(turn, masked.then_some(Hidden::Irrelevant))?)
    }

    /// Forgets a turn, and lets the rest stay at its positions.
    pub fn forget(&mut self, turn: TurnId) -> Result<(), RuntimeError> {
        let tokens = self.cache.forget_turn(turn)?;
        self.tokens.drain(tokens);
        Ok(())
    }

    /// Adds what is never forgotten to make room.
    pub fn add_fact(&mut self, tokens: &[u32]) -> Result<TurnId, RuntimeError> {
        self.settle()?;
        self.make_room_for_facts(tokens.len())?;
        let fact = self.cache.begin_turn(TurnKind::Fact, vec![Role::System]);
        self.append_all(tokens)?;
        Ok(fact)
    }

    /// Puts a fact in the place of another, which later tokens no longer see.
    pub fn supersede(&mut self, fact: TurnId, tokens: &[u32]) -> Result<TurnId, RuntimeError> {
        self.settle()?;
        self.fact(fact)?;
        let before = self.cache.clone();
        self.cache.hide(fact, Some(Hidden::Superseded))?;
        let added = self.add_fact(tokens);
        if added.is_err() && before.len() == self.cache.len() {
            self.cache = before;
        }
        added
    }

    /// Takes up the positions that forgotten tokens have left.
    pub fn close_up(&mut self) -> Result<(), RuntimeError> {
        let length = self.encoded_length();
        Ok(self.decoder.close_up(&mut self.cache, length)?)
    }

    /// Forgets by policy what `needed` more tokens have no room beside. Returns whether anything was forgotten.
    pub(crate) fn make_room(&mut self, needed: usize) -> Result<bool, RuntimeError> {
        let Some((capacity, policy)) = self.memory.turns.clone() else { return Ok(false) };
        let turns: Vec<Turn> = self.cache.turns().cloned().collect();
        let Forgetting { tokens, afterwards } = policy.make_room(&turns, capacity, needed)?;
        if tokens.is_empty() {
            return Ok(false);
        }
        self.forget_tokens(tokens);
        match afterwards {
            Afterwards::Stay => {}
            Afterwards::CloseUp => self.close_up()?,
            Afterwards::Encode => self.encode_again()?,
        }
        Ok(true)
    }

    fn forget_tokens(&mut self, tokens: Vec<Range<usize>>) {
        // From the end, so that what is still to go stays where it was.
        for range in tokens.into_iter().rev() {
            self.cache.forget(range.clone());
            self.tokens.drain(range);
        }
    }

    fn make_room_for_facts(&mut self, needed: usize) -> Result<(), RuntimeError> {
        let capacity = self.memory.facts;
        let held = |session: &Self, counted: fn(&Turn) -> bool| -> usize {
            let facts = session.cache.turns().filter(|turn| turn.kind == TurnKind::Fact && counted(turn));
            facts.map(|turn| turn.tokens).sum()
        };
        let tokens = held(self, |fact| fact.hidden.is_none()) + needed;
        if tokens > capacity {
            return Err(CacheError::FactsFull { tokens, capacity }.into());
        }
        // Facts that others have taken the place of are kept as long as there is room for them.
        let superseded = |turn: &&Turn| turn.hidden == Some(Hidden::Superseded);
        while held(self, |_| true) + needed > capacity {
            let Some(oldest) = self.cache.turns().find(superseded).map(|turn| turn.id) else { break };
            self.forget(oldest)?;
        }
        Ok(())
    }

    fn fact(&self, id: TurnId) -> Result<&Turn, CacheError> {
        let mut facts = self.cache.turns().filter(|turn| turn.kind == TurnKind::Fact);
        facts.find(|turn| turn.id == id).ok_or(CacheError::NoSuchTurn { turn: id })
    }
}
