//! A persistent conversation with branches.

mod facts;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use firebox_engine::{Engine, EngineError, Outcome};
use firebox_runtime::relevance::{OwnStates, Similarity, TurnContent};
use firebox_runtime::{
    BranchId, Branches, CacheError, Capacity, Conversation, FactUpdate, Finish, OWN_HEAD, Question,
    RuntimeError, Session, SessionFile, TurnId, TurnKind,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::transcript::{Answer, Entry, Kind, Said, Transcript, token_counts};
use crate::error::ApiError;
use crate::response_meta::finish_reason;
use crate::served_model::ServedModel;

/// Branches of a session. Each has a copy of the transcript before its fork.
const MAX_BRANCHES: usize = 64;

/// Options of a new session.
#[derive(Debug)]
pub(crate) struct SessionOptions {
    pub system: Option<String>,
    pub facts: Vec<String>,
    pub head: Option<String>,
    pub capacity: Capacity,
    /// Hides turns that are irrelevant to a question.
    pub relevance: bool,
}

/// What is saved beside the KV cache.
#[derive(Serialize, Deserialize)]
struct SavedNote {
    capacity: Capacity,
    relevance: bool,
    transcript: Transcript,
}

/// A persistent conversation: a session and a transcript for every branch.
#[derive(Debug)]
pub(crate) struct SessionTree {
    pub served: Arc<ServedModel>,
    tree: Branches,
    transcripts: BTreeMap<BranchId, Transcript>,
    active: BranchId,
    capacity: Capacity,
    /// Scores the relevance of turns, if enabled; each branch has a copy that knows its turns.
    scorer: Option<Similarity<OwnStates>>,
    scorers: BTreeMap<BranchId, Similarity<OwnStates>>,
    /// Facts that are being condensed to make room for another, by branch.
    fact_updates: BTreeMap<BranchId, FactUpdate>,
}

/// A question for the engine. Its session is a fork of the stored one, so that a failed answer changes nothing.
#[derive(Debug)]
pub(crate) struct PreparedQuestion {
    pub session: Session,
    pub prompt: Vec<u32>,
    /// Tokens left for the answer.
    pub room: usize,
    /// Kept until the answer is complete.
    pub asked: PendingQuestion,
}

/// A question that is being answered.
#[derive(Debug)]
pub(crate) struct PendingQuestion {
    branch: BranchId,
    turn: TurnId,
    text: String,
}

impl SessionTree {
    pub fn new(served: Arc<ServedModel>, engine: &Engine, options: SessionOptions) -> Result<Self, ApiError> {
        let name = served.name.clone();
        let session = engine.with_core(move |core| core.session(&name))??;
        let mut tree = Self::from_session(served, session, options.capacity, Transcript::default());
        if options.relevance {
            tree.fit_scorer()?;
        }
        tree.open(options.system.as_deref())?;
        for fact in &options.facts {
            tree.add_fact(fact)?;
        }
        if let Some(head) = options.head {
            tree.set_head(Some(&head))?;
        }
        Ok(tree)
    }

    /// Restores a session that a process has [saved](Self::save).
    pub fn restore(served: Arc<ServedModel>, engine: &Engine, path: &Path) -> Result<Self, ApiError> {
        let name = served.name.clone();
        let kept = engine.with_core({
            let name = name.clone();
            move |core| Ok::<_, EngineError>(core.session(&name)?.cache().pool().layout().kv_dtype)
        })??;
        let saved = SessionFile::open(path, &served.model, kept)
            .map_err(|error| ApiError::field("restore", format!("it does not fit this model: {error}")))?;
        let note: SavedNote = serde_json::from_str(saved.note())
            .map_err(|_| ApiError::field("restore", "the file was not written by a server"))?;
        let session = engine.with_core(move |core| core.restored(&name, &saved))??;
        let head = note.transcript.head.clone();
        let mut tree = Self::from_session(served, session, note.capacity, note.transcript);
        if note.relevance {
            tree.fit_scorer()?;
        }
        if head.is_some() {
            tree.set_head(head.as_deref())?;
        }
        Ok(tree)
    }

    fn from_session(
        served: Arc<ServedModel>,
        session: Session,
        capacity: Capacity,
        transcript: Transcript,
    ) -> Self {
        let tree = Branches::new(capacity.apply_to(session));
        let active = tree.root();
        Self {
            served,
            transcripts: [(active, transcript)].into(),
            tree,
            active,
            capacity,
            scorer: None,
            scorers: BTreeMap::new(),
            fact_updates: BTreeMap::new(),
        }
    }

    /// Feeds the opening, which is never evicted.
    fn open(&mut self, system: Option<&str>) -> Result<(), ApiError> {
        let opened = self.conversation()?.open(system).map_err(|error| match error {
            RuntimeError::Cache(CacheError::TurnTooLong { tokens, capacity, .. }) => {
                ApiError::field("system", format!("{} tokens leave no room in {capacity}", tokens - 1))
            }
            error => error.into(),
        });
        if let Some((turn, tokens)) = opened? {
            self.add_entry(turn, Kind::Opening, system.unwrap_or_default(), tokens)?;
        }
        Ok(())
    }

    /// Returns the conversation of the active branch.
    fn conversation(&mut self) -> Result<Conversation<'_>, ApiError> {
        let session = self.tree.session(self.active)?;
        Ok(Conversation::new(&self.served.script, session, self.capacity))
    }

    fn add_entry(&mut self, turn: TurnId, kind: Kind, text: &str, tokens: usize) -> Result<(), ApiError> {
        let (turn, text) = (turn.0, text.to_owned());
        self.push_entry(Entry { turn, kind, text, answer: None, tokens, superseded_by: None, hidden: false })
    }

    fn push_entry(&mut self, entry: Entry) -> Result<(), ApiError> {
        let session = self.tree.session(self.active)?;
        self.transcripts.entry(self.active).or_default().push_entry(entry, session);
        Ok(())
    }

    fn transcript(&mut self) -> &mut Transcript {
        self.transcripts.entry(self.active).or_default()
    }

    /// Feeds the template's text after the last answer.
    fn close(&mut self) -> Result<(), ApiError> {
        if self.transcript().open {
            self.conversation()?.close()?;
            self.transcript().open = false;
        }
        Ok(())
    }

    /// Prepares a question in the active branch.
    pub fn ask(&mut self, text: &str) -> Result<PreparedQuestion, ApiError> {
        self.close()?;
        self.apply_facts(false)?;
        let mut session = self.tree.session(self.active)?.clone();
        let asked = Conversation::new(&self.served.script, &mut session, self.capacity).ask(text);
        let Question { turn, prompt, room, .. } = asked.map_err(|error| match error {
            RuntimeError::Cache(CacheError::TurnTooLong { .. }) => {
                ApiError::field("content", error.to_string())
            }
            error => error.into(),
        })?;
        self.mask_irrelevant(&mut session, text)?;
        let asked = PendingQuestion { branch: self.active, turn, text: text.to_owned() };
        Ok(PreparedQuestion { session, prompt, room, asked })
    }

    /// Calibrates relevance scores on the model's own hidden states.
    fn fit_scorer(&mut self) -> Result<(), ApiError> {
        let own = OwnStates::of_model(&self.served.model)?;
        let fitted = own.calibrated(self.served.tokenizer()?);
        self.scorer = Some(fitted.map_err(|error| ApiError::field("relevance", error.to_string()))?);
        Ok(())
    }

    fn mask_irrelevant(&mut self, session: &mut Session, text: &str) -> Result<(), ApiError> {
        let Some(fitted) = &self.scorer else { return Ok(()) };
        let tokenizer = self.served.tokenizer()?;
        let scorer = self.scorers.entry(self.active).or_insert_with(|| fitted.clone());
        let tokens = tokenizer.encode_literal(text, false)?;
        let newest = TurnContent { text, tokens: &tokens };
        session.mask_irrelevant(scorer, newest, |tokens| Ok(tokenizer.decode(tokens, true)))?;
        // Turns that the client hid stay hidden.
        let Some(transcripts) = self.transcripts.get(&self.active) else { return Ok(()) };
        let is_hidden = |turn: TurnId| transcripts.entry(turn.0).is_some_and(|entry| entry.hidden);
        let shown = session.all_turns().filter(|turn| turn.hidden.is_none()).map(|turn| turn.id);
        let wrongly: Vec<TurnId> = shown.filter(|turn| is_hidden(*turn)).collect();
        for turn in wrongly {
            session.mask(turn, true)?;
        }
        Ok(())
    }

    /// Stores the answer to a question.
    pub fn answered(&mut self, asked: PendingQuestion, said: Said, outcome: Outcome) -> Result<(), ApiError> {
        let summary = outcome.summary;
        *self.tree.session(asked.branch)? = outcome.session;
        let head = self.transcripts.get(&asked.branch).and_then(|transcripts| transcripts.head.clone());
        // Transcripts distinguish what OpenAI's names do not.
        let finish = match summary.finish {
            Finish::Cancelled => "cancelled",
            Finish::Repetition => "repetition",
            finish => finish_reason(finish, 0),
        };
        let answer = Answer {
            reasoning_content: said.thoughts().map(str::to_owned),
            text: said.text,
            head,
            finish: finish.to_owned(),
            tokens: summary.tokens.len(),
            ttft_ms: summary.ttft_ms,
            tokens_per_second: summary.decode_tps,
        };
        let entry = Entry {
            turn: asked.turn.0,
            kind: Kind::Turn,
            text: asked.text,
            answer: Some(answer),
            tokens: 0,
            superseded_by: None,
            hidden: false,
        };
        self.active = asked.branch;
        self.push_entry(entry)?;
        self.transcript().open = true;
        // Close it now, so that later changes apply to the same tokens. If this fails, the next change tries
        // again.
        let _ = self.close();
        self.measure()
    }

    fn measure(&mut self) -> Result<(), ApiError> {
        let session = self.tree.session(self.active)?;
        if let Some(transcripts) = self.transcripts.get_mut(&self.active) {
            transcripts.measure(session);
        }
        Ok(())
    }

    /// Selects the head of later answers; `None` selects the model's own.
    pub fn set_head(&mut self, head: Option<&str>) -> Result<Value, ApiError> {
        self.close()?;
        let session = self.tree.session(self.active)?;
        // No fallback is accepted: on failure the current head stays.
        let mut candidate = session.clone();
        let switch = candidate.use_head(head.unwrap_or(OWN_HEAD));
        if let Some(source) = switch.fallback_reason {
            let name = head.unwrap_or(OWN_HEAD).to_owned();
            return Err(ApiError::from(EngineError::HeadUnavailable { name, source }).with_head_field());
        }
        *session = candidate;
        self.transcript().head = head.map(str::to_owned);
        Ok(json!({ "waited": switch.waited, "took_ms": switch.took.as_secs_f64() * 1e3 }))
    }

    /// Rewinds the active branch to before a turn.
    pub fn rewind(&mut self, turn: u64) -> Result<(), ApiError> {
        let start = self.turn_start(turn)?;
        let mut session = self.tree.session(self.active)?.clone();
        session.rewind(start);
        let transcripts = rewound(self.transcript().clone(), &mut session, turn)?;
        *self.tree.session(self.active)? = session;
        *self.transcript() = transcripts;
        self.scorers.remove(&self.active);
        Ok(())
    }

    /// Forks the active branch before a turn or at its end, and switches to the fork.
    pub fn fork(&mut self, turn: Option<u64>) -> Result<BranchId, ApiError> {
        if self.tree.iter().count() >= MAX_BRANCHES {
            return Err(ApiError::too_many(format!(
                "the session has {MAX_BRANCHES} branches, the most allowed; delete or promote one first"
            )));
        }
        let (branch, transcripts) = match turn {
            Some(turn) => {
                let start = self.turn_start(turn)?;
                let branch = self.tree.fork_at(self.active, start)?;
                match rewound(self.transcript().clone(), self.tree.session(branch)?, turn) {
                    Ok(transcripts) => (branch, transcripts),
                    Err(error) => {
                        self.tree.drop_branch(branch)?;
                        return Err(error);
                    }
                }
            }
            None => {
                self.close()?;
                self.apply_facts(true)?;
                let scorer = self.scorers.get(&self.active).cloned();
                let branch = self.tree.fork(self.active)?;
                self.scorers.extend(scorer.map(|scorer| (branch, scorer)));
                (branch, self.transcript().clone())
            }
        };
        self.transcripts.insert(branch, transcripts);
        self.active = branch;
        Ok(branch)
    }

    /// Returns the first token of a turn in the active branch.
    fn turn_start(&mut self, turn: u64) -> Result<usize, ApiError> {
        if self.transcript().entry(turn).is_some_and(|entry| entry.kind == Kind::Opening) {
            return Err(ApiError::field("turn", "the opening cannot be removed; create another session"));
        }
        self.close()?;
        self.apply_facts(true)?;
        let session = self.tree.session(self.active)?;
        let known = session.all_turns().find(|held| held.id.0 == turn).map(|held| held.pinned);
        let Some(pinned) = known else { return Err(no_turn(turn)) };
        // Pinning recomputes evicted tokens, so that all are in the cache.
        session.pin(TurnId(turn), pinned)?;
        let tokens = session.cache().tokens_of(TurnId(turn)).map_err(|_| no_turn(turn))?;
        Ok(tokens.start)
    }

    pub fn switch(&mut self, branch: u64) -> Result<(), ApiError> {
        self.active = self.find(branch)?;
        Ok(())
    }

    pub fn promote(&mut self, branch: u64) -> Result<(), ApiError> {
        let branch = self.find(branch)?;
        let place = self.tree.promote(branch)?;
        if place != branch {
            let transcripts = self.transcripts.remove(&branch).unwrap_or_default();
            self.transcripts.insert(place, transcripts);
            self.scorers.remove(&place);
            self.scorers.remove(&branch);
            self.fact_updates.remove(&place);
            if let Some(update) = self.fact_updates.remove(&branch) {
                self.fact_updates.insert(place, update);
            }
        }
        self.active = place;
        Ok(())
    }

    pub fn drop_branch(&mut self, branch: u64) -> Result<(), ApiError> {
        let branch = self.find(branch)?;
        let parent = self.tree.iter().find(|info| info.id == branch).and_then(|info| info.parent);
        if parent.is_none() {
            return Err(ApiError::field("branch", RuntimeError::RootBranch.to_string()));
        }
        self.tree.drop_branch(branch)?;
        let left: Vec<BranchId> = self.tree.iter().map(|info| info.id).collect();
        self.transcripts.retain(|id, _| left.contains(id));
        self.scorers.retain(|id, _| left.contains(id));
        self.fact_updates.retain(|id, _| left.contains(id));
        if !left.contains(&self.active) {
            self.active = parent.unwrap_or_else(|| self.tree.root());
        }
        Ok(())
    }

    fn find(&self, branch: u64) -> Result<BranchId, ApiError> {
        let mut known = self.tree.iter().filter(|info| info.id == BranchId(branch));
        known
            .next()
            .map(|info| info.id)
            .ok_or_else(|| ApiError::not_found(format!("there is no branch {branch}")))
    }

    /// Pins or hides a turn; `None` changes nothing.
    pub fn mark(&mut self, turn: u64, pinned: Option<bool>, hidden: Option<bool>) -> Result<(), ApiError> {
        self.close()?;
        let capacity = self.capacity.turns;
        let is_opening = self.transcript().entry(turn).is_some_and(|entry| entry.kind == Kind::Opening);
        let session = self.tree.session(self.active)?;
        let Some(held) = session.all_turns().find(|held| held.id.0 == turn).cloned() else {
            return Err(no_turn(turn));
        };
        if held.hidden == Some(firebox_runtime::HiddenReason::Superseded) && hidden.is_some() {
            return Err(ApiError::field("hidden", "the fact is superseded; change the newer one"));
        }
        if is_opening && (pinned == Some(false) || hidden == Some(true)) {
            return Err(ApiError::field("turn", "the opening cannot be unpinned or hidden"));
        }
        let is_new = pinned == Some(true) && !held.pinned && held.kind == TurnKind::Turn;
        if is_new && session.pinned_tokens() + held.tokens >= capacity {
            return Err(ApiError::field(
                "pinned",
                "pinned turns would leave no room for others; unpin one first",
            ));
        }
        if let Some(pinned) = pinned {
            session.pin(TurnId(turn), pinned)?;
        }
        if let Some(hidden) = hidden {
            session.mask(TurnId(turn), hidden)?;
            let mut entries = self.transcript().entries.iter_mut();
            if let Some(entry) = entries.find(|entry| entry.turn == turn) {
                entry.hidden = hidden;
            }
        }
        Ok(())
    }

    /// Saves the active branch to a file, replacing an existing one.
    pub fn save(&mut self, path: &Path) -> Result<(), ApiError> {
        self.close()?;
        self.apply_facts(true)?;
        self.measure()?;
        let note = SavedNote {
            capacity: self.capacity,
            relevance: self.scorer.is_some(),
            transcript: self.transcript().clone(),
        };
        let note = serde_json::to_string(&note).map_err(|error| ApiError::internal(error.to_string()))?;
        Ok(self.tree.session(self.active)?.save_with_note(path, &self.served.model, &note)?)
    }

    /// Returns the session as clients see it.
    pub fn value(&mut self) -> Result<Value, ApiError> {
        let infos: Vec<_> = self.tree.iter().collect();
        let branches: Vec<Value> = infos
            .into_iter()
            .map(|info| {
                let transcripts = self.transcripts.get(&info.id);
                let last = transcripts.and_then(|transcripts| transcripts.entries.iter().rfind(|entry| entry.kind == Kind::Turn));
                json!({
                    "id": info.id.0,
                    "parent": info.parent.map(|parent| parent.0),
                    // The branch may have evicted some of the common prefix.
                    "from": info.from.min(info.tokens),
                    "tokens": info.tokens,
                    "active": info.id == self.active,
                    "head": transcripts.and_then(|transcripts| transcripts.head.as_ref()),
                    "turns": transcripts.map_or(0, |transcripts| transcripts.entries.iter().filter(|entry| entry.kind == Kind::Turn).count()),
                    "last": last.map(|entry| &entry.text),
                })
            })
            .collect();
        let (model, capacity, relevance) = (self.served.name.clone(), self.capacity, self.scorer.is_some());
        let pending_fact = self.fact_updates.get(&self.active).map(|update| update.added().to_owned());
        let transcripts = self.transcript().clone();
        let session = self.tree.session(self.active)?;
        let (turns, facts) = token_counts(session);
        Ok(json!({
            "model": model,
            "head": transcripts.head,
            "branch": self.active.0,
            "tokens": session.tokens().len(),
            "turn_tokens": { "held": turns, "capacity": capacity.turns },
            "pending_fact": pending_fact,
            "fact_tokens": { "held": facts, "capacity": capacity.facts },
            "cache_bytes": session.cache_bytes(),
            "relevance": relevance,
            "branches": branches,
            "turns": transcripts.value(session),
        }))
    }
}

/// Rewinds a transcript with its session. Facts that are no longer superseded get the visibility that the
/// client gave them.
fn rewound(mut transcripts: Transcript, session: &mut Session, turn: u64) -> Result<Transcript, ApiError> {
    let back = transcripts.rewind(turn);
    transcripts.open = false;
    for fact in back {
        let hidden = transcripts.entry(fact).is_some_and(|entry| entry.hidden);
        if session.all_turns().any(|held| held.id.0 == fact) {
            session.mask(TurnId(fact), hidden)?;
        }
    }
    Ok(transcripts)
}

fn no_turn(turn: u64) -> ApiError {
    ApiError::not_found(format!("turn {turn} does not exist or was evicted"))
}

#[cfg(test)]
mod tests;
