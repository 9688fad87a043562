//! One memory for all models that a server has.

use firebox_runtime::residency::{ShareOptions, SharedBudget};
use firebox_runtime::{Account, Budget, RuntimeError};
use firebox_store::ReadMethod;

use crate::configuration::ModelEntry;

/// The divisor of the part of the models' memory that is reserved for no model: it holds intermediate results and the
/// program's own growth.
const EVERYBODYS: u64 = 8;

/// The memory that a server takes beside its models: connections, the console, and code that has not run before.
const SERVER: u64 = 24 << 20;

/// The memory that several models share, with the part that is reserved for each.
#[derive(Debug, Clone)]
pub struct Sharing {
    shared: SharedBudget,
    /// The sum of the memory that is reserved for single models.
    reserved: u64,
    method: Option<ReadMethod>,
}

impl Sharing {
    /// Makes a shared budget of `memory` bytes for all models together. If `memory` is absent, the budget is the sum of what
    /// the entries reserve; if they reserve nothing, returns `None` and the models do not share.
    pub fn of(
        entries: &[ModelEntry],
        memory: Option<u64>,
        method: Option<ReadMethod>,
    ) -> Result<Option<Self>, RuntimeError> {
        let reserved = entries.iter().filter_map(|entry| entry.reserved).fold(0, u64::saturating_add);
        let Some(memory) = memory.or((reserved > 0).then_some(reserved)) else { return Ok(None) };
        Ok(Some(Self { shared: SharedBudget::beside_program(memory, SERVER)?, reserved, method }))
    }

    /// Where models are opened.
    pub fn shared(&self) -> &SharedBudget {
        &self.shared
    }

    /// Returns the budget, with its uses by account.
    pub fn budget(&self) -> &Budget {
        self.shared.budget()
    }

    /// On what terms a model shares it. Memory that it is said to take has its part of the program in it, and is less where
    /// there is less than all are to have.
    pub fn options(&self, entry: &ModelEntry) -> ShareOptions {
        let total = self.budget().total();
        let left = total.saturating_sub(self.budget().held(Account::Program));
        let own = left - left / EVERYBODYS;
        let part = |reserved: u64| {
            let all = u128::from(self.reserved.max(total).max(1));
            u64::try_from(u128::from(reserved) * u128::from(own) / all).unwrap_or(own)
        };
        ShareOptions {
            reserved: entry.reserved.map_or(0, part),
            guaranteed: true,
            pinned: entry.pinned,
            // Those that are opened at the start are filled once all are there, and others read what they are asked for.
            preload: false,
            method: self.method.unwrap_or(ShareOptions::default().method),
            ..ShareOptions::default()
        }
    }
}
