//! The turns and facts of a session: adding, hiding, forgetting and condensing them, and evicting turns that leave no room.

use std::ops::Range;
use std::sync::Arc;

use firebox_cache::{
    AfterEviction, CacheError, Eviction, EvictionPolicy, HiddenReason, Role, Turn, TurnId, TurnKind,
};

use super::Session;
use crate::RuntimeError;
use crate::relevance::{EarlierTurn, RelevanceScorer, TurnContent};

/// Tokens of facts that a session holds by default.
pub(crate) const DEFAULT_FACT_TOKENS: usize = 512;

/// Limits on what a session's cache holds.
#[derive(Debug, Clone)]
pub(crate) struct Retention {
    /// The most tokens of turns, and the policy that evicts turns when there are more; `None` for no limit.
    turns: Option<(usize, Arc<dyn EvictionPolicy>)>,
    /// The most tokens of facts.
    pub(crate) fact_capacity: usize,
    /// Whether positions of evicted tokens are still to be compacted.
    pub(crate) needs_compaction: bool,
    /// Turns that the relevance scorer has scored.
    scored: Vec<TurnId>,
}

impl Default for Retention {
    fn default() -> Self {
        let fact_capacity = DEFAULT_FACT_TOKENS;
        Self { turns: None, fact_capacity, needs_compaction: false, scored: Vec::new() }
    }
}

impl Session {
    /// Holds at most `capacity` tokens of turns, and evicts turns by `policy` when there are more.
    pub fn with_turn_capacity(mut self, capacity: usize, policy: impl EvictionPolicy + 'static) -> Self {
        self.retention.turns = Some((capacity, Arc::new(policy)));
        self
    }

    /// Holds at most `capacity` tokens of facts.
    pub fn with_fact_capacity(mut self, capacity: usize) -> Self {
        self.retention.fact_capacity = capacity;
        self
    }

    /// Returns the most tokens of facts that it holds.
    pub fn fact_capacity(&self) -> usize {
        self.retention.fact_capacity
    }

    /// Returns the cached turns in order.
    pub fn turns(&self) -> impl ExactSizeIterator<Item = &Turn> {
        self.cache.turns()
    }

    /// Begins a turn: tokens fed from now on belong to it.
    pub fn begin_turn(&mut self, roles: &[Role]) -> Result<TurnId, RuntimeError> {
        self.flush()?;
        Ok(self.cache.begin_turn(TurnKind::Turn, roles.to_vec()))
    }

    /// Pins a turn, so that it is not evicted, or unpins it.
    pub fn pin(&mut self, turn: TurnId, pinned: bool) -> Result<(), RuntimeError> {
        self.rebuild(0)?;
        Ok(self.cache.pin(turn, pinned)?)
    }

    /// Hides a turn from later tokens as irrelevant, or shows it again. Earlier tokens are not recomputed without it.
    pub fn mask(&mut self, turn: TurnId, masked: bool) -> Result<(), RuntimeError> {
        self.rebuild(0)?;
        Ok(self.cache.hide(turn, masked.then_some(HiddenReason::Irrelevant))?)
    }

    /// Hides turns that a scorer rates irrelevant to the newest message, and shows the others. The newest turn, pinned turns
    /// and facts are never hidden. `text_of` turns a turn's tokens into text; it is called once for each turn. Returns how
    /// many turns are hidden.
    pub fn mask_irrelevant(
        &mut self,
        scorer: &mut dyn RelevanceScorer,
        newest: TurnContent<'_>,
        text_of: impl Fn(&[u32]) -> Result<String, RuntimeError>,
    ) -> Result<usize, RuntimeError> {
        self.rebuild(0)?;
        let newest_turn = self.cache.turns().last().map(|turn| turn.id);
        let candidates: Vec<TurnId> = self
            .cache
            .turns()
            .filter(|turn| turn.kind == TurnKind::Turn && turn.tokens > 0 && Some(turn.id) != newest_turn)
            .map(|turn| turn.id)
            .collect();
        for removed in std::mem::take(&mut self.retention.scored) {
            if !candidates.contains(&removed) {
                scorer.forget(removed.0);
            }
        }
        let mut texts = Vec::with_capacity(candidates.len());
        for &turn in &candidates {
            let tokens = &self.tokens[self.cache.tokens_of(turn)?];
            texts.push((tokens, if scorer.knows(turn.0) { String::new() } else { text_of(tokens)? }));
        }
        let earlier: Vec<_> = candidates
            .iter()
            .zip(&texts)
            .map(|(turn, (tokens, text))| EarlierTurn { id: turn.0, content: TurnContent { text, tokens } })
            .collect();
        let scores = scorer.score(newest, &earlier)?;
        let mut hidden = 0;
        for (&turn, score) in candidates.iter().zip(scores) {
            self.cache.set_relevance(turn, score)?;
            let pinned = self.cache.turns().any(|held| held.id == turn && held.pinned);
            let hides = score < scorer.threshold() && !pinned;
            self.mask(turn, hides)?;
            hidden += usize::from(hides);
        }
        self.retention.scored = candidates;
        Ok(hidden)
    }

