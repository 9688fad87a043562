//! Anonymous memory that weights are read into: allocated in huge pages, trimmed, and moved page by page.

use std::slice;

use memmap2::{MmapMut, MmapRaw};

use crate::error::StoreError;

/// Bytes of a huge page. Memory is populated by one at a time, because the kernel locks the address space meanwhile and no other
/// thread can map or unmap memory.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// The most that a last page may lack of a huge page to be allocated as one.
const HUGE_PAGE_SLACK: usize = HUGE_PAGE / 32;

/// Bytes of memory that a buffer of so many bytes takes: whole small pages, or another huge page where nearly one is needed.
pub(crate) fn resident_size(bytes: usize) -> usize {
    let huge = bytes.next_multiple_of(HUGE_PAGE);
    if huge - bytes <= HUGE_PAGE_SLACK { huge } else { bytes }
}

/// Private memory, of which the first bytes are in use. A shared reference reaches those alone, so that the pages behind them can be
/// returned to the system while tensors refer to the memory.
#[derive(Debug)]
pub(crate) struct Memory {
    map: MmapRaw,
    used: usize,
}

impl Memory {
    fn new(map: MmapMut, used: usize) -> Self {
        Self { used: used.min(map.len()), map: map.into() }
    }

    pub fn used(&self) -> usize {
        self.used
    }

    pub fn set_used(&mut self, bytes: usize) {
        self.used = bytes.min(self.map.len());
    }

    /// Returns whether it begins on a huge page.
    pub fn has_huge_pages(&self) -> bool {
        self.map.as_ptr().addr().is_multiple_of(HUGE_PAGE)
    }

    /// Returns the pages behind the used bytes to the system. They are empty from then on.
    #[cfg(target_os = "linux")]
    pub fn trim(&self) {
        // SAFETY: sysconf takes a number and touches no memory.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(HUGE_PAGE);
        let from = self.used.next_multiple_of(page);
        if from < self.map.len() {
            let bytes = self.map.len() - from;
            // SAFETY: the range lies within the mapping, which this owns and which begins on a page. It lies behind the used bytes,
            // to which `as_ref` gives references; only `as_mut` gives references to it, which exclude `self`.
            unsafe { libc::madvise(self.map.as_mut_ptr().add(from).cast(), bytes, libc::MADV_DONTNEED) };
        }
    }

    #[cfg(not(target_os = "linux"))]
    pub fn trim(&self) {}
}

/// The used bytes.
impl AsRef<[u8]> for Memory {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the mapping is at least as long, was zeroed by the system, and lives as long as `self`. Whatever changes these bytes
        // borrows `self` mutably: `as_mut` and `set_used`; `trim` leaves them alone.
        unsafe { slice::from_raw_parts(self.map.as_ptr(), self.used) }
    }
}

/// All bytes, used or not.
impl AsMut<[u8]> for Memory {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is as long, was zeroed by the system, and is private to `self`, which is borrowed mutably.
        unsafe { slice::from_raw_parts_mut(self.map.as_mut_ptr(), self.map.len()) }
    }
}

/// Allocates at least so many zeroed bytes. The memory begins on a page, on a huge page where it has some, and may have addresses
/// behind it that take no memory.
pub(crate) fn allocate(bytes: usize) -> Result<Memory, StoreError> {
    allocate_from(bytes, |_| PageMove::Unavailable)
}

/// The outcome of moving a huge page to another address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageMove {
    Moved,
    /// There was no page to move, or the system cannot move pages. Nothing changed.
    Unavailable,
    /// The move failed, and it is unknown what the target addresses map now.
    Lost,
}

/// Allocates memory as [`allocate`] does, of huge pages that `move_page` moves into place as long as it has some. Those keep their
/// contents.
pub(crate) fn allocate_from(
    bytes: usize,
    move_page: impl Fn(&mut [u8]) -> PageMove,
) -> Result<Memory, StoreError> {
    // Linux aligns a mapping to huge pages only if its length is a multiple of them. Otherwise there is one huge page less and small
    // pages at both ends.
    let length = if bytes < HUGE_PAGE { bytes.max(1) } else { bytes.next_multiple_of(HUGE_PAGE) };
    let map = MmapMut::map_anon(length);
    let mut map = map.map_err(|source| StoreError::Memory { bytes: bytes as u64, source })?;
    match populate(&mut map, bytes, move_page) {
        PageMove::Lost => {
            // Another thread may have been given these addresses, so they must not be unmapped.
            std::mem::forget(map);
            allocate(bytes)
        }
        PageMove::Moved | PageMove::Unavailable => Ok(Memory::new(map, bytes)),
    }
}

