//! A reference for sessions: one session of a resident model, without engine or server, to which the same
//! actions are applied.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use firebox_cache::{LayerKv, LayerLayout, SequenceCache};
use firebox_runtime::heads::HeadPoolConfig;
use firebox_runtime::{
    BranchId, Branches, Capacity, Conversation, Generation, GenerationConfig, HiddenReason, Model, OWN_HEAD,
    Question, Role, SamplerConfig, Script, Session, SessionFile, TurnId, TurnKind, device,
};
use firebox_text::{Message, TemplateOptions};

use crate::action::{Action, Answered, Beginning};
use crate::client::root;
use crate::servers::{HEADS, MODELS};

/// Tokens fed to both at the end, to compare the caches bit by bit.
const PROBE: [u32; 5] = [20, 41, 62, 83, 104];

/// The models, for one thread at a time.
pub struct References(Mutex<BTreeMap<&'static str, Reference>>);

struct Reference {
    model: Model,
    script: Script,
    is_recurrent: bool,
}

/// The result of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Compared {
    pub answers: u64,
    pub tokens: u64,
}

impl References {
    pub fn open() -> Self {
        let reference = |(name, path): (&'static str, &str)| {
            let model = Model::open(root(path), &device("cpu").unwrap()).unwrap();
            let model =
                if name == "pocket" { model.with_heads(HeadPoolConfig::patient()).unwrap() } else { model };
            // Their files stay open and must not count as leaks.
            for head in HEADS.into_iter().flatten().filter(|_| name == "pocket") {
                assert!(model.session().unwrap().use_head(head).fallback_reason.is_none());
            }
            let script = Script::new(&model).unwrap();
            (name, Reference { model, script, is_recurrent: name == "recurrent" })
        };
        Self(Mutex::new(MODELS.map(reference).into()))
    }

    /// Compares answers and the saved file of a session with the reference.
    pub fn compare(
        &self,
        beginning: &Beginning,
        actions: &[Action],
        saved: &Path,
    ) -> Result<Compared, String> {
        let references = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut replay = Replay::begin(&references[beginning.model], beginning);
        for (at, action) in actions.iter().enumerate() {
            replay.act(action).map_err(|wrong| format!("action {at}: {wrong}"))?;
        }
        replay.compare(saved)
    }

    /// Answers a first message.
    pub fn chat(&self, model: &str, text: &str, most: usize) -> Answered {
        let Reference { model, script, .. } = &self.0.lock().unwrap_or_else(PoisonError::into_inner)[model];
        let mut prompt = script.beginning().unwrap();
        let messages = [Message::user(text)];
        let options = TemplateOptions::default();
        prompt.extend(script.template().encode(model.tokenizer().unwrap(), &messages, &options).unwrap());
        let mut session = model.session().unwrap();
        let context = model.decoder().unwrap().config().max_positions;
        let config = greedy(model).with_context(context).with_max_tokens(most);
        answer(model, &mut session, &prompt, config)
    }
}

fn greedy(model: &Model) -> GenerationConfig {
    GenerationConfig::new().with_end_tokens(model.end_tokens()).with_sampler(SamplerConfig::greedy())
}

fn answer(model: &Model, session: &mut Session, prompt: &[u32], config: GenerationConfig) -> Answered {
    let tokenizer = Some(model.tokenizer().unwrap().clone());
    let mut generation = Generation::begin(session, tokenizer, prompt, config).unwrap();
    while generation.next_piece().unwrap().is_some() {}
    let summary = generation.finish().unwrap();
    Answered { text: summary.text, tokens: summary.tokens.len() }
}

/// A turn or a fact, even if the session evicted it.
#[derive(Debug, Clone)]
struct Entry {
    turn: u64,
    superseded_by: Option<u64>,
}

/// State of a branch beside its session.
#[derive(Debug, Clone, Default)]
struct BranchState {
    entries: Vec<Entry>,
    head: Option<String>,
}

struct Replay<'p> {
    reference: &'p Reference,
    capacity: Capacity,
    tree: Branches,
    told: BTreeMap<BranchId, BranchState>,
    active: BranchId,
    compared: Compared,
}

impl<'p> Replay<'p> {
    fn begin(reference: &'p Reference, beginning: &Beginning) -> Self {
        let Beginning { system, facts, head, turn_tokens, fact_tokens, .. } = beginning;
        let capacity = Capacity { turns: *turn_tokens, facts: *fact_tokens };
        let tree = Branches::new(capacity.apply_to(reference.model.session().unwrap()));
        let (active, compared) = (tree.root(), Compared::default());
        let told = [(active, BranchState::default())].into();
        let mut replay = Self { reference, capacity, tree, told, active, compared };
        if let Some((turn, _)) = replay.conversation().open(system.as_deref()).unwrap() {
            replay.note(turn);
        }
        for fact in facts {
            let (turn, _) = replay.conversation().add_fact(fact).unwrap();
            replay.note(turn);
        }
        if head.is_some() {
            replay.set_head(head.as_deref());
        }
        replay
    }