    /// Removes a turn. The others stay at their positions.
    pub fn forget(&mut self, turn: TurnId) -> Result<(), RuntimeError> {
        self.rebuild(0)?;
        let tokens = self.cache.evict_turn(turn)?;
        self.tokens.drain(tokens);
        Ok(())
    }

    /// Adds a fact, which is not evicted.
    pub fn add_fact(&mut self, tokens: &[u32]) -> Result<TurnId, RuntimeError> {
        self.flush()?;
        // Superseded facts may be removed to make room, and have to return if that is not enough.
        let before = self.cache.turns().any(is_superseded).then(|| self.clone());
        let added = self.append_fact(tokens);
        if added.is_err()
            && let Some(before) = before
        {
            *self = before;
        }
        added
    }

    fn append_fact(&mut self, tokens: &[u32]) -> Result<TurnId, RuntimeError> {
        self.make_room_for_facts(tokens.len())?;
        self.rebuild(tokens.len())?;
        let fact = self.cache.begin_turn(TurnKind::Fact, vec![Role::System]);
        self.append_to_turn(tokens).inspect_err(|_| {
            // There may be nothing left of it, which is fine.
            let _ = self.cache.evict_turn(fact);
        })?;
        Ok(fact)
    }

    /// Replaces a fact: the old one is hidden from later tokens.
    pub fn supersede(&mut self, fact: TurnId, tokens: &[u32]) -> Result<TurnId, RuntimeError> {
        self.flush()?;
        self.fact(fact)?;
        let before = self.clone();
        self.cache.hide(fact, Some(HiddenReason::Superseded))?;
        let added = self.append_fact(tokens);
        if added.is_err() {
            *self = before;
        }
        added
    }

    /// Returns the facts that are not hidden.
    pub(crate) fn visible_facts(&self) -> Vec<TurnId> {
        let facts = self.cache.turns().filter(|turn| turn.kind == TurnKind::Fact && turn.hidden.is_none());
        facts.map(|turn| turn.id).collect()
    }

    /// Puts one fact in the place of the first of several, removes the others and all hidden turns, and recomputes what
    /// follows. On failure the session stays as it was.
    pub(crate) fn replace_facts(&mut self, facts: &[TurnId], tokens: &[u32]) -> Result<TurnId, RuntimeError> {
        self.flush()?;
        let before = self.clone();
        let fact = self.cache.begin_turn(TurnKind::Fact, vec![Role::System]);
        self.drop_cache();
        let mut added: Option<Turn> = self.uncached_turns.pop_if(|turn| turn.id == fact);
        let (mut turns, mut remaining, mut at) = (Vec::new(), Vec::new(), 0);
        for turn in std::mem::take(&mut self.uncached_turns) {
            let held = at..at + turn.tokens;
            at = held.end;
            if !facts.contains(&turn.id) {
                remaining.extend_from_slice(&self.tokens[held]);
                turns.push(turn);
            } else if let Some(added) = added.take() {
                remaining.extend_from_slice(tokens);
                turns.push(Turn { tokens: tokens.len(), ..added });
            }
        }
        (self.uncached_turns, self.tokens) = (turns, remaining);
        self.rebuild(0).inspect_err(|_| *self = before)?;
        Ok(fact)
    }

