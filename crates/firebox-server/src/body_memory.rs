//! The memory that the bodies of requests take together.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use firebox_runtime::{Account, Budget, Charge, MemoryError};
use serde_json::Value;

use crate::error::ApiError;
use crate::json_limits::MEMORY_PER_BODY_BYTE;

/// Bytes of a body that are not charged to the memory budget: a short request is answered however full it is.
const UNCHARGED: usize = 64 << 10;

/// The memory of all bodies that are being received or answered, by key. A key may take half of it, so that others always
/// have some; more is refused until a request of the key ends.
#[derive(Debug)]
pub(crate) struct BodyMemory {
    most: usize,
    most_of_key: usize,
    /// Bytes that the bodies of each key take.
    taken: Mutex<HashMap<String, usize>>,
    budget: Option<Budget>,
}

/// The share of one body. It is returned when this is dropped.
#[derive(Debug)]
pub(crate) struct BodyCharge {
    memory: Arc<BodyMemory>,
    scope: String,
    bytes: usize,
    /// What of it the memory budget knows of.
    charge: Option<Charge>,
}

impl BodyMemory {
    /// Creates a bound of `most` bytes, but at least for one body of `max_body` bytes with its parsed JSON. Long bodies are
    /// charged to the budget.
    pub fn new(most: usize, max_body: usize, budget: Option<&Budget>) -> Arc<Self> {
        let one = max_body.saturating_mul(MEMORY_PER_BODY_BYTE + 2);
        let (most, most_of_key) = (most.max(one), one.max(most / 2));
        Arc::new(Self { most, most_of_key, taken: Mutex::default(), budget: budget.cloned() })
    }

    /// Begins a body of a key, which takes nothing yet.
    pub fn begin(self: &Arc<Self>, scope: &str) -> BodyCharge {
        BodyCharge { memory: self.clone(), scope: scope.to_owned(), bytes: 0, charge: None }
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
        let memory = self.memory.clone();
        let BodyMemory { most, most_of_key, .. } = *memory;
        let mut taken = memory.lock();
        let all: usize = taken.values().sum();
        let mine = taken.get(&self.scope).copied().unwrap_or_default();
        if bytes > most.saturating_sub(all) || bytes > most_of_key.saturating_sub(mine) {
            return Err(ApiError::bodies_full(most));
        }
        // A key may always have one: memory that is full of what can be evicted refuses no single request.
        if self.charge(self.bytes + bytes).is_err() && mine > self.bytes {
            return Err(ApiError::too_many("memory is short; ask again later, or send less at once"));
        }
        *taken.entry(self.scope.clone()).or_default() += bytes;
        self.bytes += bytes;
        Ok(())
    }

    /// Charges a body of so many bytes, or leaves the charge as it is.
    fn charge(&mut self, bytes: usize) -> Result<(), MemoryError> {
        let bytes = bytes.saturating_sub(UNCHARGED) as u64;
        match (&mut self.charge, &self.memory.budget) {
            (Some(charge), _) => charge.resize(bytes),
            (None, Some(budget)) if bytes > 0 => {
                self.charge = Some(budget.charge(Account::Scratch, bytes)?);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Returns bytes.
    pub fn shrink(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        // A charge that shrinks is not refused.
        let _ = self.charge(self.bytes);
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
        let memory = BodyMemory::new(100, 1, None);
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
    fn long_bodies_are_charged_and_short_ones_need_no_budget() {
        let budget = Budget::new(1 << 20);
        let memory = BodyMemory::new(8 << 20, 1 << 20, Some(&budget));
        let mut long = memory.begin("a");
        long.grow((1 << 20) + UNCHARGED).unwrap();
        assert_eq!(budget.left(), 0);
        let mut second = memory.begin("a");
        second.grow(UNCHARGED).unwrap();
        assert_eq!(second.grow(1).unwrap_err().status, StatusCode::TOO_MANY_REQUESTS);
        drop(second);
        long.grow(1).unwrap();
        memory.begin("b").grow(2 * UNCHARGED).unwrap();
        long.shrink(UNCHARGED + 1);
        assert_eq!(budget.left(), UNCHARGED as u64);
        drop(long);
        assert_eq!(budget.left(), 1 << 20);
    }

    #[test]
    fn the_largest_body_always_fits() {
        let memory = BodyMemory::new(100, 1 << 20, None);
        memory.begin("a").grow((1 << 20) * (MEMORY_PER_BODY_BYTE + 2)).unwrap();
    }
}
