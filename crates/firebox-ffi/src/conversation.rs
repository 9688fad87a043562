//! A conversation as other languages use it: messages, facts, heads and files.

use std::path::Path;
use std::sync::Arc;

use firebox_runtime::{
    Finish, Generation, GenerationConfig, Question, SamplerConfig, Session, TurnId, TurnKind,
};
use serde::{Deserialize, Serialize};

use crate::error::FireboxError;
use crate::open_model::OpenModel;
use crate::select_head::select_head;

/// Receives pieces of an answer, and returns whether to continue.
pub(crate) type PieceSink<'l> = &'l mut dyn FnMut(&str) -> Result<bool, FireboxError>;

/// An answer of the model.
#[derive(Debug, Clone, PartialEq, Eq, ::uniffi::Record)]
pub struct Answer {
    /// Its text.
    pub text: String,
    /// Why it ended.
    pub ended: Ended,
    /// Its length in tokens, without an end token.
    pub tokens: u64,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ::uniffi::Enum)]
pub enum Ended {
    /// The model ended it.
    Stop,
    /// It reached the maximum length.
    Length,
    /// The listener ended it.
    Listener,
}

/// Sampling parameters.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sampling {
    pub temperature: f32,
    pub top_p: f32,
    pub seed: u64,
}

/// What is saved beside the KV cache.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedNote {
    head: Option<String>,
    sampling: Sampling,
    /// True if the template's text after the last answer is still missing.
    open: bool,
    /// Number of answers. It varies the seed, so that a repeated question gets another answer.
    answers: u64,
}

/// A conversation with a model. A failed call leaves it unchanged.
#[derive(Debug)]
pub(crate) struct Conversation {
    opened: Arc<OpenModel>,
    session: Session,
    note: SavedNote,
}

impl Conversation {
    /// Creates a conversation with a system prompt.
    pub fn begin(opened: Arc<OpenModel>, system: Option<&str>) -> Result<Self, FireboxError> {
        let mut session = opened.capacity.apply_to(opened.model.session()?);
        runtime_conversation(&opened, &mut session).open(system)?;
        let sampling = Sampling { temperature: 0.0, top_p: 1.0, seed: 0 };
        let note = SavedNote { head: None, sampling, open: false, answers: 0 };
        Ok(Self { opened, session, note })
    }

    /// Restores a [saved](Self::save) conversation.
    pub fn restore(opened: Arc<OpenModel>, path: &Path) -> Result<Self, FireboxError> {
        let (session, note) = opened.restore(path).map_err(|source| FireboxError::File { source })?;
        let note: SavedNote =
            serde_json::from_str(&note).map_err(|_| FireboxError::ForeignFile { path: path.to_owned() })?;
        let mut session = opened.capacity.apply_to(session);
        if let Some(head) = &note.head {
            select_head(&mut session, Some(head), &[])?;
        }
        Ok(Self { opened, session, note })
    }

    /// Saves to a file, replacing an existing one.
    pub fn save(&self, path: &Path) -> Result<(), FireboxError> {
        let note = serde_json::to_string(&self.note).map_err(|error| FireboxError::InvalidArgument {
            argument: "path",
            reason: format!("cannot be written: {error}"),
        })?;
        let saved = self.session.save_with_note(path, &self.opened.model, &note);
        saved.map_err(|source| FireboxError::File { source })
    }

    /// Sets the sampling of later answers. A temperature of 0, the default, is greedy.
    pub fn sample(&mut self, sampling: Sampling) -> Result<(), FireboxError> {
        let share = (0.0..=1.0).contains(&sampling.top_p);
        let is_warm = sampling.temperature >= 0.0 && sampling.temperature.is_finite();
        for (argument, ok, reason) in
            [("temperature", is_warm, "should be 0 or more"), ("top_p", share, "should be between 0 and 1")]
        {
            if !ok {
                return Err(FireboxError::InvalidArgument { argument, reason: reason.into() });
            }
        }
        self.note.sampling = sampling;
        Ok(())
    }