    /// Moves tokens to the positions that removed tokens have left.
    pub fn compact_positions(&mut self) -> Result<(), RuntimeError> {
        Ok(self.decoder.compact_positions(&mut self.cache, self.encoded_length)?)
    }

    /// Evicts turns by the policy if there is no room for `needed` more tokens. Returns whether any tokens were evicted; the
    /// cache may have to be [rebuilt](Self::rebuild) then.
    pub(crate) fn evict_turns(&mut self, needed: usize) -> Result<bool, RuntimeError> {
        let Some((capacity, policy)) = self.retention.turns.clone() else { return Ok(false) };
        if self.retention.needs_compaction {
            // It failed for want of a page when the tokens were removed.
            self.compact_positions()?;
            self.retention.needs_compaction = false;
        }
        let turns: Vec<Turn> = self.cache.turns().cloned().collect();
        let Eviction { tokens, after } = policy.make_room(&turns, capacity, needed)?;
        if tokens.is_empty() {
            return Ok(false);
        }
        let evicted: usize = tokens.iter().map(|range| range.len()).sum();
        self.remove_tokens(tokens);
        self.meters().evicted(turns.len() - self.cache.turns().len(), evicted);
        match after {
            AfterEviction::KeepPositions => {}
            AfterEviction::CompactPositions => {
                self.retention.needs_compaction = true;
                self.compact_positions()?;
                self.retention.needs_compaction = false;
            }
            AfterEviction::Recompute => self.drop_cache(),
        }
        Ok(true)
    }

    /// Returns how many more tokens turns may have before any are evicted.
    pub(crate) fn turn_room(&self) -> usize {
        let Some((capacity, _)) = &self.retention.turns else { return usize::MAX };
        let turns = self.cache.turns().filter(|turn| turn.kind == TurnKind::Turn);
        capacity.saturating_sub(turns.map(|turn| turn.tokens).sum())
    }

    /// Returns the tokens of pinned turns.
    pub fn pinned_tokens(&self) -> usize {
        let pinned = self.all_turns().filter(|turn| turn.pinned && turn.kind == TurnKind::Turn);
        pinned.map(|turn| turn.tokens).sum()
    }

    fn remove_tokens(&mut self, tokens: Vec<Range<usize>>) {
        // From the end, so that earlier ranges stay valid.
        for range in tokens.into_iter().rev() {
            let range = range.start.min(self.cache.len())..range.end.min(self.cache.len());
            self.cache.evict(range.clone());
            self.tokens.drain(range);
        }
    }

    /// Removes superseded facts, the oldest first, until there is room for `needed` more tokens of facts.
    fn make_room_for_facts(&mut self, needed: usize) -> Result<(), RuntimeError> {
        let capacity = self.retention.fact_capacity;
        // A fact that is only masked counts: it may be shown again.
        let tokens = self.fact_tokens() + needed;
        if tokens > capacity {
            return Err(CacheError::FactsFull { tokens, capacity }.into());
        }
        let all_facts = |session: &Self| -> usize {
            let facts = session.cache.turns().filter(|turn| turn.kind == TurnKind::Fact);
            facts.map(|turn| turn.tokens).sum()
        };
        while all_facts(self) + needed > capacity {
            let superseded = self.cache.turns().find(|turn| is_superseded(turn));
            let Some(oldest) = superseded.map(|turn| turn.id) else { break };
            self.forget(oldest)?;
        }
        Ok(())
    }

    /// Returns the tokens of facts that no other fact has superseded.
    pub(crate) fn fact_tokens(&self) -> usize {
        let facts = self.all_turns().filter(|turn| turn.kind == TurnKind::Fact && !is_superseded(turn));
        facts.map(|turn| turn.tokens).sum()
    }

    /// Returns a fact that is not superseded.
    fn fact(&self, id: TurnId) -> Result<&Turn, CacheError> {
        let is_current = |turn: &&Turn| turn.kind == TurnKind::Fact && !is_superseded(turn);
        let mut facts = self.cache.turns().filter(is_current);
        facts.find(|turn| turn.id == id).ok_or(CacheError::NoSuchTurn { turn: id })
    }
}

