//! A budget of bytes that all models of a process share.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::MemoryError;
use crate::account::Account;

/// The memory that all models of a process may take together.
///
/// Every large allocation is charged first and made only if the charge succeeds, so that the limit is never exceeded. Clones
/// share one budget.
///
/// ```
/// use firebox_memory::{Account, Budget};
///
/// let budget = Budget::new(1 << 20);
/// let keys = budget.charge(Account::Streams, 600 << 10).unwrap();
/// assert!(budget.charge(Account::Weights, 600 << 10).is_err());
/// drop(keys);
/// assert_eq!(budget.left(), 1 << 20);
/// ```
#[derive(Debug, Clone)]
pub struct Budget {
    total: u64,
    // A mutex keeps the sum, the accounts and the peak consistent; charges are as rare as large allocations.
    held: Arc<Mutex<Held>>,
    /// The slice of the budget that charges belong to, if any.
    slice: Option<Arc<Slice>>,
}

#[derive(Debug, Default)]
struct Held {
    accounts: [u64; Account::ALL.len()],
    most: u64,
    slices: BTreeMap<u64, Reserved>,
    made: u64,
}

/// A reservation, and what its slice holds within it and beyond.
#[derive(Debug, Default)]
struct Reserved {
    bytes: u64,
    accounts: [u64; Account::ALL.len()],
    most: u64,
}

impl Reserved {
    fn sum(&self) -> u64 {
        self.accounts.iter().sum()
    }
}

/// A part of a budget. The reservation ends with the last reference.
#[derive(Debug)]
struct Slice {
    id: u64,
    held: Arc<Mutex<Held>>,
    giver: OnceLock<Giver>,
}

/// Asks others that share the budget to evict something, and returns whether they did.
struct Giver(Box<dyn Fn() -> bool + Send + Sync>);

impl fmt::Debug for Giver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Giver")
    }
}

impl Drop for Slice {
    fn drop(&mut self) {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).slices.remove(&self.id);
    }
}

impl Held {
    /// Returns the bytes held. The sum never overflows because it never exceeds the budget's total.
    fn sum(&self) -> u64 {
        self.accounts.iter().sum()
    }

    /// Returns the bytes that are neither held nor reserved by another slice.
    fn left(&self, total: u64, slice: Option<u64>) -> u64 {
        let others = self.slices.iter().filter(|(id, _)| Some(**id) != slice);
        let reserved: u64 = others.map(|(_, other)| other.bytes.saturating_sub(other.sum())).sum();
        (total - self.sum()).saturating_sub(reserved)
    }
}

impl Budget {
    /// Creates a budget of `total` bytes.
    pub fn new(total: u64) -> Self {
        Self { total, held: Arc::default(), slice: None }
    }

    /// Creates a budget that keeps accounts and refuses nothing.
    pub fn unlimited() -> Self {
        Self::new(u64::MAX)
    }

    /// Takes bytes until the charge is dropped. Fails if too few are left.
    pub fn charge(&self, account: Account, bytes: u64) -> Result<Charge, MemoryError> {
        self.take(account, bytes)?;
        Ok(Charge { budget: self.clone(), account, bytes })
    }

    /// Creates a slice for which `reserved` bytes are set aside; beyond these it takes what is left for all. The slice has
    /// its own accounts. The reservation ends when the last clone and the last charge of the slice are dropped.
    ///
    /// ```
    /// use firebox_memory::{Account, Budget};
    ///
    /// let budget = Budget::new(100);
    /// let (small, large) = (budget.slice(30).unwrap(), budget.slice(0).unwrap());
    /// assert!(large.charge(Account::Weights, 71).is_err());
    /// let weights = large.charge(Account::Weights, 70).unwrap();
    /// assert_eq!((small.left(), large.left()), (30, 0));
    /// ```
    pub fn slice(&self, reserved: u64) -> Result<Self, MemoryError> {
        let mut held = self.lock();
        let left = held.left(self.total, None);
        if reserved > left {
            let (account, total) = (Account::Weights, self.total);
            return Err(MemoryError::OverBudget { account, wanted: reserved, left, total });
        }
        let id = held.made;
        held.made += 1;
        held.slices.insert(id, Reserved { bytes: reserved, ..Reserved::default() });
        let slice = Some(Arc::new(Slice { id, held: self.held.clone(), giver: OnceLock::new() }));
        Ok(Self { total: self.total, held: self.held.clone(), slice })
    }

    /// Changes the reservation of a slice; bytes that the slice already holds count towards it. Fails and changes nothing if
    /// too few are left. Does nothing if this is no slice.
    pub fn reserve(&self, bytes: u64) -> Result<(), MemoryError> {
        let mut held = self.lock();
        let left = held.left(self.total, self.slice_id());
        let Some(slice) = self.slice_id().and_then(|id| held.slices.get_mut(&id)) else { return Ok(()) };
        let wanted = bytes.saturating_sub(slice.sum());
        if wanted > left {
            let (account, total) = (Account::Weights, self.total);
            return Err(MemoryError::OverBudget { account, wanted, left, total });
        }
        slice.bytes = bytes;
        Ok(())
    }

