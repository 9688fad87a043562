//! Memory that weights are read into.

use memmap2::MmapMut;

use crate::error::StoreError;

/// Bytes of a large page. Memory is made by as many at a time: nobody else of the process can give memory back, or be given some,
/// while it is made.
pub(crate) const LARGE: usize = 2 << 20;

/// What may be missing of a last large page that is taken whole.
const MISSING: usize = LARGE / 32;

/// Bytes of memory that so many bytes take: small pages, unless what is over the large ones nearly is another one.
pub(crate) fn taken(bytes: usize) -> usize {
    let large = bytes.next_multiple_of(LARGE);
    if large - bytes <= MISSING { large } else { bytes }
}

/// Zeroed memory of at least so many bytes, which goes back to the system as a whole. It begins on a page, on a large one where it has
/// some, and there is room for addresses behind it that takes no memory.
pub(crate) fn anonymous(bytes: usize) -> Result<MmapMut, StoreError> {
    made(bytes, |_| Put::Nothing)
}

/// What came of putting a large page in the place of another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Put {
    Done,
    /// There is none.
    Nothing,
    /// What is mapped there now nobody knows.
    Lost,
}

/// The same of large pages that `put` has, as far as it has some: what was in them is there still.
pub(crate) fn made(bytes: usize, put: impl Fn(&mut [u8]) -> Put) -> Result<MmapMut, StoreError> {
    // Linux has only whole numbers of large pages begin on one: others have one page less that is large, and two ends.
    let room = if bytes < LARGE { bytes.max(1) } else { bytes.next_multiple_of(LARGE) };
    let map = MmapMut::map_anon(room);
    let mut map = map.map_err(|source| StoreError::Memory { bytes: bytes as u64, source })?;
    match populated(&mut map, bytes, put) {
        Put::Lost => {
            // Another thread may have been given the addresses, which must not be unmapped then.
            std::mem::forget(map);
            anonymous(bytes)
        }
        Put::Done | Put::Nothing => Ok(map),
    }
}

/// Has the first `bytes` of new memory be there. Wishes, which older systems do not know: large pages cost less to find, and pages that
/// are there before a read begins do not interrupt it. A large page at the end would be more than was asked for.
#[cfg(target_os = "linux")]
fn populated(map: &mut MmapMut, bytes: usize, put: impl Fn(&mut [u8]) -> Put) -> Put {
    use memmap2::Advice;
    let large = bytes / LARGE * LARGE;
    drop(map.advise_range(Advice::HugePage, 0, large));
    drop(map.advise_range(Advice::NoHugePage, large, map.len() - large));
    for start in (0..bytes).step_by(LARGE) {
        let found = if start < large { put(&mut map[start..start + LARGE]) } else { Put::Nothing };
        match found {
            Put::Done => {}
            Put::Nothing => drop(map.advise_range(Advice::PopulateWrite, start, LARGE.min(bytes - start))),
            Put::Lost => return Put::Lost,
        }
    }
    Put::Done
}

#[cfg(not(target_os = "linux"))]
fn populated(_: &mut MmapMut, _: usize, _: impl Fn(&mut [u8]) -> Put) -> Put {
    Put::Nothing
}

/// Gives back to the system what lies behind so many bytes of private memory. Its pages are empty from then on.
#[cfg(target_os = "linux")]
pub(crate) fn trim(memory: &[u8], bytes: usize) {
    // SAFETY: sysconf takes a number and touches no memory.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(LARGE);
    let from = bytes.next_multiple_of(page);
    if from < memory.len() {
        // SAFETY: the range lies within the memory, which begins on a page, and no tensor lies there: those of what was read end before.
        unsafe {
            libc::madvise(
                memory.as_ptr().add(from).cast_mut().cast(),
                memory.len() - from,
                libc::MADV_DONTNEED,
            )
        };
    }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn trim(_: &[u8], _: usize) {}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn memory_of_which_a_page_was_lost_is_not_used() {
        let (first, count) = (Cell::new(None), Cell::new(0));
        let lost_at_second = |page: &mut [u8]| {
            first.set(first.get().or(Some(page.as_ptr())));
            count.set(count.get() + 1);
            if count.get() == 2 { Put::Lost } else { Put::Nothing }
        };
        let made = made(3 * LARGE, lost_at_second).unwrap();
        assert_eq!(count.get(), 2);
        assert!(Some(made.as_ptr()) != first.get() && made.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn what_nearly_is_another_large_page_takes_one() {
        let sizes = [LARGE - MISSING - 1, LARGE - MISSING, 3 * LARGE, 3 * LARGE + 4096, 4 * LARGE - 4096, 0];
        let expected = [LARGE - MISSING - 1, LARGE, 3 * LARGE, 3 * LARGE + 4096, 4 * LARGE, 0];
        assert_eq!(sizes.map(taken), expected);
    }

    #[test]
    fn what_is_trimmed_is_empty_and_the_rest_is_what_it_was() {
        let bytes = LARGE + 3 * 4096;
        let mut memory = anonymous(bytes).unwrap();
        memory[..bytes].fill(7);
        for kept in [bytes, LARGE + 4096, 5000, 0] {
            trim(&memory, kept);
            assert!(memory[..kept].iter().all(|byte| *byte == 7));
            let page = 64 << 10;
            assert!(memory.iter().skip(kept.next_multiple_of(page)).all(|byte| *byte == 0));
        }
    }
}