    fn session(&mut self) -> &mut Session {
        self.tree.session(self.active).unwrap()
    }

    fn conversation(&mut self) -> Conversation<'_> {
        let session = self.tree.session(self.active).unwrap();
        Conversation::new(&self.reference.script, session, self.capacity)
    }

    fn told(&mut self) -> &mut BranchState {
        self.told.get_mut(&self.active).unwrap()
    }

    fn note(&mut self, turn: TurnId) {
        self.told().entries.push(Entry { turn: turn.0, superseded_by: None });
    }

    fn set_head(&mut self, head: Option<&str>) {
        let switched = self.session().use_head(head.unwrap_or(OWN_HEAD));
        assert!(switched.fallback_reason.is_none(), "{:?}", switched.fallback_reason);
        self.told().head = head.map(str::to_owned);
    }

    fn act(&mut self, action: &Action) -> Result<(), String> {
        match action {
            Action::Said { text, most, ignores_end, heard } => {
                return self.say(text, *most, *ignores_end, heard);
            }
            Action::SetHead(head) => self.set_head(head.as_deref()),
            Action::Forked(turn) => self.fork(*turn),
            Action::Switched(branch) => self.active = BranchId(*branch),
            Action::Promoted(branch) => self.promote(BranchId(*branch)),
            Action::Dropped(branch) => self.drop_branch(BranchId(*branch)),
            Action::Rewound(turn) => {
                let start = self.start_of(*turn);
                self.session().rewind(start);
                self.rewound(*turn);
            }
            Action::Pinned(turn, pinned) => self.session().pin(TurnId(*turn), *pinned).unwrap(),
            Action::Hidden(turn, hidden) => self.session().mask(TurnId(*turn), *hidden).unwrap(),
            Action::BranchState(text) => {
                let (turn, _) = self.conversation().add_fact(text).unwrap();
                self.note(turn);
            }
            Action::Superseded(fact, text) => {
                let (turn, _) = self.conversation().supersede(TurnId(*fact), text).unwrap();
                let entries = &mut self.told().entries;
                entries.iter_mut().find(|entry| entry.turn == *fact).unwrap().superseded_by = Some(turn.0);
                self.note(turn);
            }
            Action::Restored => self.restore(),
        }
        Ok(())
    }

    fn say(&mut self, text: &str, most: usize, ignores_end: bool, heard: &Answered) -> Result<(), String> {
        let Reference { model, script, .. } = self.reference;
        let mut session = self.session().clone();
        let asked = Conversation::new(script, &mut session, self.capacity).ask(text);
        let Question { turn, prompt, room, .. } = asked.map_err(|error| error.to_string())?;
        let config = greedy(model).with_max_tokens(most.min(room)).with_ignore_end(ignores_end);
        let said = answer(model, &mut session, &prompt, config);
        if said != *heard {
            return Err(format!("to {text:?} was heard {heard:?}, and {said:?} is said"));
        }
        *self.session() = session;
        self.note(turn);
        self.conversation().close().map_err(|error| error.to_string())?;
        self.compared.answers += 1;
        self.compared.tokens += said.tokens as u64;
        Ok(())
    }

    fn fork(&mut self, turn: Option<u64>) {
        let branch = match turn {
            Some(turn) => {
                let start = self.start_of(turn);
                self.tree.fork_at(self.active, start).unwrap()
            }
            None => self.tree.fork(self.active).unwrap(),
        };
        let told = self.told().clone();
        self.told.insert(branch, told);
        self.active = branch;
        if let Some(turn) = turn {
            self.rewound(turn);
        }
    }

    fn promote(&mut self, branch: BranchId) {
        let place = self.tree.promote(branch).unwrap();
        if place != branch {
            let told = self.told.remove(&branch).unwrap();
            self.told.insert(place, told);
        }
        self.active = place;
    }

    fn drop_branch(&mut self, branch: BranchId) {
        let parent = self.tree.iter().find(|info| info.id == branch).unwrap().parent.unwrap();
        self.tree.drop_branch(branch).unwrap();
        let left: Vec<BranchId> = self.tree.iter().map(|info| info.id).collect();
        self.told.retain(|id, _| left.contains(id));
        if !left.contains(&self.active) {
            self.active = parent;
        }
    }

    fn start_of(&mut self, turn: u64) -> usize {
        let session = self.session();
        let pinned = session.all_turns().find(|held| held.id.0 == turn).unwrap().pinned;
        // Pinning recomputes evicted tokens, so that all are in the cache.
        session.pin(TurnId(turn), pinned).unwrap();
        session.cache().tokens_of(TurnId(turn)).unwrap().start
    }

    /// Removes a turn and all after it. Facts that are no longer superseded return.
    fn rewound(&mut self, turn: u64) {
        let entries = &mut self.told().entries;
        let at = entries.iter().position(|entry| entry.turn == turn).unwrap();
        let gone: Vec<u64> = entries.drain(at..).map(|entry| entry.turn).collect();
        let back =
            entries.iter_mut().filter(|entry| entry.superseded_by.is_some_and(|by| gone.contains(&by)));
        let back: Vec<u64> = back
            .map(|entry| {
                entry.superseded_by = None;
                entry.turn
            })
            .collect();
        let session = self.session();
        for fact in back {
            if session.all_turns().any(|held| held.id.0 == fact) {
                session.mask(TurnId(fact), false).unwrap();
            }
        }
    }

    /// Continues as the only branch, as if freshly restored. Recurrent layers lose their earlier states, so
    /// these are saved and restored as well.
    fn restore(&mut self) {
        let told = self.told().clone();
        let session = if self.reference.is_recurrent {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("branch");
            let model = &self.reference.model;
            self.session().save(&path, model).unwrap();
            let kept = self.session().cache().pool().layout().kv_dtype;
            let saved = SessionFile::open(&path, model, kept).unwrap();
            let pool = self.session().cache().pool().clone();
            let mut session = self.capacity.apply_to(model.restored_in(&saved, &pool).unwrap());
            if let Some(head) = &told.head {
                session.use_head(head);
            }
            session
        } else {
            self.session().clone()
        };
        self.tree = Branches::new(session);
        self.active = self.tree.root();
        self.told = [(self.active, told)].into();
    }

    /// Compares with the saved file.
    fn compare(mut self, path: &Path) -> Result<Compared, String> {
        let (head, capacity, model) = (self.told().head.clone(), self.capacity, &self.reference.model);
        let session = self.session();
        let saved = SessionFile::open(path, model, session.cache().pool().layout().kv_dtype);
        let saved = saved.map_err(|error| error.to_string())?;
        let restored = model.restored_in(&saved, session.cache().pool());
        let mut restored = capacity.apply_to(restored.map_err(|error| error.to_string())?);
        if let Some(head) = head {
            restored.use_head(&head);
        }
        if restored.tokens() != session.tokens() {
            return Err(format!(
                "{:?} is remembered, and {:?} expected",
                restored.tokens(),
                session.tokens()
            ));
        }
        if turns(&restored) != turns(session) {
            return Err(format!("turns are {:?}, and {:?} expected", turns(&restored), turns(session)));
        }
        // Pinned turns may leave no room, but then in both.
        let probed = |session: &mut Session| -> Option<Vec<u32>> {
            session.begin_turn(&[Role::User]).unwrap();
            Some(session.feed(&PROBE).ok()?.into_iter().map(f32::to_bits).collect())
        };
        // Before the probe, which may evict turns.
        let apart = apart(restored.cache(), session.cache());
        if probed(&mut restored) != probed(session) {
            return Err(format!("what follows has other numbers; {apart}"));
        }
        Ok(self.compared)
    }
}

