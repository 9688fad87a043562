//! A conversation that a session reads turn by turn.

use std::sync::Arc;

use firebox_cache::{AfterEviction, CacheError, Role, TurnId, WholeTurns};
use firebox_text::{ChatEncoder, ChatTemplate, TemplateOptions, TextError};
use serde::{Deserialize, Serialize};

use crate::condenser::{Condenser, FactUpdate, TextCondensation};
use crate::session::turns::DEFAULT_FACT_TOKENS;
use crate::{Model, RuntimeError, Session};

/// The default capacity for turns in tokens, for models that were trained for as many.
const DEFAULT_TURN_TOKENS: usize = 1536;

/// How much of a conversation is kept, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capacity {
    /// Tokens of turns. The oldest are evicted as a whole.
    pub turns: usize,
    /// Tokens of facts.
    pub facts: usize,
}

impl Capacity {
    /// Returns these capacities, or defaults for a model that was trained for `context` tokens.
    pub fn new(context: usize, turns: Option<usize>, facts: Option<usize>) -> Self {
        let facts = facts.unwrap_or_else(|| DEFAULT_FACT_TOKENS.min(context / 4));
        let turns = turns.unwrap_or_else(|| DEFAULT_TURN_TOKENS.min(context.saturating_sub(facts)));
        Self { turns, facts }
    }

    /// Returns the default capacities for a model: within the context that it was trained for, and within the tokens that its
    /// memory was planned for.
    pub fn for_model(model: &Model) -> Result<Self, RuntimeError> {
        let context = model.decoder()?.config().max_positions.min(model.planned_tokens());
        Ok(Self::new(context, None, None))
    }

    /// Returns whether both fit into a context.
    pub fn fits(self, context: usize) -> bool {
        self.turns.checked_add(self.facts).is_some_and(|all| all <= context)
    }

    /// Limits a session to these capacities.
    pub fn apply_to(self, session: Session) -> Session {
        let policy = WholeTurns { after: AfterEviction::CompactPositions };
        session.with_turn_capacity(self.turns, policy).with_fact_capacity(self.facts)
    }
}

/// The chat template of a model with its tokenizer, which write conversations as tokens.
#[derive(Debug)]
pub struct Script {
    model: Model,
    template: Arc<ChatTemplate>,
    options: TemplateOptions,
    /// Whether the template was given or is the model's own, rather than the plain one.
    is_own: bool,
}

impl Script {
    /// Uses the model's template, or one that writes line after line if it has none.
    pub fn new(model: &Model) -> Result<Self, RuntimeError> {
        let own = match model.tokenizer() {
            Ok(tokenizer) => ChatTemplate::new(model.checkpoint().text(), tokenizer),
            Err(_) => Err(TextError::MissingChatTemplate),
        };
        match own {
            Ok(template) => Self::with_template(model, Some(template)),
            Err(TextError::MissingChatTemplate) => Self::with_template(model, None),
            Err(error) => Err(error.into()),
        }
    }

    /// Uses this template, or one that writes line after line.
    pub fn with_template(model: &Model, template: Option<ChatTemplate>) -> Result<Self, RuntimeError> {
        let is_own = template.is_some();
        let template = Arc::new(template.map_or_else(ChatTemplate::plain, Ok)?);
        Ok(Self { model: model.clone(), template, options: TemplateOptions::default(), is_own })
    }

    /// Returns whether conversations are written line after line, for want of a template.
    pub fn is_plain(&self) -> bool {
        !self.is_own
    }

    /// Enables or disables reasoning of models that support both; `None` leaves it to the template.
    pub fn set_thinking(&mut self, thinking: Option<bool>) {
        self.options.enable_thinking = thinking;
    }

    /// Returns what [`set_thinking`](Self::set_thinking) has set.
    pub fn thinking(&self) -> Option<bool> {
        self.options.enable_thinking
    }

