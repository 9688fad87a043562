//! Releases the resident pages of the program's code and constants.

use std::ffi::{c_int, c_void};
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::slice;

/// Releases the pages of code and constants that were used so far; most code that opens a model does not run again. Code that
/// runs again returns from the page cache, sixteen pages at a time. Does nothing under a debugger, which may have written
/// breakpoints into the code.
pub(crate) fn release() {
    if is_traced() {
        return;
    }
    // SAFETY: the callback has the required type and ignores its data pointer.
    unsafe { libc::dl_iterate_phdr(Some(release_segments), null_mut()) };
}

/// Releases the read-only segments of one loaded object. The loader holds its lock during the iteration, so that no object is
/// unloaded.
unsafe extern "C" fn release_segments(object: *mut libc::dl_phdr_info, _: usize, _: *mut c_void) -> c_int {
    // SAFETY: the caller passes an object that outlives the call, and `dlpi_phnum` headers at `dlpi_phdr`.
    let (base, headers) = unsafe {
        let object = &*object;
        (object.dlpi_addr, slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum.into()))
    };
    // SAFETY: the call takes no pointers.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let constant =
        headers.iter().filter(|part| part.p_type == libc::PT_LOAD && part.p_flags & libc::PF_W == 0);
    for part in constant {
        let start = (base + part.p_vaddr) as usize;
        let first = start / page * page;
        let bytes = start + part.p_memsz as usize - first;
        // SAFETY: segments that are not writable are private file mappings on pages of their own that were never written to;
        // relocations lie in segments that are writable until the loader has finished. The next access reads the same bytes
        // from the file.
        unsafe { libc::madvise(with_exposed_provenance_mut(first), bytes, libc::MADV_DONTNEED) };
    }
    0
}

/// Returns whether a debugger is attached, and `true` if the system does not say.
fn is_traced() -> bool {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else { return true };
    status.lines().find_map(|line| line.strip_prefix("TracerPid:")).is_none_or(|tracer| tracer.trim() != "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the resident bytes of the program's code and constants, in KiB.
    fn resident() -> u64 {
        let list = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let own = std::env::current_exe().unwrap();
        let mut is_own = false;
        let mut sum = 0;
        for line in list.lines() {
            if line.contains(" r-xp ") || line.contains(" r--p ") {
                is_own = line.ends_with(own.to_str().unwrap());
            } else if let Some(kib) = line.strip_prefix("Rss:").filter(|_| is_own) {
                sum += kib.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
                is_own = false;
            }
        }
        sum
    }

    #[test]
    fn released_code_still_runs() {
        let value: serde_json::Value = serde_json::from_str(r#"{"a":[1,2.5,"b"]}"#).unwrap();
        let text = value.to_string();
        let goes = || {
            let before = resident();
            release();
            resident() < before
        };
        // Other tests run code at the same time, which makes more of it resident.
        assert!(is_traced() || (0..10).any(|_| goes()));
        assert_eq!(value.to_string(), text);
    }
}