/// Describes the differences of two caches: positions, and in every layer the first token whose keys or values
/// differ, with the largest difference.
fn apart(found: &SequenceCache, expected: &SequenceCache) -> String {
    let lie = [found, expected].map(|cache| cache.outline().slot_ranges);
    let mut told = if lie[0] == lie[1] { "all lie alike".into() } else { format!("{lie:?}") };
    for (layer, layout) in expected.pool().layout().layers.iter().enumerate() {
        let LayerLayout::Attention { head_dim, .. } = *layout else { continue };
        let [found, expected] = [found, expected].map(|cache| numbers(cache, layer, head_dim));
        let differences = found.iter().zip(&expected).enumerate().filter_map(|(token, (found, expected))| {
            let most = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            (found != expected).then_some((token, most))
        });
        let differences: Vec<(usize, f32)> = differences.collect();
        if let Some((first, _)) = differences.first() {
            let most = differences.iter().map(|(_, most)| *most).fold(0.0, f32::max);
            told += &format!("; layer {layer} from token {first} on, {}, by {most:e}", differences.len());
        }
    }
    told
}

/// Keys and values of a layer by token.
fn numbers(cache: &SequenceCache, layer: usize, head_dim: usize) -> Vec<Vec<f32>> {
    let mut tokens = Vec::new();
    for run in cache.stored(layer).unwrap_or_default() {
        let LayerKv::Attention { keys, values } = run else { continue };
        let sides = [keys, values].map(|side| side.dequantize(head_dim).swap_dims(0, 1));
        let [count, heads, width] = sides[0].dims();
        let [keys, values] = sides.map(|side| side.try_into_vec_as::<f32>().unwrap());
        let each = heads * width;
        tokens.extend((0..count).map(|at| [&keys, &values].map(|side| &side[at * each..][..each]).concat()));
    }
    tokens
}

fn turns(session: &Session) -> Vec<(TurnId, usize, TurnKind, Option<HiddenReason>, bool)> {
    session.all_turns().map(|turn| (turn.id, turn.tokens, turn.kind, turn.hidden, turn.pinned)).collect()
}