    /// Returns the template.
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    /// Returns the tokens that begin every text, unless the template writes them.
    pub fn beginning(&self) -> Result<Vec<u32>, RuntimeError> {
        let tokenizer = self.model.tokenizer()?;
        let begins = !self.is_own && tokenizer.adds_bos();
        Ok(tokenizer.bos_id().filter(|_| begins).into_iter().collect())
    }

    /// The parts that conversations are written from.
    pub fn parts(&self) -> Result<ChatEncoder<'_>, RuntimeError> {
        Ok(ChatEncoder::new(&self.template, self.model.tokenizer()?, &self.options))
    }

    /// Returns the tokens before the first question, which are never evicted.
    pub fn opening(&self, system: Option<&str>) -> Result<Vec<u32>, RuntimeError> {
        let (parts, mut tokens) = (self.parts()?, self.beginning()?);
        match parts.opening(system)? {
            Some(opening) => tokens.extend(opening),
            None => {
                // The template makes the system text part of the first question, which may be evicted.
                tokens.extend(parts.opening(None)?.unwrap_or_default());
                if let Some(system) = system {
                    tokens.extend(parts.system_message(system)?);
                }
            }
        }
        Ok(tokens)
    }
}

/// A conversation: a session that reads it turn by turn and evicts the oldest turns, as [`Capacity`] says. To keep the state
/// from before a failure, continue in a clone of the session. [`Chat`](crate::Chat) does so, and owns session and script.
///
/// ```no_run
/// use firebox_runtime::{Capacity, Conversation, Generation, GenerationConfig, Model, Script, device};
///
/// let model = Model::open("models/chat", &device("cpu")?)?;
/// let (script, capacity) = (Script::new(&model)?, Capacity::new(2048, None, None));
/// let mut session = capacity.apply_to(model.session()?);
/// let mut conversation = Conversation::new(&script, &mut session, capacity);
/// conversation.open(Some("Be brief."))?;
/// let asked = conversation.ask("Who are you?")?;
/// let config = GenerationConfig::new().with_max_tokens(asked.room);
/// let tokenizer = Some(model.tokenizer()?.clone());
/// let mut answer = Generation::begin(&mut session, tokenizer, &asked.prompt, config)?;
/// while let Some(piece) = answer.next_piece()? {
///     print!("{}", piece.text);
/// }
/// answer.finish()?;
/// Conversation::new(&script, &mut session, capacity).close()?;
/// # Ok::<(), firebox_runtime::RuntimeError>(())
/// ```
#[derive(Debug)]
pub struct Conversation<'a> {
    script: &'a Script,
    session: &'a mut Session,
    capacity: Capacity,
}

/// The facts of a conversation after a [`FactUpdate`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CondensedFacts {
    /// The condensed fact, unless the facts had changed.
    pub condensed: Option<CondensedFact>,
    /// The new fact, and the number of its tokens.
    pub added: (TurnId, usize),
    /// The text of the new fact.
    pub text: String,
}

/// A fact that several were condensed to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CondensedFact {
    /// The fact.
    pub turn: TurnId,
    /// Its text.
    pub text: String,
    /// The number of its tokens.
    pub tokens: usize,
    /// The facts that it replaced.
    pub facts: Vec<TurnId>,
}

/// A question whose turn was begun.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Question {
    /// The turn of the question and its answer.
    pub turn: TurnId,
    /// The tokens that the answer follows.
    pub prompt: Vec<u32>,
    /// The most tokens of the answer.
    pub room: usize,
}

impl<'a> Conversation<'a> {
    /// Continues the conversation that a session has read.
    pub fn new(script: &'a Script, session: &'a mut Session, capacity: Capacity) -> Self {
        Self { script, session, capacity }
    }

    /// Reads what comes before the first question, with a system text. Returns its turn and the number of its tokens, if it has
    /// any.
    pub fn open(&mut self, system: Option<&str>) -> Result<Option<(TurnId, usize)>, RuntimeError> {
        let opening = self.script.opening(system)?;
        if opening.is_empty() {
            return Ok(None);
        }
        self.expect_room(opening.len(), self.capacity.turns)?;
        let turn = self.session.begin_turn(&[Role::System])?;
        self.session.feed(&opening)?;
        self.session.pin(turn, true)?;
        Ok(Some((turn, opening.len())))
    }

