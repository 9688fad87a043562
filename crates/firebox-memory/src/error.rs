//! Errors of budgets, plans and sizes.

use std::path::PathBuf;

use crate::account::Account;
use crate::bytes::human_bytes;

/// Why memory could not be charged, or a plan not be made.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The memory budget has no room for what was about to be allocated.
    #[error(
        "{} for {account} do not fit: {} of {} are left; {}",
        human_bytes(*wanted), human_bytes(*left), human_bytes(*total), account.remedy()
    )]
    OverBudget {
        /// What it was for.
        account: Account,
        /// Bytes that were asked for.
        wanted: u64,
        /// Bytes that were left.
        left: u64,
        /// Bytes in all.
        total: u64,
    },
    /// A text does not say how many bytes are meant.
    #[error("{text:?} is no size; write bytes, or K, M, G or T (powers of 1024), such as 600M or 1.5G")]
    Size {
        /// The text.
        text: String,
    },
    /// A setting makes no sense.
    #[error("{setting} = {value}: {reason}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// What it was set to.
        value: String,
        /// Why that cannot be.
        reason: &'static str,
    },
    /// A model does not fit, even if all of it that can be is streamed.
    #[error(
        "{:.0} MiB of memory are too little: with every layer streamed and room for {kv_tokens} tokens it takes {:.0} \
         MiB ({needed} bytes); allow that much, or expect a shorter context",
        *memory as f64 / 1048576.0, (*needed as f64 / 1048576.0).ceil()
    )]
    TooLittleMemory {
        /// Bytes that it takes at least.
        needed: u64,
        /// Bytes that were allowed.
        memory: u64,
        /// For how many tokens there would be room.
        kv_tokens: usize,
    },
    /// The profile of a machine cannot be used.
    #[error("{}: {reason}; a profile needs a name, read_bytes_per_second and weight_bytes_per_second", path.display())]
    Profile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}
