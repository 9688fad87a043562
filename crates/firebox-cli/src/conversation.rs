//! A conversation: what was said, and the session that has read it.

use std::path::PathBuf;

use firebox_runtime::heads::Router;
use firebox_runtime::telemetry::Counter;
use firebox_runtime::{
    Capacity, Finish, GenerationConfig, Model, OWN_HEAD, RuntimeError, Session, Speculation, Summary,
};
use firebox_text::Message;

use crate::console::{Console, human_bytes};
use crate::facts::{self, Facts};
use crate::generating::answer;
use crate::interrupt::Interrupt;
use crate::prompt::Prompter;
use crate::router::{AUTO, choose};

/// Tokens to keep free for an answer if no limit on its length is given.
const USUAL_ANSWER: usize = 256;

/// A conversation with a model.
pub struct Conversation {
    pub prompter: Prompter,
    pub config: GenerationConfig,
    model: Model,
    session: Session,
    speculation: Option<Speculation>,
    /// Chooses the head for every message, unless it was named.
    router: Option<Router>,
    messages: Vec<Message>,
    /// Answers so far: each has its own seed, so that asking again gives another answer.
    answers: u64,
    /// The last answer's numbers.
    last: Option<Summary>,
    /// Where it is written after every answer.
    file: Option<PathBuf>,
    /// Condenses facts that outgrow their tokens.
    facts: Facts,
}

impl Conversation {
    /// One that has come as far as `messages`, which a `session` of `model` has read, or what it has of them.
    pub fn resume(
        model: Model,
        prompter: Prompter,
        config: GenerationConfig,
        session: Session,
        speculation: Option<Speculation>,
        messages: Vec<Message>,
    ) -> Self {
        let answers = messages.iter().filter(|message| message.role == "assistant").count() as u64;
        Self {
            prompter,
            config,
            model,
            session,
            speculation,
            router: None,
            messages,
            answers,
            last: None,
            file: None,
            facts: Facts::default(),
        }
    }

    /// Writes it to a file after every answer, for another process to go on from.
    pub fn keep_in(&mut self, path: PathBuf) {
        self.file = Some(path);
    }

    /// The session that has read it.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Has a router choose the head for every message from now on; with none, the head stays.
    pub fn let_choose(&mut self, router: Option<Router>) {
        self.router = router;
    }

    /// Returns the messages so far.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// The last answer's numbers.
    pub fn last(&self) -> Option<&Summary> {
        self.last.as_ref()
    }

    /// Tokens in the session, and the bytes its keys and values take.
    pub fn size(&self) -> (usize, usize) {
        (self.session.tokens().len(), self.session.cache_bytes())
    }

    /// Returns the limit on its tokens: the configured context, and no more than there is page memory for.
    pub fn context(&self) -> usize {
        self.config.context.unwrap_or(usize::MAX).min(tokens_in_memory(&self.model, &self.session))
    }

    /// Forgets everything but what the model is told to be, in the file too, if it is kept in one.
    pub fn reset(&mut self) -> anyhow::Result<()> {
        self.messages.retain(|message| message.role == "system");
        self.session.clear();
        self.last = None;
        self.keep()
    }

    /// Writes the conversation to its file, if it has one.
    fn keep(&self) -> anyhow::Result<()> {
        if let Some(path) = &self.file {
            self.session.save_with_note(path, &self.model, &serde_json::to_string(&self.messages)?)?;
        }
        Ok(())
    }

    /// Says what the model is to be; nothing, if the text is empty.
    pub fn set_system(&mut self, text: &str) {
        self.messages.retain(|message| message.role != "system" || facts::is_fact(message));
        if !text.is_empty() {
            self.messages.insert(0, Message::system(text));
        }
    }

    /// Adds a fact, which stays when turns are forgotten. Facts that outgrow their tokens are condensed in the background, and
    /// replaced before a later message.
    pub fn add_fact(&mut self, text: &str) -> anyhow::Result<()> {
        facts::add(&mut self.messages, text);
        let capacity = Capacity::new(self.context(), None, None).facts;
        self.facts.condense(&self.messages, &self.prompter.tokenizer, capacity)?;
        self.keep()
    }

