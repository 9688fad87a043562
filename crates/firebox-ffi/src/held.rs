use std::sync::{Mutex, TryLockError};

use crate::FireboxError;
use crate::conversation::Conversation;

/// A conversation that other languages hold. They may use it from any thread, in one call at a time.
#[derive(Debug)]
pub(crate) struct Held(Mutex<Conversation>);

impl Held {
    pub fn new(conversation: Conversation) -> Self {
        Self(Mutex::new(conversation))
    }

    /// Does something with it. Who comes while it is in another call is told so: waiting for ever is what a callback would
    /// do that uses the session it is called by.
    pub fn with<T>(
        &self,
        act: impl FnOnce(&mut Conversation) -> Result<T, FireboxError>,
    ) -> Result<T, FireboxError> {
        match self.0.try_lock() {
            Ok(mut conversation) => act(&mut conversation),
            Err(TryLockError::WouldBlock) => Err(FireboxError::Busy),
            Err(TryLockError::Poisoned(_)) => {
                Err(FireboxError::Panicked { reason: "an earlier call did not come to its end".into() })
            }
        }
    }
}
