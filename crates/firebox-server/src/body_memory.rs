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
    taken: Mutex<Taken>,
}

/// What bodies take now.
#[derive(Debug, Default)]
struct Taken {
    /// Bytes that the bodies of each key take.
    by_key: HashMap<String, usize>,
    /// The charge to the memory budget for all bodies together, if there is one.
    charge: Option<Charge>,
}

impl Taken {
    /// Changes the charge for a body of `before` bytes that has `after`.
    fn charge(&mut self, before: usize, after: usize) -> Result<(), MemoryError> {
        let Some(charge) = &mut self.charge else { return Ok(()) };
        let [before, after] = [before, after].map(|bytes| bytes.saturating_sub(UNCHARGED) as u64);
        charge.resize(charge.bytes() + after - before)
    }
}

/// The share of one body. It is returned when this is dropped.
#[derive(Debug)]
pub(crate) struct BodyCharge {
    memory: Arc<BodyMemory>,
    scope: String,
    bytes: usize,
}

impl BodyMemory {
    /// Creates a bound of `most` bytes, but at least for one body of `max_body` bytes with its parsed JSON. Long bodies are
    /// charged to the budget.
    pub fn new(most: usize, max_body: usize, budget: Option<&Budget>) -> Arc<Self> {
        let one = max_body.saturating_mul(MEMORY_PER_BODY_BYTE + 2);
        let charge = budget.and_then(|budget| budget.charge(Account::Scratch, 0).ok());
        let taken = Mutex::new(Taken { charge, ..Taken::default() });
        Arc::new(Self { most: most.max(one), most_of_key: one.max(most / 2), taken })
    }

    /// Begins a body of a key, which takes nothing yet.
    pub fn begin(self: &Arc<Self>, scope: &str) -> BodyCharge {
        BodyCharge { memory: self.clone(), scope: scope.to_owned(), bytes: 0 }
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the bytes that all bodies take.
    #[cfg(test)]
    fn held(&self) -> usize {
        self.lock().by_key.values().sum()
    }
}

impl BodyCharge {
    /// Takes more bytes, or refuses the request.
    pub fn grow(&mut self, bytes: usize) -> Result<(), ApiError> {
        let BodyMemory { most, most_of_key, .. } = *self.memory;
        let mut taken = self.memory.lock();
        let all: usize = taken.by_key.values().sum();
        let mine = taken.by_key.get(&self.scope).copied().unwrap_or_default();
        if bytes > most.saturating_sub(all) || bytes > most_of_key.saturating_sub(mine) {
            return Err(ApiError::bodies_full(most));
        }
        if taken.charge(self.bytes, self.bytes + bytes).is_err() {
            return Err(ApiError::too_many("memory is short; ask again later, or send less at once"));
        }
        *taken.by_key.entry(self.scope.clone()).or_default() += bytes;
        self.bytes += bytes;
        Ok(())
    }

    /// Returns bytes.
    pub fn shrink(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        let mut taken = self.memory.lock();
        // A charge that shrinks is not refused.
        let _ = taken.charge(self.bytes, self.bytes - bytes);
        self.bytes -= bytes;
        if let Some(mine) = taken.by_key.get_mut(&self.scope) {
            *mine -= bytes;
            if *mine == 0 {
                taken.by_key.remove(&self.scope);
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
        assert_eq!(long.grow(1).unwrap_err().status, StatusCode::TOO_MANY_REQUESTS);
        memory.begin("a").grow(UNCHARGED).unwrap();
        long.shrink(UNCHARGED);
        assert_eq!(budget.left(), UNCHARGED as u64);
        memory.begin("b").grow(2 * UNCHARGED).unwrap();
        drop(long);
        assert_eq!(budget.left(), 1 << 20);
    }

    #[test]
    fn the_largest_body_always_fits() {
        let memory = BodyMemory::new(100, 1 << 20, None);
        memory.begin("a").grow((1 << 20) * (MEMORY_PER_BODY_BYTE + 2)).unwrap();
    }
}
