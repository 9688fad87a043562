use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use firebox_runtime::engine::{Engine, Outcome};
use firebox_runtime::relevance::{OwnStates, Similarity, TurnContent};
use firebox_runtime::{
    BranchId, Branches, CacheError, Capacity, Conversation, Finish, OWN_HEAD, Question, RuntimeError, Saved,
    Session, TurnId, TurnKind,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::transcript::{Answer, Entry, Kind, Transcript, held};
use crate::answers::reason;
use crate::error::ApiError;
use crate::served::Served;

/// Branches of a session, each with a copy of all that was said before it left.
const MOST_BRANCHES: usize = 64;

/// What a session is to be.
#[derive(Debug)]
pub(super) struct Wish {
    pub system: Option<String>,
    pub facts: Vec<String>,
    pub head: Option<String>,
    pub capacity: Capacity,
    /// Whether turns are hidden that have little to do with a question.
    pub relevance: bool,
}

/// What is written beside a session's keys and values.
#[derive(Serialize, Deserialize)]
struct Note {
    capacity: Capacity,
    relevance: bool,
    transcript: Transcript,
}

/// A conversation that stays: what was said, and the sessions that have read it, one for every branch.
#[derive(Debug)]
pub(super) struct Dialogue {
    pub served: Arc<Served>,
    tree: Branches,
    told: BTreeMap<BranchId, Transcript>,
    active: BranchId,
    capacity: Capacity,
    /// Hides turns that have little to do with a question, if there is one; each branch has a copy that knows its turns.
    scorer: Option<Similarity<OwnStates>>,
    scorers: BTreeMap<BranchId, Similarity<OwnStates>>,
}

/// A question on its way to the engine. The session it goes on in is a branch of the one that is kept, so that an answer
/// that fails leaves everything as it was.
#[derive(Debug)]
pub(super) struct Asked {
    pub session: Session,
    pub prompt: Vec<u32>,
    /// Tokens that the turn has left for the answer.
    pub room: usize,
    /// What stays, for when the answer is there.
    pub asked: Pending,
}

/// What is known of a question while it is answered.
#[derive(Debug)]
pub(super) struct Pending {
    branch: BranchId,
    turn: TurnId,
    text: String,
}

impl Dialogue {
    pub fn begin(served: Arc<Served>, engine: &Engine, wish: Wish) -> Result<Self, ApiError> {
        let name = served.name.clone();
        let session = engine.with_host(move |host| host.session(&name))??;
        let mut dialogue = Self::around(served, session, wish.capacity, Transcript::default());
        if wish.relevance {
            dialogue.fit()?;
        }
        dialogue.open(wish.system.as_deref())?;
        for fact in &wish.facts {
            dialogue.add_fact(fact)?;
        }
        if let Some(head) = wish.head {
            dialogue.wear(Some(&head))?;
        }
        Ok(dialogue)
    }

    /// One that another process, or this one, has [written](Self::save).
    pub fn restore(served: Arc<Served>, engine: &Engine, path: &Path) -> Result<Self, ApiError> {
        let name = served.name.clone();
        let kept = engine.with_host({
            let name = name.clone();
            move |host| Ok::<_, RuntimeError>(host.session(&name)?.cache().pool().layout().kv_dtype)
        })??;
        let saved = Saved::open(path, &served.model, kept).map_err(|error| {
            ApiError::field("restore", format!("it cannot be restored with this model: {error}"))
        })?;
        let note: Note = serde_json::from_str(saved.note())
            .map_err(|_| ApiError::field("restore", "the file was not written by a server"))?;
        let session = engine.with_host(move |host| host.restored(&name, &saved))??;
        let head = note.transcript.head.clone();
        let mut dialogue = Self::around(served, session, note.capacity, note.transcript);
        if note.relevance {
            dialogue.fit()?;
        }
        if head.is_some() {
            dialogue.wear(head.as_deref())?;
        }
        Ok(dialogue)
    }

    fn around(served: Arc<Served>, session: Session, capacity: Capacity, transcript: Transcript) -> Self {
        let tree = Branches::new(capacity.given_to(session));
        let active = tree.root();
        Self {
            served,
            told: [(active, transcript)].into(),
            tree,
            active,
            capacity,
            scorer: None,
            scorers: BTreeMap::new(),
        }
    }

    /// Reads what comes before the first question, which stays whatever is forgotten.
    fn open(&mut self, system: Option<&str>) -> Result<(), ApiError> {
        let opened = self.conversation()?.open(system).map_err(|error| match error {
            RuntimeError::Cache(CacheError::TurnTooLong { tokens, capacity, .. }) => {
                ApiError::field("system", format!("{} tokens leave no room in {capacity}", tokens - 1))
            }
            error => error.into(),
        });
        if let Some((turn, tokens)) = opened? {
            self.note(turn, Kind::Opening, system.unwrap_or_default(), tokens)?;
        }
        Ok(())
    }

    /// The active branch.
    fn conversation(&mut self) -> Result<Conversation<'_>, ApiError> {
        let session = self.tree.session(self.active)?;
        Ok(Conversation::new(&self.served.script, session, self.capacity))
    }

    fn note(&mut self, turn: TurnId, kind: Kind, text: &str, tokens: usize) -> Result<(), ApiError> {
        let (turn, text) = (turn.0, text.to_owned());
        self.enter(Entry { turn, kind, text, answer: None, tokens, superseded_by: None, hidden: false })
    }

    fn enter(&mut self, entry: Entry) -> Result<(), ApiError> {
        let session = self.tree.session(self.active)?;
        self.told.entry(self.active).or_default().enter(entry, session);
        Ok(())
    }

    fn transcript(&mut self) -> &mut Transcript {
        self.told.entry(self.active).or_default()
    }

    /// Writes behind the last answer what a template writes behind answers.
    fn close(&mut self) -> Result<(), ApiError> {
        if self.transcript().open {
            self.conversation()?.close()?;
            self.transcript().open = false;
        }
        Ok(())
    }

    /// Makes ready to answer a question in the active branch.
    pub fn ask(&mut self, text: &str) -> Result<Asked, ApiError> {
        self.close()?;
        let mut session = self.tree.session(self.active)?.clone();
        let asked = Conversation::new(&self.served.script, &mut session, self.capacity).ask(text);
        let Question { turn, prompt, room } = asked.map_err(|error| match error {
            RuntimeError::Cache(CacheError::TurnTooLong { .. }) => {
                ApiError::field("content", error.to_string())
            }
            error => error.into(),
        })?;
        self.judge(&mut session, text)?;
        let asked = Pending { branch: self.active, turn, text: text.to_owned() };
        Ok(Asked { session, prompt, room, asked })
    }

    /// Learns to tell what turns have to do with a question by what the model itself makes of them.
    fn fit(&mut self) -> Result<(), ApiError> {
        let own = OwnStates::new(self.served.model.decoder()?);
        let fitted = own.calibrated(self.served.tokenizer()?);
        self.scorer = Some(fitted.map_err(|error| ApiError::field("relevance", error.to_string()))?);
        Ok(())
    }

    fn judge(&mut self, session: &mut Session, text: &str) -> Result<(), ApiError> {
        let Some(fitted) = &self.scorer else { return Ok(()) };
        let tokenizer = self.served.tokenizer()?;
        let scorer = self.scorers.entry(self.active).or_insert_with(|| fitted.clone());
        let tokens = tokenizer.encode_literal(text, false)?;
        let newest = TurnContent { text, tokens: &tokens };
        session.mask_irrelevant(scorer, newest, |tokens| Ok(tokenizer.decode(tokens, true)))?;
        // Whom the client hid stays so, whatever is asked.
        let Some(told) = self.told.get(&self.active) else { return Ok(()) };
        let is_hidden = |turn: TurnId| told.entry(turn.0).is_some_and(|entry| entry.hidden);
        let shown = session.all_turns().filter(|turn| turn.hidden.is_none()).map(|turn| turn.id);
        let wrongly: Vec<TurnId> = shown.filter(|turn| is_hidden(*turn)).collect();
        for turn in wrongly {
            session.mask(turn, true)?;
        }
        Ok(())
    }

    /// Keeps what a question came to.
    pub fn answered(&mut self, asked: Pending, outcome: Outcome) -> Result<(), ApiError> {
        let summary = outcome.summary;
        *self.tree.session(asked.branch)? = outcome.session;
        let head = self.told.get(&asked.branch).and_then(|told| told.head.clone());
        // Unlike whoever waits for one, who reads a conversation later has not ended its answers.
        let finish = match summary.finish {
            Finish::Cancelled => "cancelled",
            finish => reason(finish, 0),
        };
        let answer = Answer {
            text: summary.text,
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
        self.enter(entry)?;
        self.transcript().open = true;
        // What is left open now is closed before anything else is done, so that what is done is done to the same tokens.
        let _ = self.close();
        self.measure()
    }

    fn measure(&mut self) -> Result<(), ApiError> {
        let session = self.tree.session(self.active)?;
        if let Some(told) = self.told.get_mut(&self.active) {
            told.measure(session);
        }
        Ok(())
    }

    /// Answers with a head from now on; nothing names the model's own.
    pub fn wear(&mut self, head: Option<&str>) -> Result<Value, ApiError> {
        self.close()?;
        let session = self.tree.session(self.active)?;
        // Whoever names a head wants no other, and keeps the one that is worn.
        let mut dressed = session.clone();
        let worn = dressed.use_head(head.unwrap_or(OWN_HEAD));
        if let Some(source) = worn.instead {
            let name = head.unwrap_or(OWN_HEAD).to_owned();
            return Err(ApiError::from(RuntimeError::HeadNotWorn { name, source }).of_head());
        }
        *session = dressed;
        self.transcript().head = head.map(str::to_owned);
        Ok(json!({ "waited": worn.waited, "took_ms": worn.took.as_secs_f64() * 1e3 }))
    }

    /// Goes back to before a turn.
    pub fn rewind(&mut self, turn: u64) -> Result<(), ApiError> {
        let start = self.start_of(turn)?;
        let mut session = self.tree.session(self.active)?.clone();
        session.rewind(start);
        let told = rewound(self.transcript().clone(), &mut session, turn)?;
        *self.tree.session(self.active)? = session;
        *self.transcript() = told;
        self.scorers.remove(&self.active);
        Ok(())
    }

    /// A branch that leaves the active one before a turn, or where it is now, and is active from then on.
    pub fn fork(&mut self, turn: Option<u64>) -> Result<BranchId, ApiError> {
        if self.tree.iter().count() >= MOST_BRANCHES {
            return Err(ApiError::too_many(format!(
                "the session has {MOST_BRANCHES} branches, and no more may be; end or promote one first"
            )));
        }
        let (branch, told) = match turn {
            Some(turn) => {
                let start = self.start_of(turn)?;
                let branch = self.tree.fork_at(self.active, start)?;
                match rewound(self.transcript().clone(), self.tree.session(branch)?, turn) {
                    Ok(told) => (branch, told),
                    Err(error) => {
                        self.tree.drop_branch(branch)?;
                        return Err(error);
                    }
                }
            }
            None => {
                self.close()?;
                let scorer = self.scorers.get(&self.active).cloned();
                let branch = self.tree.fork(self.active)?;
                self.scorers.extend(scorer.map(|scorer| (branch, scorer)));
                (branch, self.transcript().clone())
            }
        };
        self.told.insert(branch, told);
        self.active = branch;
        Ok(branch)
    }

    /// The token that a turn of the active branch begins with.
    fn start_of(&mut self, turn: u64) -> Result<usize, ApiError> {
        if self.transcript().entry(turn).is_some_and(|entry| entry.kind == Kind::Opening) {
            return Err(ApiError::field(
                "turn",
                "what comes before the first question stays; begin another session",
            ));
        }
        self.close()?;
        let session = self.tree.session(self.active)?;
        let known = session.all_turns().find(|held| held.id.0 == turn).map(|held| held.pinned);
        let Some(pinned) = known else { return Err(no_turn(turn)) };
        // This computes again what was lost, so that all of it is in the cache.
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
            let told = self.told.remove(&branch).unwrap_or_default();
            self.told.insert(place, told);
            self.scorers.remove(&place);
            self.scorers.remove(&branch);
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
        self.told.retain(|id, _| left.contains(id));
        self.scorers.retain(|id, _| left.contains(id));
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
            .ok_or_else(|| ApiError::nowhere(format!("there is no branch {branch}")))
    }

    /// Whether a turn stays when room is needed, and whether later tokens see it; nothing where that stays as it is.
    pub fn mark(&mut self, turn: u64, pinned: Option<bool>, hidden: Option<bool>) -> Result<(), ApiError> {
        self.close()?;
        let capacity = self.capacity.turns;
        let is_opening = self.transcript().entry(turn).is_some_and(|entry| entry.kind == Kind::Opening);
        let session = self.tree.session(self.active)?;
        let Some(held) = session.all_turns().find(|held| held.id.0 == turn).cloned() else {
            return Err(no_turn(turn));
        };
        if held.hidden == Some(firebox_runtime::HiddenReason::Superseded) && hidden.is_some() {
            return Err(ApiError::field("hidden", "another fact has taken its place; supersede that one"));
        }
        if is_opening && (pinned == Some(false) || hidden == Some(true)) {
            return Err(ApiError::field("turn", "what comes before the first question stays"));
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

    pub fn add_fact(&mut self, text: &str) -> Result<u64, ApiError> {
        self.close()?;
        let (turn, tokens) = self.conversation()?.add_fact(text).map_err(of_fact)?;
        self.note(turn, Kind::Fact, text, tokens)?;
        Ok(turn.0)
    }

    /// Puts a fact in the place of another.
    pub fn supersede(&mut self, fact: u64, text: &str) -> Result<u64, ApiError> {
        let entry = self.transcript().entry(fact);
        if entry.is_none_or(|entry| entry.kind != Kind::Fact) {
            return Err(ApiError::nowhere(format!("there is no fact {fact}")));
        }
        if entry.is_some_and(|entry| entry.superseded_by.is_some()) {
            return Err(ApiError::field("fact", "another has taken its place; supersede that one"));
        }
        self.close()?;
        let (turn, tokens) = self.conversation()?.supersede(TurnId(fact), text).map_err(of_fact)?;
        for entry in &mut self.transcript().entries {
            if entry.turn == fact {
                entry.superseded_by = Some(turn.0);
            }
        }
        self.note(turn, Kind::Fact, text, tokens)?;
        Ok(turn.0)
    }

    /// Writes the active branch to a file, in the place of the one that may be there.
    pub fn save(&mut self, path: &Path) -> Result<(), ApiError> {
        self.close()?;
        self.measure()?;
        let note = Note {
            capacity: self.capacity,
            relevance: self.scorer.is_some(),
            transcript: self.transcript().clone(),
        };
        let note = serde_json::to_string(&note).map_err(|error| ApiError::internal(error.to_string()))?;
        Ok(self.tree.session(self.active)?.save_with_note(path, &self.served.model, &note)?)
    }

    /// As clients see it.
    pub fn value(&mut self) -> Result<Value, ApiError> {
        let infos: Vec<_> = self.tree.iter().collect();
        let branches: Vec<Value> = infos
            .into_iter()
            .map(|info| {
                let told = self.told.get(&info.id);
                let last = told.and_then(|told| told.entries.iter().rfind(|entry| entry.kind == Kind::Turn));
                json!({
                    "id": info.id.0,
                    "parent": info.parent.map(|parent| parent.0),
                    // Of what both had in common this one may have forgotten some.
                    "from": info.from.min(info.tokens),
                    "tokens": info.tokens,
                    "active": info.id == self.active,
                    "head": told.and_then(|told| told.head.as_ref()),
                    "turns": told.map_or(0, |told| told.entries.iter().filter(|entry| entry.kind == Kind::Turn).count()),
                    "last": last.map(|entry| &entry.text),
                })
            })
            .collect();
        let (model, capacity, relevance) = (self.served.name.clone(), self.capacity, self.scorer.is_some());
        let told = self.transcript().clone();
        let session = self.tree.session(self.active)?;
        let (turns, facts) = held(session);
        Ok(json!({
            "model": model,
            "head": told.head,
            "branch": self.active.0,
            "tokens": session.tokens().len(),
            "turn_tokens": { "held": turns, "capacity": capacity.turns },
            "fact_tokens": { "held": facts, "capacity": capacity.facts },
            "cache_bytes": session.cache_bytes(),
            "relevance": relevance,
            "branches": branches,
            "turns": told.value(session),
        }))
    }
}

/// What was said in a session that has gone back to before a turn. Facts whose place nobody has taken any more are what the client
/// had made them.
fn rewound(mut told: Transcript, session: &mut Session, turn: u64) -> Result<Transcript, ApiError> {
    let back = told.rewind(turn);
    told.open = false;
    for fact in back {
        let hidden = told.entry(fact).is_some_and(|entry| entry.hidden);
        if session.all_turns().any(|held| held.id.0 == fact) {
            session.mask(TurnId(fact), hidden)?;
        }
    }
    Ok(told)
}

fn no_turn(turn: u64) -> ApiError {
    ApiError::nowhere(format!("turn {turn} is not remembered, or not any more"))
}

fn of_fact(error: RuntimeError) -> ApiError {
    match error {
        RuntimeError::Cache(error @ CacheError::FactsFull { .. }) => {
            ApiError::field("text", error.to_string())
        }
        RuntimeError::Cache(CacheError::NoSuchTurn { turn }) => no_turn(turn.0),
        error => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use firebox_runtime::engine::HostConfig;
    use firebox_runtime::relevance::{Calibration, LabelledPair};
    use firebox_runtime::schedule::Priority;
    use firebox_runtime::telemetry::Telemetry;
    use firebox_runtime::{Model, device};

    use super::*;

    fn dialogue() -> Dialogue {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/pocket");
        let model = Model::open(path, &device("cpu").unwrap()).unwrap();
        let (session, engine) = (model.session().unwrap(), Engine::start(HostConfig::default()).unwrap());
        let served = Served::new("pocket", model, Priority::default(), &engine, &Telemetry::default());
        let capacity = Capacity::of(1024, None, None);
        Dialogue::around(Arc::new(served.unwrap()), session, capacity, Transcript::default())
    }

    /// One to which everything has to do with everything.
    fn scorer(served: &Served) -> Similarity<OwnStates> {
        let said = |tokens| TurnContent { text: "", tokens };
        let [a, b] = ["My brother is called Tom.", "Two and two is four."]
            .map(|text| served.tokenizer().unwrap().encode_literal(text, false).unwrap());
        let pairs = [(&a, &a, true), (&b, &b, true), (&a, &b, false), (&b, &a, false)].map(
            |(newest, earlier, related)| LabelledPair {
                newest: said(newest),
                earlier: said(earlier),
                related,
            },
        );
        let states = OwnStates::new(served.model.decoder().unwrap()).with_layers(0);
        let all = Calibration { threshold: -2.0, slope: 1.0, accuracy: 1.0 };
        Similarity::fit(states, &pairs).unwrap().with_calibration(all)
    }

    /// Asks, and keeps the question without an answer.
    fn ask(dialogue: &mut Dialogue, text: &str) -> u64 {
        let Asked { mut session, prompt, asked, .. } = dialogue.ask(text).unwrap();
        session.feed(&prompt).unwrap();
        *dialogue.tree.session(asked.branch).unwrap() = session;
        dialogue.note(asked.turn, Kind::Turn, text, prompt.len()).unwrap();
        asked.turn.0
    }

    #[test]
    fn what_the_client_hid_is_not_shown_for_being_relevant() {
        let mut dialogue = dialogue();
        dialogue.scorer = Some(scorer(&dialogue.served));
        let text = "My brother is called Tom.";
        let turn = ask(&mut dialogue, text);
        let is_hidden = |dialogue: &mut Dialogue| {
            let session = dialogue.tree.session(dialogue.active).unwrap();
            session.all_turns().find(|held| held.id.0 == turn).unwrap().hidden.is_some()
        };
        ask(&mut dialogue, text);
        assert!(!is_hidden(&mut dialogue));
        dialogue.mark(turn, None, Some(true)).unwrap();
        ask(&mut dialogue, text);
        assert!(is_hidden(&mut dialogue));
        dialogue.fork(None).unwrap();
        ask(&mut dialogue, text);
        assert!(is_hidden(&mut dialogue), "in a branch as well");
        dialogue.mark(turn, None, Some(false)).unwrap();
        ask(&mut dialogue, text);
        assert!(!is_hidden(&mut dialogue));
    }

    /// There may have been no page for what closes an answer when that ended.
    #[test]
    fn what_is_left_open_is_closed_before_anything_changes() {
        let mut dialogue = dialogue();
        let turn = ask(&mut dialogue, "My brother is called Tom.");
        type Change = fn(&mut Dialogue, u64);
        let changes: [Change; 5] = [
            |dialogue, _| drop(dialogue.wear(None).unwrap()),
            |dialogue, turn| dialogue.mark(turn, None, Some(true)).unwrap(),
            |dialogue, turn| dialogue.mark(turn, Some(true), None).unwrap(),
            |dialogue, _| assert!(dialogue.add_fact("The user's dog is called Rex.").is_ok()),
            |dialogue, _| assert!(dialogue.fork(None).is_ok()),
        ];
        for (at, change) in changes.into_iter().enumerate() {
            dialogue.transcript().open = true;
            change(&mut dialogue, turn);
            assert!(!dialogue.transcript().open, "change {at}");
        }
    }
}
