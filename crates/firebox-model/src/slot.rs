//! A place for a weight that may or may not be in memory.

use std::sync::{Arc, PoisonError, RwLock};

/// A place for a part in memory. A clone is another place with the same part.
#[derive(Debug)]
pub(crate) struct Slot<T>(RwLock<Option<Arc<T>>>);

impl<T> Slot<T> {
    pub fn new() -> Self {
        Self(RwLock::new(None))
    }

    pub fn get(&self) -> Option<Arc<T>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Stores a part if the slot is empty. Returns the stored part.
    pub fn fill(&self, part: Arc<T>) -> Arc<T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner).get_or_insert(part).clone()
    }

    pub fn set(&self, part: Option<Arc<T>>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = part;
    }
}

impl<T> From<T> for Slot<T> {
    fn from(part: T) -> Self {
        Self(RwLock::new(Some(Arc::new(part))))
    }
}

impl<T> Clone for Slot<T> {
    fn clone(&self) -> Self {
        Self(RwLock::new(self.get()))
    }
}