/// Returns whether another fact has replaced this one.
fn is_superseded(turn: &Turn) -> bool {
    turn.hidden == Some(HiddenReason::Superseded)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{Model, WholeTurns, device};

    fn session() -> Session {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/reference/llama");
        Model::open(fixture, &device("cpu").unwrap()).unwrap().session().unwrap()
    }

    /// Turns are relevant whose first token is that of the newest message.
    #[derive(Debug, Default)]
    struct FirstToken {
        known: Vec<u64>,
    }

    impl RelevanceScorer for FirstToken {
        fn score(
            &mut self,
            newest: TurnContent<'_>,
            earlier: &[EarlierTurn<'_>],
        ) -> Result<Vec<f32>, RuntimeError> {
            let score = |turn: &EarlierTurn<'_>| {
                if !self.knows(turn.id) {
                    assert_eq!(turn.content.text, format!("{:?}", turn.content.tokens));
                    self.known.push(turn.id);
                }
                if turn.content.tokens[0] == newest.tokens[0] { 0.9 } else { 0.2 }
            };
            Ok(earlier.iter().map(score).collect())
        }

        fn knows(&self, id: u64) -> bool {
            self.known.contains(&id)
        }

        fn forget(&mut self, id: u64) {
            self.known.retain(|known| *known != id);
        }
    }

    #[test]
    fn turns_that_have_nothing_to_do_with_it_are_hidden() {
        let mut session = session();
        let mut scorer = FirstToken::default();
        session.add_fact(&[8, 8]).unwrap();
        let turns: Vec<TurnId> = [7, 9, 7, 9, 9]
            .into_iter()
            .map(|first| {
                let turn = session.begin_turn(&[Role::User]).unwrap();
                session.feed(&[first, 20, 21]).unwrap();
                turn
            })
            .collect();
        session.pin(turns[1], true).unwrap();
        let newest = TurnContent { text: "", tokens: &[7] };
        let said = |tokens: &[u32]| Ok(format!("{tokens:?}"));
        assert_eq!(session.mask_irrelevant(&mut scorer, newest, said).unwrap(), 1);
        let hidden = |session: &Session| -> Vec<TurnId> {
            session.turns().filter(|turn| turn.hidden.is_some()).map(|turn| turn.id).collect()
        };
        assert_eq!(hidden(&session), [turns[3]]);
        session.forget(turns[0]).unwrap();
        let newest = TurnContent { text: "", tokens: &[9] };
        assert_eq!(session.mask_irrelevant(&mut scorer, newest, said).unwrap(), 1);
        assert_eq!(hidden(&session), [turns[2]]);
        assert!(!scorer.knows(turns[0].0), "what was forgotten is not kept by the scorer");
    }

    #[test]
    fn facts_have_a_cap_and_the_newest_one_counts() {
        let mut session = session().with_fact_capacity(10);
        let first = session.add_fact(&[5; 6]).unwrap();
        let refused = session.add_fact(&[6; 5]).unwrap_err();
        assert!(matches!(refused, RuntimeError::Cache(CacheError::FactsFull { tokens: 11, capacity: 10 })));
        let refused = session.supersede(first, &[6; 11]).unwrap_err();
        assert!(matches!(refused, RuntimeError::Cache(CacheError::FactsFull { .. })));
        assert!(session.turns().all(|turn| turn.hidden.is_none()), "a refusal changes nothing");
        session.mask(first, true).unwrap();
        let refused = session.add_fact(&[6; 5]);
        assert!(refused.is_err(), "what is only hidden may be seen again");
        session.mask(first, false).unwrap();
        // There is room for what is new once what it replaces no longer counts.
        let second = session.supersede(first, &[6; 8]).unwrap();
        assert_eq!(session.tokens(), [6; 8]);
        assert!(session.turns().all(|turn| turn.id == second));
        assert!(session.supersede(first, &[1]).is_err());
    }

    #[test]
    fn a_fact_that_cannot_be_added_costs_none_that_was_superseded() {
        let mut session = session().with_fact_capacity(10);
        let first = session.add_fact(&[5; 6]).unwrap();
        let second = session.supersede(first, &[6; 4]).unwrap();
        assert!(session.add_fact(&[9999; 4]).is_err());
        assert_eq!(session.turns().map(|turn| turn.id).collect::<Vec<_>>(), [first, second]);
        session.add_fact(&[7; 4]).unwrap();
        assert!(session.turns().all(|turn| turn.id != first));
    }

    #[test]
    fn evicted_or_once_hidden_turns_make_a_session_irreproducible() {
        let policy = WholeTurns { after: AfterEviction::CompactPositions };
        let said = |session: &mut Session| {
            let turn = session.begin_turn(&[Role::User]).unwrap();
            session.feed(&[7; 20]).unwrap();
            turn
        };
        let mut forgets = session().with_turn_capacity(50, policy);
        said(&mut forgets);
        said(&mut forgets);
        assert!(forgets.is_reproducible());
        said(&mut forgets);
        assert_eq!((forgets.turns().count(), forgets.is_reproducible()), (2, false), "one was forgotten");
        let mut hides = session();
        let hidden = said(&mut hides);
        hides.mask(hidden, true).unwrap();
        said(&mut hides);
        hides.mask(hidden, false).unwrap();
        assert!(!hides.is_reproducible(), "what is seen now was not when it was computed");
    }

    #[test]
    fn a_fact_is_superseded_once() {
        let mut session = session();
        let first = session.add_fact(&[5; 6]).unwrap();
        session.supersede(first, &[6; 6]).unwrap();
        let refused = session.supersede(first, &[7; 6]).unwrap_err();
        assert!(matches!(refused, RuntimeError::Cache(CacheError::NoSuchTurn { turn }) if turn == first));
        assert_eq!(session.visible_facts().len(), 1);
    }

    /// What could not be added leaves nothing behind: not a fact that what is said next would become part of, and not a
    /// turn that is gone.
    #[test]
    fn a_failed_change_of_turns_changes_nothing() {
        let mut session = session();
        let turn = session.begin_turn(&[Role::User]).unwrap();
        assert!(session.feed(&[9999]).is_err());
        session.pin(turn, true).unwrap();
        session.feed(&[5, 6]).unwrap();
        let fact = session.add_fact(&[7, 8]).unwrap();
        assert!(session.add_fact(&[9999]).is_err());
        assert!(session.supersede(fact, &[9999]).is_err());
        session.feed(&[9, 10]).unwrap();
        let turns: Vec<_> = session
            .turns()
            .map(|turn| (turn.kind, turn.tokens, turn.pinned, turn.hidden.is_some()))
            .collect();
        let [said, told] = [TurnKind::Turn, TurnKind::Fact];
        assert_eq!(turns, [(said, 2, true, false), (told, 2, false, false), (said, 2, false, false)]);
    }

    /// Going back behind a fact in a model that has to compute again what is left does not make a fact of what follows.
    #[test]
    fn a_turn_after_a_rewound_fact_is_no_fact() {
        let fixture =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/reference/qwen3_5_text");
        let mut session = Model::open(fixture, &device("cpu").unwrap()).unwrap().session().unwrap();
        session.feed(&[5, 6, 7, 8, 9]).unwrap();
        session.add_fact(&[10, 11, 12]).unwrap();
        session.feed(&[13]).unwrap();
        session.rewind(3);
        session.feed(&[14, 15]).unwrap();
        let turns: Vec<_> = session.turns().map(|turn| (turn.kind, turn.tokens)).collect();
        assert_eq!(turns, [(TurnKind::Turn, 5)]);
    }

    /// A pool too small to close up in leaves a sequence that says what it said.
    #[test]
    fn closing_up_without_room_changes_nothing() {
        let decoder = session().decoder;
        let layout = decoder.layout(firebox_cache::KvType::F32);
        let tokens: Vec<u32> = (0..370).map(|at| at % 300).collect();
        let speak = |pool: firebox_cache::PagePool| {
            let mut session = Session::in_pool(decoder.clone(), &pool);
            let turns = [&tokens[..120], &tokens[120..150], &tokens[150..200], &tokens[200..]].map(|said| {
                let turn = session.begin_turn(&[Role::User]).unwrap();
                session.feed(said).unwrap();
                turn
            });
            session.forget(turns[0]).unwrap();
            // In the middle of a page: two runs lie in it.
            session.forget(turns[2]).unwrap();
            session
        };
        let mut small = speak(firebox_cache::PagePool::with_pages(layout.clone(), 3));
        let mut large = speak(firebox_cache::PagePool::new(layout));
        // What two sequences see is copied before it moves.
        let other = small.clone();
        let expected = large.clone().feed(&[7]).unwrap();
        if small.compact_positions().is_ok() {
            panic!("three pages are too few");
        }
        drop(other);
        assert_eq!(small.feed(&[7]).unwrap(), expected);
        large.compact_positions().unwrap();
        let moved = large.feed(&[7]).unwrap();
        assert!(moved.iter().zip(&expected).any(|(moved, expected)| moved != expected));
    }

    /// A compaction that failed for want of a page is caught up on after the session is restored.
    #[test]
    fn a_session_that_could_not_close_up_does_when_it_is_restored() {
        let model = crate::session::save::tests::model("reference/llama");
        let (decoder, kv_type) = (model.decoder().unwrap(), firebox_cache::KvType::F32);
        let layout = decoder.layout(kv_type);
        let policy = WholeTurns { after: AfterEviction::CompactPositions };
        let pool = firebox_cache::PagePool::with_pages(layout.clone(), 3);
        let mut session = Session::in_pool(decoder, &pool).with_turn_capacity(370, policy);
        for count in [120, 30, 50, 170] {
            let turn = session.begin_turn(&[Role::User]).unwrap();
            session.feed(&vec![count; count as usize]).unwrap();
            session.pin(turn, count == 120).unwrap();
        }
        let other = session.clone();
        session.begin_turn(&[Role::User]).unwrap();
        assert!(session.feed(&[8; 20]).is_err(), "what two sequences see is copied before it moves");
        assert!(session.retention.needs_compaction);
        drop(other);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("session");
        session.save(&path, &model).unwrap();
        let saved = crate::SessionFile::open(&path, &model, kv_type).unwrap();
        let restored = model.restored_in(&saved, &firebox_cache::PagePool::new(layout)).unwrap();
        let mut restored = restored.with_turn_capacity(370, policy);
        assert_eq!(restored.feed(&[7]).unwrap(), session.feed(&[7]).unwrap());
    }

    /// A prompt that makes earlier turns go has as many tokens as it has.
    #[test]
    fn a_prompt_that_evicts_is_counted_right() {
        let policy = WholeTurns { after: AfterEviction::KeepPositions };
        let mut session = session().with_turn_capacity(300, policy);
        for length in [200, 80, 0] {
            session.begin_turn(&[Role::User]).unwrap();
            if length > 0 {
                session.feed(&vec![7; length]).unwrap();
            }
        }
        let config = crate::GenerationConfig { max_tokens: Some(3), ..Default::default() };
        let mut generation = crate::Generation::begin(&mut session, None, &[8; 50], config).unwrap();
        while generation.next_piece().unwrap().is_some() {}
        assert_eq!(generation.finish().unwrap().prompt_tokens, 50);
    }

    /// Two sessions that take turns in one pool say what each says in a pool of its own, to the last bit, though pages go
    /// from one to the other.
    #[test]
    fn sessions_in_one_pool_do_not_meet() {
        let shared = session().decoder;
        let pool = firebox_cache::PagePool::new(shared.layout(firebox_cache::KvType::F16));
        let policy = WholeTurns { after: AfterEviction::KeepPositions };
        let open = |pool: &firebox_cache::PagePool| {
            Session::in_pool(shared.clone(), pool).with_turn_capacity(300, policy)
        };
        let alone = |pool: &firebox_cache::PagePool| firebox_cache::PagePool::new(pool.layout().clone());
        let mut together = [open(&pool), open(&pool)];
        let mut apart = [open(&alone(&pool)), open(&alone(&pool))];
        for round in 0..30 {
            for (session, (together, apart)) in together.iter_mut().zip(&mut apart).enumerate() {
                // One has the low half of the vocabulary, the other the high half.
                let tokens: Vec<u32> = (0..40 + round * 7 % 60)
                    .map(|at| 160 * session as u32 + (at * 31 + round) % 160)
                    .collect();
                let logits = [together, apart].map(|session| {
                    session.begin_turn(&[Role::User]).unwrap();
                    session.feed(&tokens).unwrap()
                });
                assert_eq!(logits[0], logits[1], "round {round}");
            }
        }
        assert!(pool.pages() <= 2 * 4 + 2, "pages are used again: {}", pool.pages());
    }
}