/// Populates the first `bytes` of new memory. The hints may fail on older systems without harm: huge pages cost fewer translations,
/// and pages that exist before a read begins do not interrupt it. The end is in small pages, because a huge page would exceed `bytes`.
#[cfg(target_os = "linux")]
fn populate(map: &mut MmapMut, bytes: usize, move_page: impl Fn(&mut [u8]) -> PageMove) -> PageMove {
    use memmap2::Advice;
    let huge = bytes / HUGE_PAGE * HUGE_PAGE;
    drop(map.advise_range(Advice::HugePage, 0, huge));
    drop(map.advise_range(Advice::NoHugePage, huge, map.len() - huge));
    for start in (0..bytes).step_by(HUGE_PAGE) {
        let moved =
            if start < huge { move_page(&mut map[start..start + HUGE_PAGE]) } else { PageMove::Unavailable };
        match moved {
            PageMove::Moved => {}
            PageMove::Unavailable => {
                drop(map.advise_range(Advice::PopulateWrite, start, HUGE_PAGE.min(bytes - start)));
            }
            PageMove::Lost => return PageMove::Lost,
        }
    }
    PageMove::Moved
}

#[cfg(not(target_os = "linux"))]
fn populate(_: &mut MmapMut, _: usize, _: impl Fn(&mut [u8]) -> PageMove) -> PageMove {
    PageMove::Unavailable
}

/// Moves pages to other addresses of the same length. The source stays mapped, without pages.
#[cfg(target_os = "linux")]
pub(crate) fn move_pages(from: &mut [u8], to: &mut [u8]) -> PageMove {
    assert_eq!(from.len(), to.len());
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
    // SAFETY: both ranges are private anonymous memory of this process and borrowed mutably, so nothing else refers to them. Both stay
    // mapped, so that their owners unmap nothing else later.
    let at = unsafe {
        libc::mremap(
            from.as_mut_ptr().cast(),
            from.len(),
            to.len(),
            flags,
            to.as_mut_ptr().cast::<libc::c_void>(),
        )
    };
    if at != libc::MAP_FAILED {
        return PageMove::Moved;
    }
    // A system that does not know the flags refuses before it changes anything. Any other error may come after the target was
    // unmapped.
    let error = std::io::Error::last_os_error().raw_os_error();
    if error == Some(libc::EINVAL) { PageMove::Unavailable } else { PageMove::Lost }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn move_pages(_: &mut [u8], _: &mut [u8]) -> PageMove {
    PageMove::Unavailable
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn memory_is_abandoned_when_a_page_was_lost() {
        let (first, count) = (Cell::new(None), Cell::new(0));
        let lost_at_second = |page: &mut [u8]| {
            first.set(first.get().or(Some(page.as_ptr())));
            count.set(count.get() + 1);
            if count.get() == 2 { PageMove::Lost } else { PageMove::Unavailable }
        };
        let memory = allocate_from(3 * HUGE_PAGE, lost_at_second).unwrap();
        assert_eq!(count.get(), 2);
        let memory = memory.as_ref();
        assert!(Some(memory.as_ptr()) != first.get() && memory.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn nearly_a_huge_page_is_allocated_as_one() {
        let nearly = HUGE_PAGE - HUGE_PAGE_SLACK;
        let sizes = [nearly - 1, nearly, 3 * HUGE_PAGE, 3 * HUGE_PAGE + 4096, 4 * HUGE_PAGE - 4096, 0];
        let expected = [nearly - 1, HUGE_PAGE, 3 * HUGE_PAGE, 3 * HUGE_PAGE + 4096, 4 * HUGE_PAGE, 0];
        assert_eq!(sizes.map(resident_size), expected);
    }

    #[test]
    fn trimming_empties_the_rest_and_nothing_else() {
        let bytes = HUGE_PAGE + 3 * 4096;
        let mut memory = allocate(bytes).unwrap();
        memory.as_mut()[..bytes].fill(7);
        for kept in [bytes, HUGE_PAGE + 4096, 5000, 0] {
            memory.set_used(kept);
            memory.trim();
            assert!(memory.as_ref().len() == kept && memory.as_ref().iter().all(|byte| *byte == 7));
            let page = 64 << 10;
            assert!(memory.as_mut().iter().skip(kept.next_multiple_of(page)).all(|byte| *byte == 0));
        }
    }
}
