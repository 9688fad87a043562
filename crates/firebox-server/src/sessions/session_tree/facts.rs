//! Facts of a session: adding and superseding them, and condensing those that outgrow their tokens.

use std::sync::Arc;

use firebox_runtime::{
    CacheError, CondensedFact, CondensedFacts, ExtractiveCondenser, RuntimeError, TurnId, TurnKind,
};

use super::{SessionTree, no_turn};
use crate::error::ApiError;
use crate::sessions::transcript::{Entry, Kind};

impl SessionTree {
    /// Adds a fact. If it does not fit, the other facts are condensed in the background, and it is added before a later turn.
    pub fn add_fact(&mut self, text: &str) -> Result<(), ApiError> {
        self.close()?;
        self.apply_facts(true)?;
        match self.conversation()?.add_fact(text) {
            Ok((turn, tokens)) => self.add_entry(turn, Kind::Fact, text, tokens),
            Err(RuntimeError::Cache(CacheError::FactsFull { .. })) => self.condense_facts(text),
            Err(error) => Err(fact_error(error)),
        }
    }

    /// Supersedes a fact.
    pub fn supersede(&mut self, fact: u64, text: &str) -> Result<u64, ApiError> {
        let entry = self.transcript().entry(fact);
        if entry.is_none_or(|entry| entry.kind != Kind::Fact) {
            return Err(ApiError::not_found(format!("there is no fact {fact}")));
        }
        if entry.is_some_and(|entry| entry.superseded_by.is_some()) {
            return Err(ApiError::field("fact", "the fact is superseded; supersede the newer one"));
        }
        self.close()?;
        let (turn, tokens) = self.conversation()?.supersede(TurnId(fact), text).map_err(fact_error)?;
        for entry in &mut self.transcript().entries {
            if entry.turn == fact {
                entry.superseded_by = Some(turn.0);
            }
        }
        self.add_entry(turn, Kind::Fact, text, tokens)?;
        Ok(turn.0)
    }

    /// Begins to condense the active branch's facts, to make room for another.
    fn condense_facts(&mut self, added: &str) -> Result<(), ApiError> {
        let session = self.tree.session(self.active)?;
        let transcript = self.transcripts.entry(self.active).or_default();
        let visible = session.all_turns().filter(|turn| turn.kind == TurnKind::Fact && turn.hidden.is_none());
        let facts =
            visible.filter_map(|turn| Some((turn.id, transcript.entry(turn.id.0)?.text.clone()))).collect();
        let condenser = Arc::new(ExtractiveCondenser);
        let update = self.conversation()?.make_room_for_fact(facts, added, condenser).map_err(fact_error)?;
        self.fact_updates.insert(self.active, update);
        Ok(())
    }

    /// Replaces the active branch's facts by condensed ones if they are ready. With `wait` it waits until they are. Call it
    /// between two turns.
    pub(super) fn apply_facts(&mut self, wait: bool) -> Result<(), ApiError> {
        if !self.fact_updates.get(&self.active).is_some_and(|update| wait || update.is_finished()) {
            return Ok(());
        }
        let Some(update) = self.fact_updates.remove(&self.active) else { return Ok(()) };
        let applied = self.conversation()?.apply_facts(update).map_err(fact_error)?;
        let CondensedFacts { condensed, added: (turn, tokens), text } = applied;
        if let Some(CondensedFact { turn, text, tokens, facts }) = condensed {
            let entry = Entry {
                turn: turn.0,
                kind: Kind::Fact,
                text,
                answer: None,
                tokens,
                superseded_by: None,
                hidden: false,
            };
            self.transcript().replace_facts(entry, &facts);
        }
        self.add_entry(turn, Kind::Fact, &text, tokens)
    }
}

fn fact_error(error: RuntimeError) -> ApiError {
    match error {
        RuntimeError::Cache(error @ CacheError::FactsFull { .. }) => {
            ApiError::field("text", error.to_string())
        }
        RuntimeError::Cache(CacheError::NoSuchTurn { turn }) => no_turn(turn.0),
        error => error.into(),
    }
}
