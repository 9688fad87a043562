//! The memory that the bodies of requests take together.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;

use crate::error::ApiError;
use crate::json_limits::MEMORY_PER_BODY_BYTE;

/// The memory of all bodies that are being received or answered, by key. A key may take half of it, so that others always
/// have some; more is refused until a request of the key ends.
#[derive(Debug)]
pub(crate) struct BodyMemory {
    most: usize,
    most_of_key: usize,
    /// Bytes that the bodies of each key take.
    taken: Mutex<HashMap<String, usize>>,
}

/// The share of one body. It is returned when this is dropped.
#[derive(Debug)]
pub(crate) struct BodyCharge {
    memory: Arc<BodyMemory>,
    scope: String,
    bytes: usize,
}

impl BodyMemory {
    /// Creates a bound of `most` bytes, but at least for one body of `max_body` bytes with its parsed JSON.
    pub fn new(most: usize, max_body: usize) -> Arc<Self> {
        let one = max_body.saturating_mul(MEMORY_PER_BODY_BYTE + 2);
        Arc::new(Self { most: most.max(one), most_of_key: one.max(most / 2), taken: Mutex::default() })
    }

    /// Begins a body of a key, which takes nothing yet.
    pub fn begin(self: &Arc<Self>, scope: &str) -> BodyCharge {
        BodyCharge { memory: self.clone(), scope: scope.to_owned(), bytes: 0 }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the bytes that all bodies take.
    #[cfg(test)]
    fn held(&self) -> usize {
        self.lock().values().sum()
    }
}

impl BodyCharge {
    /// Takes more bytes, or refuses the request.
    pub fn grow(&mut self, bytes: usize) -> Result<(), ApiError> {
        let BodyMemory { most, most_of_key, .. } = *self.memory;
        let mut taken = self.memory.lock();
        let all: usize = taken.values().sum();
        let mine = taken.get(&self.scope).copied().unwrap_or_default();
        if bytes > most.saturating_sub(all) || bytes > most_of_key.saturating_sub(mine) {
            return Err(ApiError::bodies_full(most));
        }
        *taken.entry(self.scope.clone()).or_default() += bytes;
        self.bytes += bytes;
        Ok(())
    }

    /// Returns bytes.
    pub fn shrink(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        let mut taken = self.memory.lock();
        if let Some(mine) = taken.get_mut(&self.scope) {
            *mine -= bytes;
            if *mine == 0 {
                taken.remove(&self.scope);
            }
        }
    }
}

impl Drop for BodyCharge {
    fn drop(&mut self) {
        self.shrink(self.bytes);
    }
}

/// The parsed body of a request, with its share of the bodies' memory.
#[derive(Debug)]
pub(crate) struct ParsedBody {
    pub value: Value,
    #[expect(dead_code, reason = "held for its drop")]
    charge: BodyCharge,
}

impl ParsedBody {
    pub fn new(value: Value, charge: BodyCharge) -> Self {
        Self { value, charge }
    }
}

impl Deref for ParsedBody {
    type Target = Value;

    fn deref(&self) -> &Value {
        &self.value
    }
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;

    use super::*;

    #[test]
    fn bodies_share_their_memory_and_return_it() {
        let memory = BodyMemory::new(100, 1);
        let mut first = memory.begin("a");
        first.grow(30).unwrap();
        let mut second = memory.begin("a");
        second.grow(20).unwrap();
        assert_eq!(second.grow(1).unwrap_err().status, StatusCode::TOO_MANY_REQUESTS, "half is of one key");
        let mut other = memory.begin("b");
        other.grow(40).unwrap();
        let mut third = memory.begin("c");
        assert!(third.grow(11).is_err());
        third.grow(10).unwrap();
        first.shrink(25);
        second.grow(20).unwrap();
        assert_eq!(memory.held(), 5 + 40 + 40 + 10);
        drop([first, second, other, third]);
        assert_eq!(memory.held(), 0);
    }

    #[test]
    fn the_largest_body_always_fits() {
        let memory = BodyMemory::new(100, 1 << 20);
        memory.begin("a").grow((1 << 20) * (MEMORY_PER_BODY_BYTE + 2)).unwrap();
    }
}
