//! What Python, Swift and Kotlin have: objects, and exceptions for errors.

use std::path::Path;
use std::sync::Arc;

use crate::conversation::{Conversation, Sampling};
use crate::held::Held;
use crate::opened::Opened;
use crate::{Answer, FireboxError};

/// An opened model. Its sessions keep it.
#[derive(Debug, ::uniffi::Object)]
pub struct Model(Arc<Opened>);

/// A conversation with a model. It may be used from any thread, in one call at a time.
#[derive(Debug, ::uniffi::Object)]
pub struct Session(Held);

/// Hears an answer while it comes.
#[::uniffi::export(callback_interface)]
pub trait Listener: Send + Sync {
    /// Takes the next piece of text. False ends the answer, and what was said by then stays; an exception makes it as if
    /// nothing had been said.
    fn heard(&self, text: String) -> Result<bool, ListenerError>;
}

/// What listened failed.
#[derive(Debug, thiserror::Error, ::uniffi::Error)]
pub enum ListenerError {
    /// For this reason.
    #[error("{reason}")]
    Failed {
        /// What it said.
        reason: String,
    },
}

impl From<::uniffi::UnexpectedUniFFICallbackError> for ListenerError {
    fn from(error: ::uniffi::UnexpectedUniFFICallbackError) -> Self {
        Self::Failed { reason: error.reason }
    }
}

#[::uniffi::export]
impl Model {
    /// Opens a Hugging Face directory, a GGUF file or a bundle; the pocket model where no path is given. With an amount of
    /// memory in bytes the whole process takes no more, and the model is read from disk while it runs as far as it has to.
    #[uniffi::constructor(default(path = None, memory = None))]
    pub fn open(path: Option<String>, memory: Option<u64>) -> Result<Arc<Self>, FireboxError> {
        let opened = Opened::open(path.as_deref().map(Path::new), memory)?;
        Ok(Arc::new(Self(Arc::new(opened))))
    }

    /// The names of its heads.
    pub fn heads(&self) -> Vec<String> {
        self.0.model.heads().map(|heads| heads.names()).unwrap_or_default()
    }

    /// A conversation that begins with what the model is to be.
    #[uniffi::method(default(system = None))]
    pub fn session(&self, system: Option<String>) -> Result<Arc<Session>, FireboxError> {
        let conversation = Conversation::begin(self.0.clone(), system.as_deref())?;
        Ok(Arc::new(Session(Held::new(conversation))))
    }

    /// A conversation that was saved, by this model.
    pub fn restore(&self, path: String) -> Result<Arc<Session>, FireboxError> {
        let conversation = Conversation::restore(self.0.clone(), Path::new(&path))?;
        Ok(Arc::new(Session(Held::new(conversation))))
    }
}

#[::uniffi::export]
impl Session {
    /// Says something. The answer has so many tokens at most, or as many as fit.
    #[uniffi::method(default(listener = None, max_tokens = None))]
    pub fn say(
        &self,
        text: String,
        listener: Option<Box<dyn Listener>>,
        max_tokens: Option<u32>,
    ) -> Result<Answer, FireboxError> {
        let most = max_tokens.map(|most| usize::try_from(most).unwrap_or(usize::MAX));
        self.0.with(|conversation| {
            conversation.say(&text, most, &mut |piece| match &listener {
                Some(listener) => listener
                    .heard(piece.to_owned())
                    .map_err(|ListenerError::Failed { reason }| FireboxError::Listener { reason }),
                None => Ok(true),
            })
        })
    }

    /// How tokens of later answers are chosen. A temperature of 0, as at first, takes the likeliest.
    #[uniffi::method(default(top_p = 1.0, seed = 0))]
    pub fn sample(&self, temperature: f32, top_p: f32, seed: u64) -> Result<(), FireboxError> {
        self.0.with(|conversation| conversation.sample(Sampling { temperature, top_p, seed }))
    }

    /// Answers with a head from now on; "0" is the model's own. None leaves the choice to the model's router, if it has
    /// one, as at first.
    pub fn use_head(&self, name: Option<String>) -> Result<(), FireboxError> {
        self.0.with(|conversation| conversation.use_head(name.as_deref()))
    }

    /// Tells it something that stays when turns are forgotten. The number is what it can be superseded by.
    pub fn add_fact(&self, text: String) -> Result<u64, FireboxError> {
        self.0.with(|conversation| conversation.add_fact(&text))
    }

    /// Puts a fact in the place of another.
    pub fn supersede_fact(&self, fact: u64, text: String) -> Result<u64, FireboxError> {
        self.0.with(|conversation| conversation.supersede_fact(fact, &text))
    }

    /// Writes it to a file, in the place of the one that may be there.
    pub fn save(&self, path: String) -> Result<(), FireboxError> {
        self.0.with(|conversation| conversation.save(Path::new(&path)))
    }
}
