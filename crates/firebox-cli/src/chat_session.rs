//! The conversation of `firebox chat`: what was said, and the session that has read it.

use std::path::PathBuf;
use std::sync::Arc;

use firebox_runtime::heads::Router;
use firebox_runtime::telemetry::Counter;
use firebox_runtime::{
    CacheError, Capacity, Conversation, ExtractiveCondenser, FactUpdate, Finish, GenerationConfig, Model,
    OWN_HEAD, Question, RuntimeError, Script, Session, SlidingWindow, Speculation, Summary, TurnId, TurnKind,
};
use firebox_text::Message;

use crate::answer_printer::{AnswerPrinter, Printing};
use crate::console::{Console, human_bytes};
use crate::generating::answer;
use crate::interrupt::{Interrupt, Working};
use crate::router::{AUTO, choose};
use crate::transcript::{Exchange, Fact, Transcript};

/// A conversation with a model.
pub struct ChatSession {
    pub config: GenerationConfig,
    pub script: Script,
    pub printing: Printing,
    model: Model,
    session: Session,
    speculation: Option<Speculation>,
    /// Chooses the head for every message, unless it was named.
    router: Option<Router>,
    transcript: Transcript,
    /// Answers so far: each has its own seed, so that asking again gives another answer.
    answers: u64,
    /// The last answer's numbers.
    last: Option<Summary>,
    /// Where it is written after every answer.
    file: Option<PathBuf>,
    /// Facts that are being condensed to make room for another.
    fact_update: Option<FactUpdate>,
}

impl ChatSession {
    /// Continues a conversation after `messages`. What `session` does not hold of them is read before the next question.
    pub fn resume(
        model: Model,
        script: Script,
        config: GenerationConfig,
        mut session: Session,
        speculation: Option<Speculation>,
        messages: &[Message],
    ) -> anyhow::Result<Self> {
        let mut transcript = Transcript::from_messages(messages);
        if !transcript.find_turns(&session, &script)? {
            transcript.set_unread();
            session.clear();
        }
        Ok(Self {
            config,
            script,
            printing: Printing::Text,
            model,
            session,
            speculation,
            router: None,
            answers: transcript.exchanges.len() as u64,
            transcript,
            last: None,
            file: None,
            fact_update: None,
        })
    }

    /// Writes it to a file after every answer, for another process to continue.
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
    pub fn messages(&self) -> Vec<Message> {
        self.transcript.messages(self.fact_update.as_ref().map(FactUpdate::added))
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
        self.config.context.unwrap_or(usize::MAX).min(self.tokens_in_memory())
    }

    /// Returns the number of tokens that there is page memory for; unlimited if the model has no memory budget.
    fn tokens_in_memory(&self) -> usize {
        self.model
            .residency()
            .map_or(usize::MAX, |residency| residency.tokens_for(self.session.cache().pool()))
    }

    /// Forgets everything but the system text and facts, in the file too, if it is kept in one.
    pub fn reset(&mut self) -> anyhow::Result<()> {
        self.transcript.exchanges.clear();
        if let Some(update) = self.fact_update.take() {
            self.transcript.facts.push(Fact { text: update.added().to_owned(), turn: None });
        }
        self.unread();
        self.last = None;
        self.keep()
    }

    /// Empties the session, to read everything again before the next question.
    fn unread(&mut self) {
        self.session.clear();
        self.transcript.set_unread();
    }

    /// Writes the conversation to its file, if it has one.
    fn keep(&self) -> anyhow::Result<()> {
        if let Some(path) = &self.file {
            let note = serde_json::to_string(&self.messages())?;
            self.session.save_with_note(path, &self.model, &note)?;
        }
        Ok(())
    }

    /// Sets the system text, or removes it if the text is empty.
    pub fn set_system(&mut self, text: &str) {
        self.transcript.system = (!text.is_empty()).then(|| text.to_owned());
    }

    /// Adds a fact, which stays when turns are forgotten. If it does not fit, the other facts are condensed in the background,
    /// and it is added before a later message.
    pub fn add_fact(&mut self, text: &str, interrupt: &Interrupt, console: &Console) -> anyhow::Result<()> {
        let _working = interrupt.work();
        self.catch_up(console)?;
        self.apply_facts(true, console)?;
        let capacity = self.make_room_for_fact(text, console)?;
        let mut conversation = Conversation::new(&self.script, &mut self.session, capacity);
        match conversation.add_fact(text) {
            Ok((turn, _)) => self.transcript.facts.push(Fact { text: text.to_owned(), turn: Some(turn) }),
            Err(RuntimeError::Cache(CacheError::FactsFull { .. })) => {
                let facts = self.transcript.read_facts();
                let update = conversation.make_room_for_fact(facts, text, Arc::new(ExtractiveCondenser))?;
                self.fact_update = Some(update);
            }
            Err(error) => return Err(error.into()),
        }
        self.keep()
    }

