//! Memory of this process and of the machine, and what a program returns to the system.

use std::sync::OnceLock;

#[cfg(target_os = "linux")]
use crate::code;

/// The most memory this process has had resident, in bytes; absent where the system does not say.
pub fn peak_resident_bytes() -> Option<u64> {
    status_field("VmHWM:")
}

/// Memory of this process that is resident now, whatever backs it, in bytes.
pub fn resident_bytes() -> Option<u64> {
    status_field("VmRSS:")
}

/// Memory of this process that no file backs, in bytes.
pub fn anonymous_bytes() -> Option<u64> {
    status_field("RssAnon:")
}

/// Resident pages of mapped files, in bytes.
pub fn mapped_file_bytes() -> Option<u64> {
    status_field("RssFile:")
}

/// The memory of the whole machine, in bytes; absent where the system does not say.
pub fn physical_bytes() -> Option<u64> {
    kib_field(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")
}

static GIVE_BACK: OnceLock<fn()> = OnceLock::new();

/// Says how the allocator of this program gives memory back that was freed; the first to say so is believed. Allocators
/// keep it for what comes next, and opening a model frees tens of megabytes that would be missing from its
/// [budget](crate::Budget) for good. A program that says so also lets go of the pages of its code once a model is open, and
/// once a longer prompt was read; what runs on comes back from the page cache.
pub fn give_back_by(give_back: fn()) {
    let _ = GIVE_BACK.set(give_back);
}

/// Gives memory back that was freed, where the program has said how.
pub fn give_back() {
    if let Some(give_back) = GIVE_BACK.get() {
        give_back();
    }
}

/// Rows of a pass whose results take as much memory as is missed.
const MANY_ROWS: usize = 64;

/// Says that a prompt has ended of which so many rows went through the layers together. Single tokens follow, whose results
/// never take as much: what is large of the memory is given back that the next prompt would use again, with the code that
/// reads prompts. Prompts of 64 and 512 tokens one after the other were as fast as without.
pub fn prompt_ended(rows: usize) {
    if rows >= MANY_ROWS {
        give_back_with_code();
    }
}

/// The same, and the code goes too that did what is over.
pub fn give_back_with_code() {
    give_back();
    #[cfg(target_os = "linux")]
    if GIVE_BACK.get().is_some() {
        code::let_go();
    }
}

fn status_field(name: &str) -> Option<u64> {
    kib_field(&std::fs::read_to_string("/proc/self/status").ok()?, name)
}

/// The bytes behind `name` in a text of lines such as `MemTotal:  24684092 kB`.
pub(crate) fn kib_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}
