//! A conversation: what was said, and the session that has read it.

use std::path::PathBuf;

use firebox_runtime::heads::Router;
use firebox_runtime::telemetry::Counter;
use firebox_runtime::{
    Finish, GenerationConfig, Model, OWN_HEAD, RuntimeError, Session, Speculation, Summary,
};
use firebox_text::Message;

use crate::console::Console;
use crate::generating::answer;
use crate::interrupt::Interrupt;
use crate::prompt::Prompter;
use crate::router::{AUTO, choose};

/// A conversation with a model.
pub struct Conversation {
    pub prompter: Prompter,
    pub config: GenerationConfig,
    session: Session,
    speculation: Option<Speculation>,
    /// Chooses the head for every message, unless it was named.
    router: Option<Router>,
    messages: Vec<Message>,
    /// Answers so far: each has its own seed, so that asking again gives another answer.
    answers: u64,
    /// The last answer's numbers.
    last: Option<Summary>,
    /// Where it is written after every answer, and by which model it is given.
    file: Option<(PathBuf, Model)>,
}

impl Conversation {
    /// One that has come as far as `messages`, which `session` has read, or what it has of them.
    pub fn resume(
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
            session,
            speculation,
            router: None,
            messages,
            answers,
            last: None,
            file: None,
        }
    }

    /// Writes it to a file after every answer, for another process to go on from.
    pub fn keep_in(&mut self, path: PathBuf, model: Model) {
        self.file = Some((path, model));
    }

    /// The session that has read it.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Has a router choose the head for every message from now on; with none, the head stays.
    pub fn let_choose(&mut self, router: Option<Router>) {
        self.router = router;
    }

    /// What was said.
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

    /// Forgets everything but what the model is told to be, in the file too, if it is kept in one.
    pub fn reset(&mut self) -> anyhow::Result<()> {
        self.messages.retain(|message| message.role == "system");
        self.session.clear();
        self.last = None;
        self.keep()
    }

    /// Writes the conversation to its file, if it has one.
    fn keep(&self) -> anyhow::Result<()> {
        if let Some((path, model)) = &self.file {
            self.session.save_with_note(path, model, &serde_json::to_string(&self.messages)?)?;
        }
        Ok(())
    }

    /// Says what the model is to be; nothing, if the text is empty.
    pub fn set_system(&mut self, text: &str) {
        self.messages.retain(|message| message.role != "system");
        if !text.is_empty() {
            self.messages.insert(0, Message::system(text));
        }
    }

    /// Answers with another head from now on; without a name nothing changes. Says what came of it, or which there are.
    pub fn use_head(&mut self, name: &str) -> String {
        if name.is_empty() {
            let known = self.session.heads().map(|rack| rack.names()).unwrap_or_default();
            return format!("(heads: {})", if known.is_empty() { "none".into() } else { known.join(", ") });
        }
        self.router = None;
        if name == AUTO {
            self.router = Router::of(&self.session);
            let chooses = if self.router.is_some() { "the router chooses" } else { "there is no router" };
            return format!("({chooses})");
        }
        let name = if name == "own" { OWN_HEAD } else { name };
        let worn = self.session.use_head(name);
        if let Some(heads) = self.session.heads() {
            // Habits that are forgotten cost a moment, next time.
            let _ = heads.history().save();
        }
        match worn.instead {
            Some(reason) => format!("({reason})"),
            None => format!("(changed in {:.2} ms)", worn.took.as_secs_f64() * 1e3),
        }
    }

    /// Says something and streams the answer.
    pub fn say(&mut self, text: &str, interrupt: &Interrupt, console: &Console) -> anyhow::Result<()> {
        self.messages.push(Message::user(text));
        let said = self.answer(interrupt, console);
        if said.is_err() && self.messages.last().is_some_and(|message| message.role == "user") {
            // What could not be answered would stand in the way of all that follows.
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
        let session = &mut self.session;
        let common = session.tokens().iter().zip(&ids).take_while(|(known, wanted)| known == wanted).count();
        // At least one token has to go through the layers for there to be logits.
        let kept = common.min(ids.len().saturating_sub(1));
        session.rewind(kept);
        session.meters().add(Counter::CachedTokens, kept as u64);
        if let Some(router) = &self.router {
            choose(router, session, &ids[kept..], console)?;
        }
        let mut config = self.config.clone();
        config.sampler.seed = config.sampler.seed.wrapping_add(self.answers);
        self.answers += 1;
        let tokenizer = Some(self.prompter.tokenizer.clone());
        let took = |_, text: &str| if text.is_empty() { Ok(()) } else { console.print(text) };
        let speculation = self.speculation.as_mut();
        let summary = answer(session, tokenizer, &ids[kept..], config, speculation, interrupt, took)?;
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

    /// The prompt, after forgetting as many of the oldest turns as it takes for an answer to fit.
    fn fitting_prompt(&mut self, console: &Console) -> anyhow::Result<Vec<u32>> {
        let context = self.config.context.unwrap_or(usize::MAX);
        let mut forgotten = 0;
        let ids = loop {
            let ids = self.prompter.encode(&self.messages)?;
            if ids.len() < context {
                break ids;
            }
            if !self.forget_oldest_turn() {
                return Err(RuntimeError::ContextFull { tokens: ids.len() + 1, context }.into());
            }
            forgotten += 1;
        };
        if forgotten > 0 {
            console.note(format!("(the context is full: the oldest {forgotten} of the turns are forgotten)"));
        }
        Ok(ids)
    }

    /// Drops the first question with all that followed up to the second. False if there is no second.
    fn forget_oldest_turn(&mut self) -> bool {
        let mut questions =
            self.messages.iter().enumerate().filter(|(_, message)| message.role == "user").map(|(at, _)| at);
        let (Some(first), Some(second)) = (questions.next(), questions.next()) else { return false };
        self.messages.drain(first..second);
        true
    }
}