    /// Reads what the template writes after an answer. Call it before anything else follows the answer.
    pub fn close(&mut self) -> Result<(), RuntimeError> {
        let closing = self.script.parts()?.closing()?;
        if !closing.is_empty() {
            self.session.feed(&closing)?;
        }
        Ok(())
    }

    /// Begins the turn of a question. The caller feeds its prompt.
    pub fn ask(&mut self, text: &str) -> Result<Question, RuntimeError> {
        let parts = self.script.parts()?;
        let (prompt, closing) = (parts.question(text)?, parts.closing()?.len());
        let room = self.capacity.turns.saturating_sub(self.session.pinned_tokens());
        let taken = prompt.len() + closing;
        self.expect_room(taken, room)?;
        let turn = self.session.begin_turn(&[Role::User, Role::Assistant])?;
        Ok(Question { turn, prompt, room: room - taken })
    }

    /// Adds a fact, which is not evicted with turns. Returns the fact and the number of its tokens.
    pub fn add_fact(&mut self, text: &str) -> Result<(TurnId, usize), RuntimeError> {
        let tokens = self.script.parts()?.system_message(text)?;
        Ok((self.session.add_fact(&tokens)?, tokens.len()))
    }

    /// Replaces a fact. Returns the new fact and the number of its tokens.
    pub fn supersede(&mut self, fact: TurnId, text: &str) -> Result<(TurnId, usize), RuntimeError> {
        let tokens = self.script.parts()?.system_message(text)?;
        Ok((self.session.supersede(fact, &tokens)?, tokens.len()))
    }

    /// Begins to condense facts in the background, to make room for one that [does not fit](CacheError::FactsFull). `facts`
    /// are the texts of the conversation's visible facts. Continue the conversation, and [apply](Self::apply_facts) the update
    /// between two turns once it is finished.
    pub fn make_room_for_fact(
        &self,
        facts: Vec<(TurnId, String)>,
        added: &str,
        condenser: Arc<dyn Condenser>,
    ) -> Result<FactUpdate, RuntimeError> {
        let (parts, tokenizer) = (self.script.parts()?, self.script.model.tokenizer()?.clone());
        let (capacity, tokens) = (self.capacity.facts, parts.system_message(added)?.len());
        let facts_full = |tokens| Err(CacheError::FactsFull { tokens, capacity }.into());
        if tokens > capacity || facts.is_empty() {
            return facts_full(tokens);
        }
        let room = capacity - tokens;
        let (template, options) = (self.script.template.clone(), self.script.options.clone());
        let fits = move |text: &str| {
            let written = ChatEncoder::new(&template, &tokenizer, &options).system_message(text);
            written.is_ok_and(|tokens| tokens.len() <= room)
        };
        let (facts, texts): (Vec<TurnId>, Vec<String>) = facts.into_iter().unzip();
        let condensed = TextCondensation::begin(texts.join("\n"), condenser, fits)?;
        Ok(FactUpdate { condensed, facts, added: added.to_owned() })
    }

    /// Replaces facts by their condensed form and adds the new one: completely, or not at all. Waits until the update is
    /// finished. If a fact has changed since, the new one is added without condensing.
    pub fn apply_facts(&mut self, update: FactUpdate) -> Result<CondensedFacts, RuntimeError> {
        let FactUpdate { condensed, facts, added } = update;
        let condensed = condensed.finish()?;
        let parts = self.script.parts()?;
        let mut session = self.session.clone();
        session.flush()?;
        let visible = session.visible_facts();
        let mut replaced = None;
        if facts.iter().all(|fact| visible.contains(fact)) {
            let (tokens, capacity) =
                (session.fact_tokens() + parts.system_message(&added)?.len(), self.capacity.facts);
            let text = condensed.ok_or(CacheError::FactsFull { tokens, capacity })?;
            let tokens = parts.system_message(&text)?;
            let turn = session.replace_facts(&facts, &tokens)?;
            replaced = Some(CondensedFact { turn, text, tokens: tokens.len(), facts });
        }
        let tokens = parts.system_message(&added)?;
        let turn = session.add_fact(&tokens)?;
        *self.session = session;
        Ok(CondensedFacts { condensed: replaced, added: (turn, tokens.len()), text: added })
    }