    /// Answers with another head from now on; without a name nothing changes. Says what came of it, or which there are.
    pub fn use_head(&mut self, name: &str) -> String {
        if name.is_empty() {
            let known = self.session.heads().map(|head_pool| head_pool.names()).unwrap_or_default();
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
        let working = interrupt.work();
        self.apply_facts(false, console)?;
        self.answer(text, &working, console)
    }

    /// Answers the last question again. False if there is none.
    pub fn answer_again(&mut self, interrupt: &Interrupt, console: &Console) -> anyhow::Result<bool> {
        let Some(last) = self.transcript.exchanges.pop() else { return Ok(false) };
        if let Some(turn) = last.turn {
            self.rewind_before(turn);
        }
        let answered = self.answer(&last.question, &interrupt.work(), console);
        if answered.is_err() {
            // The earlier answer stays, and is read again before the next question.
            self.transcript.exchanges.push(Exchange { turn: None, ..last });
        }
        answered.map(|()| true)
    }

    fn answer(&mut self, question: &str, working: &Working<'_>, console: &Console) -> anyhow::Result<()> {
        self.catch_up(console)?;
        let capacity = self.limit();
        let asked = Conversation::new(&self.script, &mut self.session, capacity).ask(question);
        let asked = asked.map_err(|error| self.explain(error))?;
        let turn = asked.turn;
        let (answered, thoughts) = self.generate(asked, capacity, working, console).inspect_err(|_| {
            self.rewind_before(turn);
        })?;
        let is_stopped = answered.finish == Finish::Cancelled;
        if is_stopped {
            console.note("(stopped)");
        } else if answered.finish == Finish::Repetition {
            console.note("(ended: the answer only repeated itself; --no-loop-guard lets it go on)");
        }
        // Stopped before its first token, the question may not be read as a whole.
        let capacity = self.capacity();
        let is_read = !(is_stopped && answered.tokens.is_empty())
            && Conversation::new(&self.script, &mut self.session, capacity).close().is_ok();
        if !is_read {
            self.rewind_before(turn);
        }
        self.forget_evicted(console);
        let (question, answer) = (question.to_owned(), answered.text.clone());
        let turn = is_read.then_some(turn);
        self.transcript.exchanges.push(Exchange { question, answer, thoughts, turn });
        self.last = Some(answered);
        self.keep()
    }

    /// Generates the answer to a question that was just asked. Returns it with its thoughts, which its text does not have.
    fn generate(
        &mut self,
        asked: Question,
        capacity: Capacity,
        working: &Working<'_>,
        console: &Console,
    ) -> anyhow::Result<(Summary, String)> {
        let Question { prompt, mut room, .. } = asked;
        self.session.meters().add(Counter::CachedTokens, self.session.tokens().len() as u64);
        if let Some(router) = &self.router {
            // The choice of a head is part of the work: a long message goes through the trunk for it.
            choose(router, &mut self.session, &prompt, console)?;
            // A head that was loaded for this message has taken memory.
            let left = self.limit().turns;
            room = room.saturating_sub(capacity.turns.saturating_sub(left));
            if room == 0 {
                let (tokens, room) = (prompt.len() + 1, left.saturating_sub(self.session.pinned_tokens()));
                let full = CacheError::TurnTooLong { tokens, room, capacity: left };
                return Err(self.explain(full.into()));
            }
        }
        let mut config = self.config.clone();
        // The session makes room for the answer by forgetting turns.
        config.context = None;
        config.max_tokens = Some(config.max_tokens.map_or(room, |most| most.min(room)));
        config.sampler.seed = config.sampler.seed.wrapping_add(self.answers);
        self.answers += 1;
        let tokenizer = self.model.tokenizer()?.clone();
        let reader = self.script.template().answer_reader(&tokenizer, &prompt, None);
        let mut printer = AnswerPrinter::new(console, reader, tokenizer.clone(), self.printing);
        let took = |token, text: &str| printer.push(token, text);
        let speculation = self.speculation.as_mut();
        let mut summary =
            answer(&mut self.session, Some(tokenizer), &prompt, config, speculation, working, took)?;
        let (thoughts, text) = printer.finish()?;
        summary.text = text;
        Ok((summary, thoughts))
    }

    /// Returns how many tokens the session may hold now: turns have what facts leave of the context.
    fn capacity(&self) -> Capacity {
        let context = self.context();
        let facts = self.session.all_turns().filter(|turn| turn.kind == TurnKind::Fact);
        let facts: usize = facts.map(|turn| turn.tokens).sum();
        Capacity { turns: context.saturating_sub(facts), ..Capacity::new(context, None, None) }
    }

    /// Limits the session to what it may hold now. Of turns that leave no room it forgets half, and reads the rest again: that
    /// takes no page beyond those that it has.
    fn limit(&mut self) -> Capacity {
        let capacity = self.capacity();
        let session = self.session.clone().with_turn_capacity(capacity.turns, SlidingWindow);
        self.session = session.with_fact_capacity(capacity.facts);
        capacity
    }

    /// Reads what the session has not read yet: all of a conversation that another version has saved, what follows a changed
    /// system text, and questions that were stopped.
    fn catch_up(&mut self, console: &Console) -> anyhow::Result<()> {
        let opening = self.script.opening(self.transcript.system.as_deref())?;
        let first = self.session.all_turns().next().filter(|turn| turn.pinned).map_or(0, |turn| turn.tokens);
        if self.session.tokens().get(..first).unwrap_or_default() != opening {
            self.unread();
        }
        let capacity = self.limit();
        if self.session.tokens().is_empty() {
            let mut conversation = Conversation::new(&self.script, &mut self.session, capacity);
            let opened = conversation.open(self.transcript.system.as_deref());
            opened.map_err(|error| self.explain(error))?;
        }
        while let Some(at) = self.transcript.facts.iter().position(|fact| fact.turn.is_none()) {
            let fact = self.transcript.facts.remove(at);
            match self.read_fact(&fact.text, console) {
                Ok(()) => {}
                Err(RuntimeError::Cache(CacheError::FactsFull { .. })) => {
                    console.note(format!("(there is no room for a fact, which is forgotten: {})", fact.text));
                }
                Err(error) => {
                    self.transcript.facts.insert(at, fact);
                    return Err(error.into());
                }
            }
        }
        self.catch_up_exchanges(console)
    }

    /// Reads exchanges that the session has not read, except for the oldest if they leave no room.
    fn catch_up_exchanges(&mut self, console: &Console) -> anyhow::Result<()> {
        let unread: Vec<usize> = (0..self.transcript.exchanges.len())
            .filter(|at| self.transcript.exchanges[*at].turn.is_none())
            .collect();
        let Some(&first) = unread.first() else { return Ok(()) };
        let capacity = self.limit();
        let closing = self.script.parts()?.closing()?.len();
        let mut answers = Vec::new();
        for &at in &unread {
            let Exchange { question, answer, .. } = &self.transcript.exchanges[at];
            let question = self.script.parts()?.question(question)?.len();
            let answer = self.model.tokenizer()?.encode_literal(answer, false)?;
            answers.push((question + answer.len() + closing, answer));
        }
        let room = capacity.turns.saturating_sub(self.session.pinned_tokens());
        let mut left: usize = answers.iter().map(|(tokens, _)| tokens).sum();
        let most = if left <= room { room } else { room / 2 };
        let skipped = answers.iter().take_while(|(tokens, _)| {
            let skips = left > most;
            left -= if skips { *tokens } else { 0 };
            skips
        });
        let skipped = skipped.count();
        self.transcript.exchanges.drain(first..first + skipped);
        self.note_forgotten(skipped, console);
        for (at, (_, answer)) in (first..).zip(answers.into_iter().skip(skipped)) {
            let mut conversation = Conversation::new(&self.script, &mut self.session, capacity);
            let asked = conversation.ask(&self.transcript.exchanges[at].question);
            let Question { turn, prompt, .. } = asked.map_err(|error| self.explain(error))?;
            let read = self
                .session
                .feed(&[prompt, answer].concat())
                .and_then(|_| Conversation::new(&self.script, &mut self.session, capacity).close());
            read.inspect_err(|_| self.rewind_before(turn))?;
            self.transcript.exchanges[at].turn = Some(turn);
        }
        self.forget_evicted(console);
        Ok(())
    }

    /// Reads a fact, and condenses the others if they leave no room for it.
    fn read_fact(&mut self, text: &str, console: &Console) -> Result<(), RuntimeError> {
        let capacity = self.make_room_for_fact(text, console)?;
        let mut conversation = Conversation::new(&self.script, &mut self.session, capacity);
        match conversation.add_fact(text) {
            Err(RuntimeError::Cache(CacheError::FactsFull { .. })) => {
                let facts = self.transcript.read_facts();
                let update = conversation.make_room_for_fact(facts, text, Arc::new(ExtractiveCondenser))?;
                self.transcript.condense_facts(conversation.apply_facts(update)?);
            }
            read => {
                let (turn, _) = read?;
                self.transcript.facts.push(Fact { text: text.to_owned(), turn: Some(turn) });
            }
        }
        Ok(())
    }

    /// Forgets the oldest turns until the context has room for a fact.
    fn make_room_for_fact(&mut self, text: &str, console: &Console) -> Result<Capacity, RuntimeError> {
        let needed = self.script.parts()?.system_message(text)?.len();
        let (context, mut forgotten) = (self.context(), 0);
        while self.session.tokens().len().saturating_add(needed) > context {
            let Some(turn) = self.transcript.exchanges.first().and_then(|oldest| oldest.turn) else { break };
            self.session.forget(turn)?;
            self.transcript.exchanges.remove(0);
            forgotten += 1;
        }
        if forgotten > 0 {
            self.session.recompute()?;
            self.note_forgotten(forgotten, console);
        }
        Ok(self.limit())
    }

    /// Replaces facts by their condensed text and adds the one they made room for, if that is ready; with `wait`, once it is.
    fn apply_facts(&mut self, wait: bool, console: &Console) -> anyhow::Result<()> {
        let Some(update) = self.fact_update.take_if(|update| wait || update.is_finished()) else {
            return Ok(());
        };
        let text = update.added().to_owned();
        let capacity = self.limit();
        match Conversation::new(&self.script, &mut self.session, capacity).apply_facts(update) {
            Ok(facts) => {
                if self.transcript.condense_facts(facts) {
                    console.note("(the facts were condensed)");
                }
            }
            // It is read as far as it fits, before the next question.
            Err(_) => self.transcript.facts.push(Fact { text, turn: None }),
        }
        Ok(())
    }

    /// Goes back to before a turn. Facts after it are read again before the next question.
    fn rewind_before(&mut self, turn: TurnId) {
        let mut start = 0;
        let mut turns = self.session.all_turns();
        for held in turns.by_ref().take_while(|held| held.id != turn) {
            start += held.tokens;
        }
        let after: Vec<TurnId> = turns.map(|held| held.id).collect();
        self.session.rewind(start);
        for fact in &mut self.transcript.facts {
            fact.turn = fact.turn.filter(|turn| !after.contains(turn));
        }
    }

    /// Removes exchanges that the session has evicted.
    fn forget_evicted(&mut self, console: &Console) {
        let forgotten = self.transcript.remove_evicted(&self.session);
        self.note_forgotten(forgotten, console);
    }

    fn note_forgotten(&self, turns: usize, console: &Console) {
        if turns > 0 {
            let full = if self.is_memory() { "memory for the conversation" } else { "the context" };
            console.note(format!("({full} is full: the oldest {turns} of the turns are forgotten)"));
        }
    }

    /// Returns whether memory limits the conversation, rather than the context.
    fn is_memory(&self) -> bool {
        self.config.context.is_none_or(|asked| self.context() < asked)
    }

    /// Explains that a turn is too long for the context, and what helps.
    fn explain(&self, error: RuntimeError) -> anyhow::Error {
        let RuntimeError::Cache(CacheError::TurnTooLong { tokens, room, .. }) = error else {
            return error.into();
        };
        let context = self.context();
        let full = RuntimeError::ContextFull { tokens: tokens + context.saturating_sub(room), context };
        let Some(residency) = self.model.residency().filter(|_| self.is_memory()) else { return full.into() };
        let memory = human_bytes(residency.budget().total());
        let reason =
            format!("{memory} of memory have room for {context} tokens; raise --memory, or say less");
        anyhow::Error::from(full).context(reason)
    }
}

#[cfg(test)]
mod tests;