    /// Answers with another head from now on; without a name nothing changes. Says what came of it, or which there are.
    pub fn use_head(&mut self, name: &str) -> String {
        if name.is_empty() {
            let known = self.session.heads().map(|rack| rack.names()).unwrap_or_default();
            return format!("(heads: {})", if known.is_empty() { "none".into() } else { known.join(", ") });
        }
        self.router = None;
        if name == AUTO {
            self.router = Router::for_session(&self.session);
            let chooses = if self.router.is_some() { "the router chooses" } else { "there is no router" };
            return format!("({chooses})");
        }
        let name = if name == "own" { OWN_HEAD } else { name };
        let switch = self.session.use_head(name);
        if let Some(heads) = self.session.heads() {
            // If the history is not saved, the next change of heads only takes a little longer.
            let _ = heads.history().save();
        }
        match switch.fallback_reason {
            Some(reason) => format!("({reason})"),
            None => format!("(changed in {:.2} ms)", switch.took.as_secs_f64() * 1e3),
        }
    }

    /// Says something and streams the answer.
    pub fn say(&mut self, text: &str, interrupt: &Interrupt, console: &Console) -> anyhow::Result<()> {
        if self.facts.apply(&mut self.messages)? {
            console.note("(the facts were condensed)");
        }
        self.messages.push(Message::user(text));
        let said = self.answer(interrupt, console);
        if said.is_err() && self.messages.last().is_some_and(|message| message.role == "user") {
            // A message without an answer would break the conversation for all messages that follow.
            self.messages.pop();
        }
        said
    }

    /// Answers the last question again. False if there is none.
    pub fn answer_again(&mut self, interrupt: &Interrupt, console: &Console) -> anyhow::Result<bool> {
        let Some(position) = self.messages.iter().rposition(|message| message.role == "user") else {
            return Ok(false);
        };
        let before = self.messages.split_off(position + 1);
        let answered = self.answer(interrupt, console);
        if answered.is_err() && self.messages.last().is_some_and(|message| message.role == "user") {
            // Without an answer the question would stand in the way of the next one.
            self.messages.extend(before);
        }
        answered.map(|()| true)
    }

    fn answer(&mut self, interrupt: &Interrupt, console: &Console) -> anyhow::Result<()> {
        let ids = self.fitting_prompt(console)?;
        // The choice of a head is part of the work: a long message goes through the trunk for it.
        let working = interrupt.work();
        let session = &mut self.session;
        let common = session.tokens().iter().zip(&ids).take_while(|(known, wanted)| known == wanted).count();
        // At least one token has to go through the layers for there to be logits.
        let kept = common.min(ids.len().saturating_sub(1));
        session.rewind(kept);
        session.meters().add(Counter::CachedTokens, kept as u64);
        if let Some(router) = &self.router {
            choose(router, session, &ids[kept..], console)?;
        }
        // A head that was loaded for this message has taken memory.
        let context = tokens_in_memory(&self.model, session);
        let mut config = self.config.clone();
        config.context = Some(config.context.unwrap_or(usize::MAX).min(context));
        config.sampler.seed = config.sampler.seed.wrapping_add(self.answers);
        self.answers += 1;
        let tokenizer = Some(self.prompter.tokenizer.clone());
        let took = |_, text: &str| if text.is_empty() { Ok(()) } else { console.print(text) };
        let speculation = self.speculation.as_mut();
        let summary = answer(session, tokenizer, &ids[kept..], config, speculation, &working, took)?;
        drop(working);
        if !summary.text.ends_with('\n') {
            console.line("")?;
        }
        if summary.finish == Finish::Cancelled {
            console.note("(stopped)");
        }
        self.messages.push(Message::assistant(summary.text.as_str()));
        self.last = Some(summary);
        self.keep()
    }

