//! The interface of Python, Swift and Kotlin: objects, and exceptions for errors.

use std::path::Path;
use std::sync::Arc;

use crate::conversation::Answer;
use crate::conversation::{Conversation, Sampling};
use crate::error::FireboxError;
use crate::open_model::OpenModel;
use crate::shared_conversation::SharedConversation;

/// An opened model. Its sessions keep it alive.
#[derive(Debug, ::uniffi::Object)]
pub struct Model(Arc<OpenModel>);

/// A conversation with a model. It may be used from any thread, by one call at a time.
#[derive(Debug, ::uniffi::Object)]
pub struct Session(SharedConversation);

/// Receives an answer while it is generated.
#[::uniffi::export(callback_interface)]
pub trait Listener: Send + Sync {
    /// Receives the next piece of text. False ends the answer, and the text so far stays; an exception undoes
    /// the message.
    fn heard(&self, text: String) -> Result<bool, ListenerError>;
}

/// The error of a listener.
#[derive(Debug, thiserror::Error, ::uniffi::Error)]
pub enum ListenerError {
    /// The listener failed.
    #[error("{reason}")]
    Failed {
        /// Its message.
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
    /// Opens a Hugging Face directory, a GGUF file or a bundle, or the pocket model without a path. `memory`
    /// limits the bytes of the whole process, and the model is then streamed from disk as far as necessary.
    #[uniffi::constructor(default(path = None, memory = None))]
    pub fn open(path: Option<String>, memory: Option<u64>) -> Result<Arc<Self>, FireboxError> {
        let opened = OpenModel::open(path.as_deref().map(Path::new), memory)?;
        Ok(Arc::new(Self(Arc::new(opened))))
    }

    /// Returns the names of the model's heads.
    pub fn heads(&self) -> Vec<String> {
        self.0.model.heads().map(|heads| heads.names()).unwrap_or_default()
    }

    /// Creates a session with a system prompt.
    #[uniffi::method(default(system = None))]
    pub fn session(&self, system: Option<String>) -> Result<Arc<Session>, FireboxError> {
        let conversation = Conversation::begin(self.0.clone(), system.as_deref())?;
        Ok(Arc::new(Session(SharedConversation::new(conversation))))
    }

    /// Restores a session that was saved with this model.
    pub fn restore(&self, path: String) -> Result<Arc<Session>, FireboxError> {
        let conversation = Conversation::restore(self.0.clone(), Path::new(&path))?;
        Ok(Arc::new(Session(SharedConversation::new(conversation))))
    }
}

#[::uniffi::export]
impl Session {
    /// Sends a message and generates the answer, of at most `max_tokens` tokens or as many as fit.
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

    /// Sets the sampling of later answers. A temperature of 0, the default, is greedy.
    #[uniffi::method(default(top_p = 1.0, seed = 0))]
    pub fn sample(&self, temperature: f32, top_p: f32, seed: u64) -> Result<(), FireboxError> {
        self.0.with(|conversation| conversation.sample(Sampling { temperature, top_p, seed }))
    }

    /// Selects the head of later answers; "0" is the model's own. None, the default, leaves the choice to the
    /// model's router, if it has one.
    pub fn use_head(&self, name: Option<String>) -> Result<(), FireboxError> {
        self.0.with(|conversation| conversation.use_head(name.as_deref()))
    }

    /// Adds a fact, which is not evicted with turns. Returns its number, for superseding it.
    pub fn add_fact(&self, text: String) -> Result<u64, FireboxError> {
        self.0.with(|conversation| conversation.add_fact(&text))
    }

    /// Supersedes a fact, and returns the number of the new one.
    pub fn supersede_fact(&self, fact: u64, text: String) -> Result<u64, FireboxError> {
        self.0.with(|conversation| conversation.supersede_fact(fact, &text))
    }

    /// Saves to a file, replacing an existing one.
    pub fn save(&self, path: String) -> Result<(), FireboxError> {
        self.0.with(|conversation| conversation.save(Path::new(&path)))
    }
}
