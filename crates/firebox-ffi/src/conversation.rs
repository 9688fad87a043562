use std::path::Path;
use std::sync::Arc;

use firebox_runtime::{
    Finish, Generation, GenerationConfig, Question, SamplerConfig, Session, TurnId, TurnKind,
};
use serde::{Deserialize, Serialize};

use crate::FireboxError;
use crate::opened::Opened;
use crate::router::dress;

/// What is told of a piece of text: whether to go on.
pub(crate) type Listening<'l> = &'l mut dyn FnMut(&str) -> Result<bool, FireboxError>;

/// What somebody said came to.
#[derive(Debug, Clone, PartialEq, Eq, ::uniffi::Record)]
pub struct Answer {
    /// All of it.
    pub text: String,
    /// Why it ended.
    pub ended: Ended,
    /// Its tokens, without the one that ended it.
    pub tokens: u64,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ::uniffi::Enum)]
pub enum Ended {
    /// The model said so.
    Stop,
    /// It has as many tokens as were asked for, or as fit.
    Length,
    /// Who listened wanted no more.
    Listener,
}

/// How tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sampling {
    pub temperature: f32,
    pub top_p: f32,
    pub seed: u64,
}

/// What is written beside a session's keys and values.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    head: Option<String>,
    sampling: Sampling,
    /// Whether the last answer is still without what a template writes behind answers.
    open: bool,
    /// Answers so far: each has its own seed, so that asking again gives another answer.
    answers: u64,
}

/// A conversation with a model. What fails leaves it as it was.
#[derive(Debug)]
pub(crate) struct Conversation {
    opened: Arc<Opened>,
    session: Session,
    note: Note,
}

impl Conversation {
    /// One that begins with what the model is to be.
    pub fn begin(opened: Arc<Opened>, system: Option<&str>) -> Result<Self, FireboxError> {
        let mut session = opened.capacity.given_to(opened.model.session()?);
        talk(&opened, &mut session).open(system)?;
        let sampling = Sampling { temperature: 0.0, top_p: 1.0, seed: 0 };
        let note = Note { head: None, sampling, open: false, answers: 0 };
        Ok(Self { opened, session, note })
    }

    /// One that was [saved](Self::save).
    pub fn restore(opened: Arc<Opened>, path: &Path) -> Result<Self, FireboxError> {
        let (session, note) = opened.resumed(path).map_err(|source| FireboxError::File { source })?;
        let note: Note =
            serde_json::from_str(&note).map_err(|_| FireboxError::ForeignFile { path: path.to_owned() })?;
        let mut session = opened.capacity.given_to(session);
        if let Some(head) = &note.head {
            dress(&mut session, Some(head), &[])?;
        }
        Ok(Self { opened, session, note })
    }

    /// Writes it to a file, in the place of the one that may be there.
    pub fn save(&self, path: &Path) -> Result<(), FireboxError> {
        let note = serde_json::to_string(&self.note).map_err(|error| FireboxError::InvalidArgument {
            argument: "path",
            reason: format!("cannot be written: {error}"),
        })?;
        let saved = self.session.save_with_note(path, &self.opened.model, &note);
        saved.map_err(|source| FireboxError::File { source })
    }

    /// How tokens of later answers are chosen. A temperature of 0, as at first, takes the likeliest.
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

    /// Says something and hears the answer, of so many tokens at most.
    pub fn say(
        &mut self,
        text: &str,
        max_tokens: Option<usize>,
        heard: Listening<'_>,
    ) -> Result<Answer, FireboxError> {
        let mut session = self.closed()?;
        let Question { prompt, room, .. } = talk(&self.opened, &mut session).ask(text)?;
        dress(&mut session, self.note.head.as_deref(), &prompt)?;
        let Sampling { temperature, top_p, seed } = self.note.sampling;
        let seed = seed.wrapping_add(self.note.answers);
        let config = GenerationConfig {
            max_tokens: Some(max_tokens.map_or(room, |most| most.min(room))),
            end_tokens: self.opened.model.end_tokens(),
            sampler: SamplerConfig { temperature, top_p, seed, ..SamplerConfig::default() },
            ..GenerationConfig::default()
        };
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
            Finish::Length => Ended::Length,
            Finish::Cancelled => Ended::Listener,
        };
        Ok(Answer { text: summary.text, ended, tokens: summary.tokens.len() as u64 })
    }

    /// Answers with a head from now on. Nothing leaves the choice to the model's router, if it has one, as at first.
    pub fn use_head(&mut self, name: Option<&str>) -> Result<(), FireboxError> {
        if name.is_some() {
            // Looked for now, so that who names it hears whether it is there.
            let mut session = self.session.clone();
            dress(&mut session, name, &[])?;
            self.session = session;
        }
        self.note.head = name.map(str::to_owned);
        Ok(())
    }

    /// Tells it something that stays when turns are forgotten.
    pub fn add_fact(&mut self, text: &str) -> Result<u64, FireboxError> {
        let mut session = self.closed()?;
        let (fact, _) = talk(&self.opened, &mut session).add_fact(text)?;
        self.keep_closed(session);
        Ok(fact.0)
    }

    /// Puts a fact in the place of another.
    pub fn supersede_fact(&mut self, fact: u64, text: &str) -> Result<u64, FireboxError> {
        let stands = |session: &Session| {
            let mut turns = session.all_turns().filter(|turn| turn.id.0 == fact);
            turns.any(|turn| turn.kind == TurnKind::Fact && turn.hidden.is_none())
        };
        if !stands(&self.session) {
            return Err(FireboxError::NoFact { fact });
        }
        let mut session = self.closed()?;
        let (newer, _) = talk(&self.opened, &mut session).supersede(TurnId(fact), text)?;
        self.keep_closed(session);
        Ok(newer.0)
    }

    /// A branch, with what a template writes behind answers behind the last one.
    fn closed(&self) -> Result<Session, FireboxError> {
        let mut session = self.session.clone();
        if self.note.open {
            talk(&self.opened, &mut session).close()?;
        }
        Ok(session)
    }

    fn keep_closed(&mut self, session: Session) {
        self.session = session;
        self.note.open = false;
    }
}

fn talk<'a>(opened: &'a Opened, session: &'a mut Session) -> firebox_runtime::Conversation<'a> {
    firebox_runtime::Conversation::new(&opened.script, session, opened.capacity)
}