    /// Sends a message and generates the answer, of at most `max_tokens` tokens.
    pub fn say(
        &mut self,
        text: &str,
        max_tokens: Option<usize>,
        heard: PieceSink<'_>,
    ) -> Result<Answer, FireboxError> {
        let mut session = self.closed()?;
        let Question { prompt, room, .. } = runtime_conversation(&self.opened, &mut session).ask(text)?;
        select_head(&mut session, self.note.head.as_deref(), &prompt)?;
        let Sampling { temperature, top_p, seed } = self.note.sampling;
        let seed = seed.wrapping_add(self.note.answers);
        let config = GenerationConfig::new()
            .with_max_tokens(max_tokens.map_or(room, |most| most.min(room)))
            .with_end_tokens(self.opened.model.end_tokens())
            .with_sampler(
                SamplerConfig::default().with_temperature(temperature).with_top_p(top_p).with_seed(seed),
            );
        let tokenizer = Some(self.opened.model.tokenizer()?.clone());
        let mut generation = Generation::begin(&mut session, tokenizer, &prompt, config)?;
        let mut goes_on = true;
        while goes_on && let Some(piece) = generation.next_piece()? {
            if !piece.text.is_empty() {
                goes_on = heard(&piece.text)?;
            }
        }
        let summary = generation.finish()?;
        self.session = session;
        self.note.open = true;
        self.note.answers += 1;
        let ended = match summary.finish {
            Finish::Stop => Ended::Stop,
            Finish::Length | Finish::Repetition => Ended::Length,
            Finish::Cancelled => Ended::Listener,
        };
        Ok(Answer { text: summary.text, ended, tokens: summary.tokens.len() as u64 })
    }

    /// Selects the head of later answers. `None`, the default, leaves the choice to the model's router, if it
    /// has one.
    pub fn use_head(&mut self, name: Option<&str>) -> Result<(), FireboxError> {
        if name.is_some() {
            // Try the head now, so that the caller gets the error.
            let mut session = self.session.clone();
            select_head(&mut session, name, &[])?;
            self.session = session;
        }
        self.note.head = name.map(str::to_owned);
        Ok(())
    }

    /// Adds a fact, which is not evicted with turns.
    pub fn add_fact(&mut self, text: &str) -> Result<u64, FireboxError> {
        let mut session = self.closed()?;
        let (fact, _) = runtime_conversation(&self.opened, &mut session).add_fact(text)?;
        self.store_closed(session);
        Ok(fact.0)
    }

    /// Supersedes a fact.
    pub fn supersede_fact(&mut self, fact: u64, text: &str) -> Result<u64, FireboxError> {
        let stands = |session: &Session| {
            let mut turns = session.all_turns().filter(|turn| turn.id.0 == fact);
            turns.any(|turn| turn.kind == TurnKind::Fact && turn.hidden.is_none())
        };
        if !stands(&self.session) {
            return Err(FireboxError::NoFact { fact });
        }
        let mut session = self.closed()?;
        let (newer, _) = runtime_conversation(&self.opened, &mut session).supersede(TurnId(fact), text)?;
        self.store_closed(session);
        Ok(newer.0)
    }

    /// Returns a fork of the session that includes the template's text after the last answer.
    fn closed(&self) -> Result<Session, FireboxError> {
        let mut session = self.session.clone();
        if self.note.open {
            runtime_conversation(&self.opened, &mut session).close()?;
        }
        Ok(session)
    }

    fn store_closed(&mut self, session: Session) {
        self.session = session;
        self.note.open = false;
    }
}

fn runtime_conversation<'a>(
    opened: &'a OpenModel,
    session: &'a mut Session,
) -> firebox_runtime::Conversation<'a> {
    firebox_runtime::Conversation::new(&opened.script, session, opened.capacity)
}
