//! Releases the resident pages of the program's code and constants.

use std::ffi::{c_int, c_void};
use std::ptr::{from_mut, with_exposed_provenance_mut};
use std::slice;

/// Releases the pages of code and constants that were used so far, of the program or library that this function is part of; most code
/// that opens a model does not run again. Code that runs again returns from the page cache, sixteen pages at a time. Other libraries
/// are left alone: what has mapped them decides how. Does nothing under a debugger, which may have written breakpoints into the
/// code. Returns the bytes of the segments that were released.
pub(crate) fn release() -> usize {
    let mut released = 0;
    if !is_traced() {
        // SAFETY: the callback has the required type, and its data is a `usize` that outlives the call.
        unsafe { libc::dl_iterate_phdr(Some(release_own_segments), from_mut(&mut released).cast()) };
    }
    released
}

/// Returns start and length of an object's read-only segments, from their first page on, if this code is part of the object.
///
/// # Safety
/// The object has `dlpi_phnum` headers at `dlpi_phdr`.
unsafe fn own_segments(object: &libc::dl_phdr_info) -> impl Iterator<Item = (usize, usize)> {
    // SAFETY: the caller says so.
    let headers = unsafe { slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum.into()) };
    let base = object.dlpi_addr as usize;
    let loaded = headers.iter().filter(|part| part.p_type == libc::PT_LOAD);
    let loaded = loaded.map(move |part| {
        let start = base.wrapping_add(part.p_vaddr as usize);
        (start..start.saturating_add(part.p_memsz as usize), part.p_flags & libc::PF_W == 0)
    });
    let here = release as fn() -> usize as usize;
    let is_own = loaded.clone().any(|(addresses, _)| addresses.contains(&here));
    // SAFETY: the call takes no pointers.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    loaded.filter(move |(_, is_constant)| is_own && *is_constant).map(move |(addresses, _)| {
        let first = addresses.start / page * page;
        (first, addresses.end - first)
    })
}

/// Releases the read-only segments of the program's own object, which ends the iteration. The loader holds its lock during the
/// iteration, so that no object is unloaded.
unsafe extern "C" fn release_own_segments(
    object: *mut libc::dl_phdr_info,
    _: usize,
    released: *mut c_void,
) -> c_int {
    // SAFETY: the caller passes an object with its headers, which outlives the call, and the data of `release`.
    let (own, released) = unsafe { (own_segments(&*object), &mut *released.cast::<usize>()) };
    for (first, bytes) in own {
        // SAFETY: segments that are not writable are private file mappings on pages of their own that were never written to;
        // relocations lie in segments that are writable until the loader has finished. The next access reads the same bytes
        // from the file.
        unsafe { libc::madvise(with_exposed_provenance_mut(first), bytes, libc::MADV_DONTNEED) };
        *released += bytes;
    }
    c_int::from(*released > 0)
}

/// Returns whether a debugger is attached, and `true` if the system does not say.
fn is_traced() -> bool {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else { return true };
    status.lines().find_map(|line| line.strip_prefix("TracerPid:")).is_none_or(|tracer| tracer.trim() != "0")
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt as _;
    use std::ptr::from_ref;

    use super::*;

    /// The most that the system maps around a page that is touched.
    const AROUND: usize = 64 << 10;

    /// A constant of which no other code touches anything, wide enough that pages are not mapped again with others around its middle.
    static UNTOUCHED: [u64; 4 * AROUND / 8] = [7; 4 * AROUND / 8];

    /// Returns whether a page is mapped now.
    fn is_mapped(address: usize) -> bool {
        let mut entry = [0; 8];
        let page = address as u64 / 4096;
        File::open("/proc/self/pagemap").unwrap().read_exact_at(&mut entry, page * 8).unwrap();
        u64::from_le_bytes(entry) >> 63 == 1
    }

    /// Reads a word, so that its page is mapped, and returns its address.
    fn touch(word: *const u64) -> usize {
        // SAFETY: the callers pass addresses of constants and of code, which can be read.
        std::hint::black_box(unsafe { word.read_volatile() });
        word.addr()
    }

    /// Counts the own read-only segments of one object after the other.
    unsafe extern "C" fn count(object: *mut libc::dl_phdr_info, _: usize, counts: *mut c_void) -> c_int {
        // SAFETY: as in `release_own_segments`; the data is that of the test.
        let (own, counts) = unsafe { (own_segments(&*object), &mut *counts.cast::<Vec<usize>>()) };
        counts.push(own.count());
        0
    }

    #[test]
    fn own_pages_are_released_and_those_of_other_libraries_stay() {
        let mut counts: Vec<usize> = Vec::new();
        // SAFETY: the callback has the required type, and its data outlives the call.
        unsafe { libc::dl_iterate_phdr(Some(count), from_mut(&mut counts).cast()) };
        assert!(counts.len() > 1, "the C library is another object");
        assert_eq!(counts.iter().filter(|count| **count > 0).count(), 1, "{counts:?}");

        let own = from_ref(&UNTOUCHED[UNTOUCHED.len() / 2]);
        // Code of the C library that no test runs.
        let other = (libc::glob as *const () as usize & !7) as *const u64;
        assert!(is_mapped(touch(own)) && is_mapped(touch(other)));
        let released = release();
        assert_eq!(is_mapped(own.addr()), is_traced());
        assert!(is_mapped(other.addr()));
        assert!(is_traced() || released > 4 * AROUND);
        assert_eq!(touch(own), own.addr());
    }
}
