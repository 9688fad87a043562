//! Shares a conversation among the threads of another language.

use std::sync::{Mutex, TryLockError};

use crate::conversation::Conversation;
use crate::error::FireboxError;

/// A conversation shared with another language. Any thread may use it, one call at a time.
#[derive(Debug)]
pub(crate) struct SharedConversation(Mutex<Conversation>);

impl SharedConversation {
    pub fn new(conversation: Conversation) -> Self {
        Self(Mutex::new(conversation))
    }

    /// Runs a call on the conversation, or fails if another call is running. Waiting would deadlock a callback
    /// that uses its own session.
    pub fn with<T>(
        &self,
        act: impl FnOnce(&mut Conversation) -> Result<T, FireboxError>,
    ) -> Result<T, FireboxError> {
        match self.0.try_lock() {
            Ok(mut conversation) => act(&mut conversation),
            Err(TryLockError::WouldBlock) => Err(FireboxError::Busy),
            Err(TryLockError::Poisoned(_)) => {
                Err(FireboxError::Panicked { reason: "an earlier call panicked".into() })
            }
        }
    }
}