    /// The prompt, after forgetting as many of the oldest turns as it takes for an answer to fit. Where the last question
    /// does not fit even alone, nothing is forgotten.
    fn fitting_prompt(&mut self, console: &Console) -> anyhow::Result<Vec<u32>> {
        let context = self.context();
        let quarter = (context / 4).max(1);
        let room = self.config.max_tokens.unwrap_or(USUAL_ANSWER).clamp(1, quarter);
        let mut ids = self.prompter.encode(&self.messages)?;
        if ids.len() <= context.saturating_sub(room) {
            return Ok(ids);
        }
        let mut messages = self.messages.clone();
        let mut forgotten = 0;
        // More than this answer takes: every prompt that begins otherwise than the one before is read from its beginning.
        while ids.len() > context.saturating_sub(quarter) && forget_oldest_turn(&mut messages) {
            ids = self.prompter.encode(&messages)?;
            forgotten += 1;
        }
        let is_memory = self.config.context.is_none_or(|asked| context < asked);
        if ids.len() >= context {
            let full = RuntimeError::ContextFull { tokens: ids.len() + 1, context };
            let Some(residency) = self.model.residency().filter(|_| is_memory) else {
                return Err(full.into());
            };
            let memory = human_bytes(residency.budget().total());
            let reason =
                format!("{memory} of memory have room for {context} tokens; raise --memory, or say less");
            return Err(anyhow::Error::from(full).context(reason));
        }
        self.messages = messages;
        if forgotten > 0 {
            let full = if is_memory { "memory for the conversation" } else { "the context" };
            console.note(format!("({full} is full: the oldest {forgotten} of the turns are forgotten)"));
        }
        Ok(ids)
    }
}

/// Returns the number of tokens that there is page memory for; unlimited if the model has no memory budget.
fn tokens_in_memory(model: &Model, session: &Session) -> usize {
    model.residency().map_or(usize::MAX, |residency| residency.tokens_for(session))
}