    /// Sets the function that [`insist`](Self::insist) calls to free memory, if this is a slice.
    pub fn ask_when_short(&self, give: impl Fn() -> bool + Send + Sync + 'static) {
        if let Some(slice) = &self.slice {
            // Set once, before the slice is shared.
            let _ = slice.giver.set(Giver(Box::new(give)));
        }
    }

    /// Takes bytes as [`charge`](Self::charge) does. If too few are left, others that share the budget evict until the charge
    /// fits or nothing more can be evicted.
    pub fn insist(&self, account: Account, bytes: u64) -> Result<Charge, MemoryError> {
        let giver = self.slice.as_ref().and_then(|slice| slice.giver.get());
        loop {
            match self.charge(account, bytes) {
                Err(MemoryError::OverBudget { .. }) if giver.is_some_and(|giver| giver.0()) => {}
                charged => return charged,
            }
        }
    }

    /// Returns the reservation, if this is a slice.
    pub fn reserved(&self) -> Option<u64> {
        let id = self.slice_id()?;
        self.lock().slices.get(&id).map(|slice| slice.bytes)
    }

    /// Returns whether bytes that are returned become available to all, because the slice holds more than its reservation.
    pub fn exceeds_reserve(&self) -> bool {
        let held = self.lock();
        let slice = self.slice_id().and_then(|id| held.slices.get(&id));
        slice.is_none_or(|slice| slice.sum() > slice.bytes)
    }

    /// Returns the bytes that an account holds, of the slice alone if this is a slice.
    pub fn held(&self, account: Account) -> u64 {
        let held = self.lock();
        match self.slice.as_ref().and_then(|slice| held.slices.get(&slice.id)) {
            Some(slice) => slice.accounts[account as usize],
            None => held.accounts[account as usize],
        }
    }

    /// Returns the bytes that are neither held nor reserved by another slice.
    pub fn left(&self) -> u64 {
        self.lock().left(self.total, self.slice_id())
    }

    /// Returns the size of the whole budget.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Returns the largest number of bytes held at once, of the slice alone if this is a slice.
    pub fn most_held(&self) -> u64 {
        let held = self.lock();
        match self.slice.as_ref().and_then(|slice| held.slices.get(&slice.id)) {
            Some(slice) => slice.most,
            None => held.most,
        }
    }

    fn take(&self, account: Account, bytes: u64) -> Result<(), MemoryError> {
        let mut held = self.lock();
        let left = held.left(self.total, self.slice_id());
        if bytes > left {
            return Err(MemoryError::OverBudget { account, wanted: bytes, left, total: self.total });
        }
        held.accounts[account as usize] += bytes;
        if let Some(slice) = self.slice_id().and_then(|id| held.slices.get_mut(&id)) {
            slice.accounts[account as usize] += bytes;
            slice.most = slice.most.max(slice.sum());
        }
        held.most = held.most.max(held.sum());
        Ok(())
    }

    fn give_back(&self, account: Account, bytes: u64) {
        let mut held = self.lock();
        held.accounts[account as usize] -= bytes;
        if let Some(slice) = self.slice_id().and_then(|id| held.slices.get_mut(&id)) {
            slice.accounts[account as usize] -= bytes;
        }
    }

    fn slice_id(&self) -> Option<u64> {
        self.slice.as_ref().map(|slice| slice.id)
    }

    /// Locks the accounts. No code panics between two related writes, so a poisoned lock holds consistent values.
    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes taken from a budget. They return to it when the charge is dropped.
#[derive(Debug)]
#[must_use = "what was charged is given back when the charge is dropped"]
pub struct Charge {
    budget: Budget,
    account: Account,
    bytes: u64,
}

impl Charge {
    /// Returns the size of the charge.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the purpose of the charge.
    pub fn account(&self) -> Account {
        self.account
    }

    /// Returns the bytes that the same budget or slice could still take.
    pub fn left(&self) -> u64 {
        self.budget.left()
    }

    /// Takes bytes of the same budget or slice for another account, as [`insist`](Budget::insist) does.
    pub fn beside(&self, account: Account, bytes: u64) -> Result<Self, MemoryError> {
        self.budget.insist(account, bytes)
    }

