//! A chat that owns its session.

use firebox_cache::TurnId;

use crate::decode::{Generation, GenerationConfig, GenerationStart};
use crate::{Capacity, Conversation, Model, RuntimeError, Script, Session};

/// A chat with a model: it owns the session, writes questions by the chat template, and evicts the oldest turns when its
/// [`Capacity`] is full. An answer that only repeats itself ends, unless [`with_config`](Chat::with_config) says otherwise. A
/// [`Conversation`] is the same over a session of the caller, turn by turn.
///
/// ```no_run
/// use firebox_runtime::{Model, device};
///
/// let model = Model::open("models/chat", &device("cpu")?)?;
/// let mut chat = model.chat()?.with_system("Be brief.");
/// for piece in chat.ask("Who are you?")? {
///     print!("{}", piece?.text);
/// }
/// println!("{}", chat.ask("And in one word?")?.complete()?.text);
/// # Ok::<(), firebox_runtime::RuntimeError>(())
/// ```
#[derive(Debug)]
pub struct Chat {
    model: Model,
    script: Script,
    session: Session,
    capacity: Capacity,
    config: GenerationConfig,
    system: Option<String>,
    /// What the template writes before the next question.
    due: Due,
}

/// What the template writes before a question or a fact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Due {
    /// The beginning of the conversation.
    Opening,
    /// The end of the last answer.
    Closing,
    /// Nothing.
    Nothing,
}

impl Model {
    /// Begins a chat with the model's chat template.
    pub fn chat(&self) -> Result<Chat, RuntimeError> {
        // Without a tokenizer a chat could neither read nor write.
        self.tokenizer()?;
        let capacity = Capacity::for_model(self)?;
        Ok(Chat {
            model: self.clone(),
            script: Script::new(self)?,
            session: capacity.apply_to(self.session()?),
            capacity,
            config: GenerationConfig::new().with_loop_guard(true),
            system: None,
            due: Due::Opening,
        })
    }
}

impl Chat {
    /// Sets the system text, which is read before the first question and never evicted.
    #[must_use]
    pub fn with_system(mut self, text: impl Into<String>) -> Self {
        self.system = Some(text.into());
        self
    }

    /// Sets how many tokens of turns and facts are kept.
    #[must_use]
    pub fn with_capacity(mut self, capacity: Capacity) -> Self {
        self.capacity = capacity;
        self.session = capacity.apply_to(self.session);
        self
    }

    /// Sets the options of all answers. An answer ends at the latest where its turn would exceed the capacity.
    #[must_use]
    pub fn with_config(mut self, config: GenerationConfig) -> Self {
        self.config = config;
        self
    }

    /// Asks a question. The generation streams the answer; one that is dropped early leaves the answer as it is by then.
    ///
    /// If the question cannot be read, the chat remains as it was. If its answer fails, the part before the failure remains.
    pub fn ask(&mut self, question: &str) -> Result<Generation<'_>, RuntimeError> {
        let mut session = self.ready_session()?;
        let asked = Conversation::new(&self.script, &mut session, self.capacity).ask(question)?;
        let mut config = self.config.clone();
        config.max_tokens = Some(config.max_tokens.map_or(asked.room, |tokens| tokens.min(asked.room)));
        let tokenizer = Some(self.model.tokenizer()?.clone());
        let start = GenerationStart::feed(&mut session, tokenizer, &asked.prompt, config)?;
        self.session = session;
        self.due = Due::Closing;
        Ok(Generation::from_start(&mut self.session, start))
    }

    /// Adds a fact, which is not evicted with turns. If it has no room, the chat remains as it was.
    pub fn add_fact(&mut self, text: &str) -> Result<TurnId, RuntimeError> {
        let mut session = self.ready_session()?;
        let (fact, _) = Conversation::new(&self.script, &mut session, self.capacity).add_fact(text)?;
        self.session = session;
        self.due = Due::Nothing;
        Ok(fact)
    }

    /// Returns the session.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Returns the session, to change heads or to mask turns.
    pub fn session_mut(&mut self) -> &mut Session {
        &mut self.session
    }

    /// Returns a fork of the session that has read what precedes the next question or fact.
    fn ready_session(&self) -> Result<Session, RuntimeError> {
        let mut session = self.session.clone();
        let mut conversation = Conversation::new(&self.script, &mut session, self.capacity);
        match self.due {
            Due::Opening => drop(conversation.open(self.system.as_deref())?),
            Due::Closing => conversation.close()?,
            Due::Nothing => {}
        }
        Ok(session)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use firebox_cache::CacheError;

    use super::*;
    use crate::device;

    fn model() -> Model {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/pocket");
        Model::open(path, &device("cpu").unwrap()).unwrap()
    }

    #[test]
    fn a_chat_reads_what_a_conversation_reads() {
        let model = model();
        let mut chat = model.chat().unwrap().with_system("Be brief.");
        let (script, capacity) = (Script::new(&model).unwrap(), Capacity::for_model(&model).unwrap());
        let mut session = capacity.apply_to(model.session().unwrap());
        Conversation::new(&script, &mut session, capacity).open(Some("Be brief.")).unwrap();
        for (number, question) in ["My dog is called Biscuit.", "What is my dog called?"].iter().enumerate() {
            let mut conversation = Conversation::new(&script, &mut session, capacity);
            if number > 0 {
                conversation.close().unwrap();
            }
            let asked = conversation.ask(question).unwrap();
            let config = GenerationConfig::new().with_max_tokens(asked.room);
            let tokenizer = Some(model.tokenizer().unwrap().clone());
            let generation = Generation::begin(&mut session, tokenizer, &asked.prompt, config).unwrap();
            let expected = generation.complete().unwrap();

            let pieces: Result<String, RuntimeError> =
                chat.ask(question).unwrap().map(|piece| Ok(piece?.text)).collect();
            assert_eq!(pieces.unwrap(), expected.text);
            assert_eq!(chat.session().tokens(), session.tokens());
        }
    }

    #[test]
    fn a_question_without_room_leaves_the_chat_unchanged() {
        let model = model();
        let (capacity, config) =
            (Capacity { turns: 48, facts: 24 }, GenerationConfig::new().with_max_tokens(4));
        let mut chat = model.chat().unwrap().with_capacity(capacity).with_config(config);
        assert!(chat.ask("Who are you?").unwrap().complete().unwrap().tokens.len() <= 4);
        let before = chat.session().tokens().to_vec();
        let long = "and then ".repeat(40);
        assert!(matches!(chat.ask(&long), Err(RuntimeError::Cache(CacheError::TurnTooLong { .. }))));
        assert!(matches!(chat.add_fact(&long), Err(RuntimeError::Cache(CacheError::FactsFull { .. }))));
        assert_eq!(chat.session().tokens(), before);

        let fact = chat.add_fact("I am Ada.").unwrap();
        assert!(chat.session().visible_facts().contains(&fact));
        chat.ask("Hi").unwrap().complete().unwrap();
        assert!(chat.session().visible_facts().contains(&fact));
    }
}