/// Drops the first question with all that followed up to the second. False if there is no second.
fn forget_oldest_turn(messages: &mut Vec<Message>) -> bool {
    let mut questions =
        messages.iter().enumerate().filter(|(_, message)| message.role == "user").map(|(at, _)| at);
    let (Some(first), Some(second)) = (questions.next(), questions.next()) else { return false };
    messages.drain(first..second);
    true
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::atomic::Ordering;

    use firebox_runtime::heads::HeadPoolConfig;
    use firebox_runtime::residency::ResidencyOptions;
    use firebox_runtime::{Account, Charge, device};
    use firebox_text::ChatTemplate;

    use super::*;

    const SMALL: &str = "tests/fixtures/gguf/llama/model.gguf";

    fn within(path: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
    }

    fn model(path: &str) -> Model {
        Model::open(within(path), &device("cpu").unwrap()).unwrap()
    }

    /// A conversation in 64 tokens, with answers of two.
    fn talk() -> Conversation {
        talk_to(model(SMALL), 64)
    }

    fn talk_to(model: Model, context: usize) -> Conversation {
        let prompter = Prompter {
            tokenizer: model.tokenizer().unwrap().clone(),
            template: ChatTemplate::plain().unwrap(),
            thinking: None,
            add_special: true,
        };
        let config = GenerationConfig {
            context: Some(context),
            max_tokens: Some(2),
            ignore_end: true,
            ..GenerationConfig::default()
        };
        let session = model.session().unwrap();
        Conversation::resume(model, prompter, config, session, None, Vec::new())
    }

    /// One for which a single page is left, and what takes the rest of the memory: nothing of the model is kept that could be let
    /// go of for another page.
    fn talk_in_one_page() -> (Conversation, Charge) {
        let options =
            ResidencyOptions { context: Some(128), layers: Some(0), ..ResidencyOptions::new(8 << 30) };
        let model = Model::open_within(within(SMALL), &device("cpu").unwrap(), &options).unwrap();
        let budget = model.residency().unwrap().budget();
        let others = budget.charge(Account::Program, budget.left()).unwrap();
        (talk_to(model, 4096), others)
    }

    #[test]
    fn where_pages_end_before_the_context_the_oldest_turns_are_forgotten() {
        let (interrupt, console) = (Interrupt::default(), Console::default());
        let (mut talk, _others) = talk_in_one_page();
        assert_eq!(talk.context(), 128);
        let mut forgot = Vec::new();
        for _ in 0..100 {
            let before = talk.messages().len();
            talk.say("Hello", &interrupt, &console).unwrap();
            forgot.push(talk.messages().len() <= before);
            assert!(talk.size().0 <= 128, "{:?}", talk.size());
            assert_eq!(talk.last().unwrap().tokens.len(), 2);
        }
        assert!(forgot.contains(&true));
        assert!(!forgot.windows(2).any(|pair| pair == [true, true]), "{forgot:?}");
    }

    #[test]
    fn an_answer_ends_where_pages_do() {
        let (interrupt, console) = (Interrupt::default(), Console::default());
        let (mut talk, _others) = talk_in_one_page();
        talk.config.max_tokens = None;
        talk.say("Hello", &interrupt, &console).unwrap();
        assert_eq!(talk.last().unwrap().finish, Finish::Length);
        assert!((120..=128).contains(&talk.size().0), "{:?}", talk.size());
        talk.say("And you", &interrupt, &console).unwrap();
        assert!(talk.size().0 <= 128, "{:?}", talk.size());
    }

    #[test]
    fn a_message_that_no_page_has_room_for_is_told_what_helps() {
        let (interrupt, console) = (Interrupt::default(), Console::default());
        let (mut talk, _others) = talk_in_one_page();
        let error = talk.say(&"word ".repeat(200), &interrupt, &console).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(RuntimeError::ContextFull { context: 128, .. })));
        assert!(error.to_string().contains("raise --memory"), "{error}");
        assert!(talk.messages().is_empty());
    }

    /// Kept layers are evicted to make room for pages.
    #[test]
    fn a_context_that_there_can_be_pages_for_is_had_as_a_whole() {
        let options = ResidencyOptions { context: Some(128), ..ResidencyOptions::new(8 << 30) };
        let model = Model::open_within(within(SMALL), &device("cpu").unwrap(), &options).unwrap();
        assert!(model.planned_tokens() < 4096);
        assert_eq!(talk_to(model, 4096).context(), 4096);
    }

    #[test]
    fn a_message_that_is_too_long_takes_nothing_with_it() {
        let (interrupt, console) = (Interrupt::default(), Console::default());
        let mut talk = talk();
        talk.say("Hello", &interrupt, &console).unwrap();
        talk.say("And you", &interrupt, &console).unwrap();
        let said = talk.messages().to_vec();
        let error = talk.say(&"word ".repeat(100), &interrupt, &console).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(RuntimeError::ContextFull { context: 64, .. })));
        assert_eq!((said.len(), talk.messages()), (4, &said[..]));
        talk.say("Hello", &interrupt, &console).unwrap();
        assert_eq!(talk.messages().len(), 6);
    }

    #[test]
    fn what_is_forgotten_is_enough_for_more_than_one_message() {
        let (interrupt, console) = (Interrupt::default(), Console::default());
        let mut talk = talk();
        let mut forgot = Vec::new();
        for _ in 0..40 {
            let before = talk.messages().len();
            talk.say("Hello", &interrupt, &console).unwrap();
            forgot.push(talk.messages().len() <= before);
            assert!(!forgot[forgot.len() - 1] || talk.size().0 <= 48 + 2, "{:?}", talk.size());
            // As long as it was asked to be, however full the context is.
            assert_eq!(talk.last().unwrap().tokens.len(), 2);
        }
        assert!(forgot.contains(&true));
        assert!(!forgot.windows(2).any(|pair| pair == [true, true]), "{forgot:?}");
    }

    /// The router reads a message in pieces, and looks between them whether it is to stop.
    #[test]
    fn the_last_ctrl_c_does_not_stop_the_choice_of_a_head() {
        let (interrupt, console) = (Interrupt::default(), Console::default());
        let model = model("assets/pocket").with_heads(HeadPoolConfig::patient()).unwrap();
        let tokenizer = model.tokenizer().unwrap().clone();
        let template = ChatTemplate::new(model.checkpoint().text(), &tokenizer).unwrap();
        let prompter = Prompter { tokenizer, template, thinking: None, add_special: false };
        let config = GenerationConfig {
            max_tokens: Some(4),
            end_tokens: model.end_tokens(),
            ..GenerationConfig::default()
        };
        let session = model.session().unwrap().with_cancel(interrupt.flag()).with_chunk(2);
        let mut talk = Conversation::resume(model, prompter, config, session, None, Vec::new());
        let router = Router::for_session(talk.session());
        assert!(router.is_some());
        talk.let_choose(router);
        interrupt.flag().store(true, Ordering::SeqCst);
        talk.say("My dog is called Biscuit.", &interrupt, &console).unwrap();
        assert_ne!(talk.last().unwrap().finish, Finish::Cancelled);
    }
}