    /// Changes the size of the charge. Fails and changes nothing if too few bytes are left.
    pub fn resize(&mut self, bytes: u64) -> Result<(), MemoryError> {
        match bytes.checked_sub(self.bytes) {
            Some(more) => self.budget.take(self.account, more)?,
            None => self.budget.give_back(self.account, self.bytes - bytes),
        }
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.give_back(self.account, self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_refused_charge_names_a_remedy() {
        let budget = Budget::new(100 << 20);
        let _weights = budget.charge(Account::Weights, 70 << 20).unwrap();
        let refused = budget.charge(Account::Streams, 50 << 20).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "50.00 MiB for streams do not fit: 30.00 MiB of 100.00 MiB are left; raise --memory, or shorten the \
             context"
        );
        assert_eq!(budget.held(Account::Streams), 0);
        assert_eq!(budget.left(), 30 << 20);
    }

    #[test]
    fn a_failed_resize_changes_nothing() {
        let budget = Budget::new(10);
        let mut charge = budget.charge(Account::Scratch, 4).unwrap();
        charge.resize(10).unwrap();
        assert!(charge.resize(11).is_err());
        assert_eq!((charge.bytes(), budget.left()), (10, 0));
        charge.resize(1).unwrap();
        assert_eq!((budget.held(Account::Scratch), budget.most_held()), (1, 10));
        drop(charge);
        assert_eq!(budget.left(), 10);
    }

    #[test]
    fn reservations_are_kept_from_other_slices() {
        let budget = Budget::new(100);
        let (small, large) = (budget.slice(30).unwrap(), budget.slice(0).unwrap());
        assert!(budget.slice(71).is_err());
        let _all = large.charge(Account::Weights, 70).unwrap();
        let mut own = small.charge(Account::Streams, 20).unwrap();
        assert!(own.resize(31).is_err() && large.charge(Account::Weights, 1).is_err());
        assert_eq!((small.held(Account::Streams), large.held(Account::Streams)), (20, 0));
        drop(own);
        drop(small);
        assert_eq!((large.left(), budget.held(Account::Weights)), (30, 70));
    }

    #[test]
    fn a_slice_reports_its_own_reservation_and_charges() {
        let budget = Budget::new(100);
        let (small, large) = (budget.slice(30).unwrap(), budget.slice(0).unwrap());
        assert_eq!((budget.reserved(), small.reserved(), large.reserved()), (None, Some(30), Some(0)));
        let weights = large.charge(Account::Weights, 60).unwrap();
        let _streams = small.charge(Account::Streams, 20).unwrap();
        drop(weights);
        assert_eq!((small.most_held(), large.most_held(), budget.most_held()), (20, 60, 80));
    }

    #[test]
    fn insisting_evicts_others() {
        let budget = Budget::new(100);
        let (small, large) = (budget.slice(0).unwrap(), budget.slice(0).unwrap());
        let kept: Vec<_> = (0..9).map(|_| large.charge(Account::Weights, 10).unwrap()).collect();
        let kept = Mutex::new(kept);
        small.ask_when_short(move || kept.lock().unwrap().pop().is_some());
        let head = small.insist(Account::Weights, 35).unwrap();
        assert_eq!(
            (head.bytes(), large.held(Account::Weights)),
            (35, 60),
            "no more is given up than is needed"
        );
        assert!(matches!(small.insist(Account::Weights, 70), Err(MemoryError::OverBudget { .. })));
        assert!(large.insist(Account::Weights, 101).is_err(), "a charge above the total is refused");
    }

    #[test]
    fn an_unlimited_budget_does_not_overflow() {
        let budget = Budget::unlimited();
        let all = budget.charge(Account::Weights, u64::MAX).unwrap();
        assert!(budget.charge(Account::Program, 1).is_err());
        drop(all);
        assert_eq!(budget.left(), u64::MAX);
    }

    /// Charges, resizes and drops at random. The remaining charges are dropped at the end.
    fn spend(budget: &Budget, steps: &[(usize, u64)]) {
        let mut charges = Vec::new();
        for &(kind, bytes) in steps {
            match kind {
                account @ 0..5 => charges.extend(budget.charge(Account::ALL[account], bytes)),
                5 => drop(charges.pop()),
                _ => {
                    if let Some(charge) = charges.last_mut() {
                        let _ = charge.resize(bytes);
                    }
                }
            }
            let mine: u64 = charges.iter().map(Charge::bytes).sum();
            assert!(mine <= budget.total() - budget.left());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn charges_never_exceed_the_budget(
            total in 0u64..300,
            threads in prop::collection::vec(prop::collection::vec((0usize..7, 0u64..100), 0..60), 4),
            reserved in prop::collection::vec(0u64..60, 2),
        ) {
            let budget = Budget::new(total);
            let slices: Vec<Budget> = reserved.iter().filter_map(|&bytes| budget.slice(bytes).ok()).collect();
            let kept: u64 = total - budget.left();
            let everybody: Vec<&Budget> = slices.iter().chain([&budget, &budget]).collect();
            thread::scope(|scope| {
                for (steps, budget) in threads.iter().zip(everybody) {
                    scope.spawn(|| spend(budget, steps));
                }
            });
            prop_assert!(budget.most_held() <= total);
            prop_assert_eq!(budget.left(), total - kept);
            drop(slices);
            prop_assert_eq!(budget.left(), total);
            for account in Account::ALL {
                prop_assert_eq!(budget.held(account), 0);
            }
        }
    }
}
