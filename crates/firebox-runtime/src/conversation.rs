use firebox_cache::{AfterEviction, CacheError, Role, TurnId, WholeTurns};
use firebox_text::{ChatTemplate, TemplateOptions, TextError, TurnEncoder};
use serde::{Deserialize, Serialize};

use crate::session::turns::DEFAULT_FACT_TOKENS;
use crate::{Model, RuntimeError, Session};

/// Tokens of turns that are remembered where nobody says, if the model has been trained for so many.
const TURNS: usize = 1536;

/// How much of a conversation is remembered, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capacity {
    /// Of turns. Whole ones are forgotten for newer ones.
    pub turns: usize,
    /// Of facts.
    pub facts: usize,
}

impl Capacity {
    /// What is wished, and what usually does where nothing is, for a model that was trained for so many tokens.
    pub fn new(context: usize, turns: Option<usize>, facts: Option<usize>) -> Self {
        let facts = facts.unwrap_or_else(|| DEFAULT_FACT_TOKENS.min(context / 4));
        let turns = turns.unwrap_or_else(|| TURNS.min(context.saturating_sub(facts)));
        Self { turns, facts }
    }

    /// Whether a model that was trained for so many tokens can remember as much.
    pub fn fits(self, context: usize) -> bool {
        self.turns.checked_add(self.facts).is_some_and(|all| all <= context)
    }

    /// A session that remembers as much.
    pub fn apply_to(self, session: Session) -> Session {
        let policy = WholeTurns { after: AfterEviction::CompactPositions };
        session.with_turn_capacity(self.turns, policy).with_fact_capacity(self.facts)
    }
}

/// What conversations with a model are written by: its template, in its tokens.
#[derive(Debug)]
pub struct Script {
    model: Model,
    template: ChatTemplate,
    options: TemplateOptions,
    /// Whether the template is the model's own.
    is_own: bool,
}

impl Script {
    /// By the model's own template, or where it has none, line after line, with nobody named.
    pub fn new(model: &Model) -> Result<Self, RuntimeError> {
        let own = match model.tokenizer() {
            Ok(tokenizer) => ChatTemplate::new(model.checkpoint().text(), tokenizer),
            Err(_) => Err(TextError::MissingChatTemplate),
        };
        let (template, is_own) = match own {
            Ok(template) => (template, true),
            Err(TextError::MissingChatTemplate) => (ChatTemplate::plain()?, false),
            Err(error) => return Err(error.into()),
        };
        Ok(Self { model: model.clone(), template, options: TemplateOptions::default(), is_own })
    }

    /// The template.
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    /// What comes before everything where the template does not write it.
    pub fn beginning(&self) -> Result<Vec<u32>, RuntimeError> {
        let tokenizer = self.model.tokenizer()?;
        let begins = !self.is_own && tokenizer.adds_bos();
        Ok(tokenizer.bos_id().filter(|_| begins).into_iter().collect())
    }

    /// The parts that conversations are written from.
    pub fn parts(&self) -> Result<TurnEncoder<'_>, RuntimeError> {
        Ok(TurnEncoder::new(&self.template, self.model.tokenizer()?, &self.options))
    }

    /// What comes before the first question, and stays whatever is forgotten.
    fn opening(&self, system: Option<&str>) -> Result<Vec<u32>, RuntimeError> {
        let (parts, mut tokens) = (self.parts()?, self.beginning()?);
        match parts.opening(system)? {
            Some(opening) => tokens.extend(opening),
            None => {
                // The template makes it part of the first question, which may be forgotten.
                tokens.extend(parts.opening(None)?.unwrap_or_default());
                if let Some(system) = system {
                    tokens.extend(parts.system_message(system)?);
                }
            }
        }
        Ok(tokens)
    }
}

/// A conversation: a session that reads it turn by turn and forgets the oldest, as [`Capacity`] says. Whoever has to have
/// what was there before something failed lets a branch go on in its place.
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
/// let config = GenerationConfig { max_tokens: Some(asked.room), ..GenerationConfig::default() };
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

/// A question that has its turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// The turn that it and its answer are.
    pub turn: TurnId,
    /// What the answer follows.
    pub prompt: Vec<u32>,
    /// Tokens that the turn has left for the answer.
    pub room: usize,
}

impl<'a> Conversation<'a> {
    /// One that a session has read so far.
    pub fn new(script: &'a Script, session: &'a mut Session, capacity: Capacity) -> Self {
        Self { script, session, capacity }
    }

    /// Reads what comes before the first question, with what the model is to be. Returns its turn and tokens, if it has any.
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

    /// Writes behind an answer what a template writes behind answers. Comes before whatever follows an answer.
    pub fn close(&mut self) -> Result<(), RuntimeError> {
        let closing = self.script.parts()?.closing()?;
        if !closing.is_empty() {
            self.session.feed(&closing)?;
        }
        Ok(())
    }

    /// Begins the turn of a question. Its prompt is for whoever answers to read.
    pub fn ask(&mut self, text: &str) -> Result<Question, RuntimeError> {
        let parts = self.script.parts()?;
        let (prompt, closing) = (parts.question(text)?, parts.closing()?.len());
        let room = self.capacity.turns.saturating_sub(self.session.pinned_tokens());
        let taken = prompt.len() + closing;
        self.expect_room(taken, room)?;
        let turn = self.session.begin_turn(&[Role::User, Role::Assistant])?;
        Ok(Question { turn, prompt, room: room - taken })
    }

    /// Tells it something that stays when turns are forgotten. Returns the fact and its tokens.
    pub fn add_fact(&mut self, text: &str) -> Result<(TurnId, usize), RuntimeError> {
        let tokens = self.script.parts()?.system_message(text)?;
        Ok((self.session.add_fact(&tokens)?, tokens.len()))
    }

    /// Puts a fact in the place of another.
    pub fn supersede(&mut self, fact: TurnId, text: &str) -> Result<(TurnId, usize), RuntimeError> {
        let tokens = self.script.parts()?.system_message(text)?;
        Ok((self.session.supersede(fact, &tokens)?, tokens.len()))
    }

    /// One token has to be left for an answer.
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
    use std::sync::Arc;
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
    fn what_is_read_turn_by_turn_is_the_conversation_as_a_whole() {
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

    /// Allows no page more once it is told to.
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

    /// What makes a turn fail, after its first piece and where there are no more pages.
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

    /// Has one session go through a turn that fails before each that does not, and compares it with one that does not. `ask`
    /// begins a turn and says what is to be read of it. Returns the session.
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
    fn what_has_no_room_is_refused_and_changes_nothing() {
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

    #[test]
    fn as_much_is_remembered_as_is_wished_or_as_usual() {
        assert_eq!(Capacity::new(4096, None, None), Capacity { turns: 1536, facts: 512 });
        assert_eq!(Capacity::new(1000, None, None), Capacity { turns: 750, facts: 250 });
        assert_eq!(Capacity::new(1000, Some(900), Some(100)), Capacity { turns: 900, facts: 100 });
        assert!(Capacity::new(1000, None, Some(900)).fits(1000));
        assert!(!Capacity::new(1000, Some(900), Some(101)).fits(1000));
        assert!(!Capacity { turns: usize::MAX, facts: 1 }.fits(usize::MAX));
    }
}
