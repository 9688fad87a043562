//! The pages of the program's own code and constants.

use std::ffi::{c_int, c_void};
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::slice;

/// Lets go of the code that was run so far, and of constants: most of what opens a model is not run again. What is comes back
/// from the page cache, sixteen pages at a time. A debugger has written into code, so that beside one it stays.
pub(crate) fn let_go() {
    if is_traced() {
        return;
    }
    // SAFETY: the callback is of the type that is called, and takes no data.
    unsafe { libc::dl_iterate_phdr(Some(let_go_of), null_mut()) };
}

/// The program or one of its libraries. Who goes through them holds off whoever would unload one.
unsafe extern "C" fn let_go_of(object: *mut libc::dl_phdr_info, _: usize, _: *mut c_void) -> c_int {
    // SAFETY: the caller hands over an object that outlives the call, with as many headers as it says.
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
        // SAFETY: what is not to be written to is mapped from a file, in pages of its own, and nobody has written to it: what a
        // loader fills in lies in parts that may be written to until it is done. Whoever looks next finds the same in the file.
        unsafe { libc::madvise(with_exposed_provenance_mut(first), bytes, libc::MADV_DONTNEED) };
    }
    0
}

/// Whether a debugger looks on; supposed where the system does not say.
fn is_traced() -> bool {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else { return true };
    status.lines().find_map(|line| line.strip_prefix("TracerPid:")).is_none_or(|tracer| tracer.trim() != "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Code and constants of this program that are resident, in KiB.
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
    fn code_is_let_go_and_runs_on() {
        let value: serde_json::Value = serde_json::from_str(r#"{"a":[1,2.5,"b"]}"#).unwrap();
        let text = value.to_string();
        let goes = || {
            let before = resident();
            let_go();
            resident() < before
        };
        // Other tests run other code meanwhile, and what is run only comes to be more.
        assert!(is_traced() || (0..10).any(|_| goes()));
        assert_eq!(value.to_string(), text);
    }
}
