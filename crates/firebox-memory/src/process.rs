//! Memory of this process and of the machine, and what a program returns to the system.

use std::sync::OnceLock;

#[cfg(target_os = "linux")]
use crate::code;

/// Returns the peak resident memory of this process in bytes; `None` if the system does not report it.
pub fn peak_resident_bytes() -> Option<u64> {
    status_field("VmHWM:")
}

/// Returns the resident memory of this process in bytes, whatever backs it.
pub fn resident_bytes() -> Option<u64> {
    status_field("VmRSS:")
}

/// Returns the resident memory of this process in bytes that no file backs.
pub fn anonymous_bytes() -> Option<u64> {
    status_field("RssAnon:")
}

/// Returns the resident pages of mapped files in bytes.
pub fn mapped_file_bytes() -> Option<u64> {
    status_field("RssFile:")
}

/// Returns the memory of the machine in bytes; `None` if the system does not report it.
pub fn physical_bytes() -> Option<u64> {
    kib_field(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")
}

static RELEASE: OnceLock<fn()> = OnceLock::new();

/// Sets the function that makes the program's allocator return freed memory to the system. The first call wins. Allocators
/// keep freed memory, and opening a model frees tens of megabytes that the [budget](crate::Budget) would miss from then on. A
/// program that sets this function also releases the pages of its code after a model was opened and after a long prompt; code
/// that runs again returns from the page cache.
pub fn set_release_to_os(release: fn()) {
    let _ = RELEASE.set(release);
}

/// Returns freed memory to the system, if the program has set a function for that.
pub fn release_to_os() {
    if let Some(release) = RELEASE.get() {
        release();
    }
}

/// Rows of a pass from which on its intermediate results are worth returning to the system.
const MIN_RELEASE_ROWS: usize = 64;

/// Returns memory and code after a prompt of which at least `MIN_RELEASE_ROWS` rows went through the layers together. Single
/// tokens follow, whose intermediate results are small. Prompts of 64 and 512 tokens in turn were measured to be as fast as
/// without this.
pub fn release_after_prompt(rows: usize) {
    if rows >= MIN_RELEASE_ROWS {
        release_with_code();
    }
}

/// Returns freed memory to the system, and releases the code that has run.
pub fn release_with_code() {
    release_to_os();
    #[cfg(target_os = "linux")]
    if RELEASE.get().is_some() {
        code::release();
    }
}

/// Lowers the share of the processor that the calling thread gets where others compute as well. It cannot be raised again.
pub fn lower_thread_priority() {
    /// A ninth of the share of a thread as it begins.
    #[cfg(target_os = "linux")]
    const NICE: libc::c_int = 10;
    #[cfg(target_os = "linux")]
    // SAFETY: it takes numbers alone. On Linux the 0 is the calling thread, and what it may not do is an error, which changes
    // nothing.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, NICE);
    }
}

fn status_field(name: &str) -> Option<u64> {
    kib_field(&std::fs::read_to_string("/proc/self/status").ok()?, name)
}

/// Returns the bytes behind `name` in lines such as `MemTotal:  24684092 kB`.
pub(crate) fn kib_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}