    /// Refuses a turn that leaves no token for an answer.
    fn expect_room(&self, tokens: usize, room: usize) -> Result<(), RuntimeError> {
        if tokens < room {
            return Ok(());
        }
        Err(CacheError::TurnTooLong { tokens: tokens + 1, room, capacity: self.capacity.turns }.into())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::UNIX_EPOCH;

    use firebox_cache::{KvType, PAGE_TOKENS, PageLedger, PagePool, Turn};
    use firebox_model::ModelError;
    use firebox_text::Message;

    use super::*;
    use crate::{device, likeliest};

    fn model() -> Model {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/pocket");
        Model::open(path, &device("cpu").unwrap()).unwrap()
    }

    #[test]
    fn turns_add_up_to_the_whole_conversation() {
        let model = model();
        let (script, capacity) = (Script::new(&model).unwrap(), Capacity::new(512, None, None));
        let mut session = capacity.apply_to(model.session().unwrap());
        let mut messages = vec![Message::system("Be brief.")];
        let (opening, tokens) =
            Conversation::new(&script, &mut session, capacity).open(Some("Be brief.")).unwrap().unwrap();
        assert_eq!(session.tokens().len(), tokens);
        for (question, answer) in [("Who are you?", "Nobody."), ("And now?", "Somebody.")] {
            let asked = Conversation::new(&script, &mut session, capacity).ask(question).unwrap();
            session.feed(&asked.prompt).unwrap();
            messages.push(Message::user(question));
            let whole =
                script.template().encode(model.tokenizer().unwrap(), &messages, &script.options).unwrap();
            assert_eq!(session.tokens(), [script.beginning().unwrap(), whole].concat());
            session.feed(&model.tokenizer().unwrap().encode(answer, false).unwrap()).unwrap();
            messages.push(Message::assistant(answer));
            Conversation::new(&script, &mut session, capacity).close().unwrap();
        }
        assert!(session.all_turns().find(|turn| turn.id == opening).unwrap().pinned);
    }

    /// A ledger that refuses pages once it is set to.
    #[derive(Debug, Default)]
    struct Scarce(AtomicBool);

    impl PageLedger for Scarce {
        fn may_allocate(&self, bytes: usize) -> bool {
            self.has_headroom(bytes)
        }

        fn has_headroom(&self, _: usize) -> bool {
            !self.0.load(Ordering::Relaxed)
        }

        fn freed(&self, _: usize) {}
    }

    /// Makes turns fail: after their first chunk, or for want of pages.
    #[derive(Debug, Default)]
    struct Faults {
        cancel: Arc<AtomicBool>,
        pages: Arc<Scarce>,
    }

    impl Faults {
        /// A session whose turns come to fail, in pieces of a few tokens.
        fn session(&self, model: &Model) -> Session {
            let layout = model.decoder().unwrap().layout(KvType::default());
            let pool = PagePool::with_ledger(layout, self.pages.clone());
            model.session_in(&pool).unwrap().with_chunk(8).with_cancel(self.cancel.clone())
        }
    }

    /// All but when turns began.
    fn state(session: &Session) -> (Vec<u32>, Vec<Turn>, usize) {
        let turns = session.all_turns().map(|turn| Turn { began: UNIX_EPOCH, ..turn.clone() });
        (session.tokens().to_vec(), turns.collect(), session.cache().position())
    }

    /// Runs a session in which a turn fails before each one that succeeds, and compares it with a session without
    /// failures. `ask` begins a turn and returns what to read of it. Returns the session.
    fn goes_back(
        faults: &Faults,
        begin: impl Fn() -> Session,
        ask: impl Fn(&mut Session, &str) -> Vec<u32>,
        long: &str,
    ) -> Session {
        let (mut undisturbed, mut session) = (begin(), begin());
        for question in ["Who are you?", "And now?", "Where is that?", "How far?", "And then?", "Why?"] {
            for cancels in [true, false] {
                let before = session.clone();
                let prompt = ask(&mut session, long);
                let fault = if cancels { &*faults.cancel } else { &faults.pages.0 };
                fault.store(true, Ordering::Relaxed);
                let came = session.feed(&prompt);
                fault.store(false, Ordering::Relaxed);
                match came {
                    Err(RuntimeError::Cancelled) => assert!(cancels && session.tokens() != before.tokens()),
                    Err(
                        RuntimeError::Cache(CacheError::PoolExhausted { .. })
                        | RuntimeError::Model(ModelError::Cache(CacheError::PoolExhausted { .. })),
                    ) => assert!(!cancels),
                    // It may have had all the pages it needs.
                    came => assert!(came.is_ok() && !cancels && prompt.len() < PAGE_TOKENS, "{came:?}"),
                }
                session = before;
                assert_eq!(state(&session), state(&undisturbed), "{question}, {cancels}");
            }
            let said = [&mut undisturbed, &mut session].map(|session| {
                let prompt = ask(session, question);
                let logits = session.feed(&prompt).unwrap();
                let after = session.feed(&[likeliest(&logits)]).unwrap();
                (logits, after)
            });
            assert_eq!(said[0], said[1], "{question}");
            assert_eq!(state(&session), state(&undisturbed), "{question}");
        }
        session
    }

    #[test]
    fn going_back_to_before_a_turn_that_fails_leaves_the_conversation_as_it_was() {
        let (model, faults) = (model(), Faults::default());
        let script = Script::new(&model).unwrap();
        for (turns, words, forgets) in [(48, 10, true), (900, 100, false)] {
            let capacity = Capacity { turns, facts: 32 };
            let begin = || {
                let mut session = capacity.apply_to(faults.session(&model));
                Conversation::new(&script, &mut session, capacity).open(Some("Be brief.")).unwrap();
                session
            };
            let ask = |session: &mut Session, text: &str| {
                let mut conversation = Conversation::new(&script, session, capacity);
                if conversation.session.all_turns().count() > 1 {
                    conversation.close().unwrap();
                }
                conversation.ask(text).unwrap().prompt
            };
            let session = goes_back(&faults, begin, ask, &"and then ".repeat(words));
            assert_eq!(session.all_turns().count() < 7, forgets, "the opening and six questions");
        }
    }

    /// Layers that remember no tokens go back as well.
    #[test]
    fn going_back_leaves_recurrent_layers_as_they_were() {
        let (model, faults) =
            (crate::session::save::tests::model("reference/qwen3_5_text"), Faults::default());
        let ask = |session: &mut Session, text: &str| {
            session.begin_turn(&[Role::User]).unwrap();
            text.bytes().map(|byte| 3 + u32::from(byte)).collect::<Vec<u32>>()
        };
        goes_back(&faults, || faults.session(&model), ask, &"and then ".repeat(30));
    }

    #[test]
    fn texts_without_room_are_refused_and_change_nothing() {
        let model = model();
        let (script, capacity) = (Script::new(&model).unwrap(), Capacity { turns: 24, facts: 24 });
        let mut session = capacity.apply_to(model.session().unwrap());
        let long = "and then ".repeat(20);
        let mut conversation = Conversation::new(&script, &mut session, capacity);
        for refused in [conversation.open(Some(&long)).map(drop), conversation.ask(&long).map(drop)] {
            assert!(matches!(
                refused,
                Err(RuntimeError::Cache(CacheError::TurnTooLong { capacity: 24, .. }))
            ));
        }
        let full = conversation.add_fact(&long).map(drop);
        assert!(matches!(full, Err(RuntimeError::Cache(CacheError::FactsFull { .. }))));
        assert!(session.tokens().is_empty() && session.all_turns().next().is_none());

        // A fact takes nothing from turns, be it pinned.
        let mut conversation = Conversation::new(&script, &mut session, capacity);
        let before = conversation.ask("Hi").unwrap().room;
        let (fact, _) = conversation.add_fact("I am Ada.").unwrap();
        session.pin(fact, true).unwrap();
        assert_eq!(Conversation::new(&script, &mut session, capacity).ask("Hi").unwrap().room, before);
    }

    /// A condenser that keeps the first sentence.
    #[derive(Debug)]
    struct First;

    impl Condenser for First {
        fn condense(&self, text: &str, fits: &mut dyn FnMut(&str) -> bool) -> Option<String> {
            let first = text.lines().next()?.to_owned();
            fits(&first).then_some(first)
        }
    }

    #[test]
    fn facts_that_do_not_fit_are_condensed_between_two_turns() {
        let model = model();
        let script = Script::new(&model).unwrap();
        let facts = ["My dog is called Rex.", "My brother is called Tom."];
        let tokens = |text: &str| script.parts().unwrap().system_message(text).unwrap();
        let added = "My cat is called Tim.";
        let larger = tokens(facts[1]).len().max(tokens(added).len());
        let capacity = Capacity { turns: 256, facts: tokens(facts[0]).len() + larger };
        let mut session = capacity.apply_to(model.session().unwrap());
        let mut conversation = Conversation::new(&script, &mut session, capacity);
        let told = facts.map(|fact| (conversation.add_fact(fact).unwrap().0, fact.to_owned()));
        let question = conversation.ask("Who am I?").unwrap();
        session.feed(&question.prompt).unwrap();
        let mut conversation = Conversation::new(&script, &mut session, capacity);
        assert!(matches!(
            conversation.add_fact(added),
            Err(RuntimeError::Cache(CacheError::FactsFull { .. }))
        ));
        let update = conversation.make_room_for_fact(told.to_vec(), added, Arc::new(First)).unwrap();
        let applied = conversation.apply_facts(update).unwrap();
        let condensed = applied.condensed.unwrap();
        assert_eq!(
            (condensed.text.as_str(), condensed.facts),
            (facts[0], told.map(|(fact, _)| fact).to_vec())
        );
        let expected = [tokens(facts[0]), question.prompt, tokens(added)].concat();
        assert_eq!(session.tokens(), expected);
        let turns: Vec<TurnId> = session.all_turns().map(|turn| turn.id).collect();
        assert_eq!(turns, [condensed.turn, question.turn, applied.added.0]);

        // A fact that is too long alone is refused, and an update without room changes nothing.
        let mut conversation = Conversation::new(&script, &mut session, capacity);
        let told = vec![(condensed.turn, facts.concat().repeat(9)), (applied.added.0, added.to_owned())];
        assert!(
            conversation.make_room_for_fact(told.clone(), &"too long ".repeat(90), Arc::new(First)).is_err()
        );
        let update = conversation.make_room_for_fact(told, facts[1], Arc::new(First)).unwrap();
        assert!(conversation.apply_facts(update).is_err());
        assert_eq!(session.tokens(), expected);
    }

    #[test]
    fn capacities_have_defaults() {
        assert_eq!(Capacity::new(4096, None, None), Capacity { turns: 1536, facts: 512 });
        assert_eq!(Capacity::new(1000, None, None), Capacity { turns: 750, facts: 250 });
        assert_eq!(Capacity::new(1000, Some(900), Some(100)), Capacity { turns: 900, facts: 100 });
        assert!(Capacity::new(1000, None, Some(900)).fits(1000));
        assert!(!Capacity::new(1000, Some(900), Some(101)).fits(1000));
        assert!(!Capacity { turns: usize::MAX, facts: 1 }.fits(usize::MAX));
    }
}
