//! Memory that was let go of, for what is read next.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memmap2::MmapMut;

use crate::error::StoreError;
use crate::memory::{LARGE, Put, made};

/// Where memory goes that weights were kept in, of whose large pages the next buffers are made. What the system gets back it
/// has to clear before it gives it to anybody, and a virtual machine may have to fetch it from its host: either can take longer than the
/// disk takes to fill it. Unlike in [`Spare`](crate::Spare), what is made need not be as large as what was let go of.
///
/// Whoever counts memory [clears](Self::clear) it, because nobody may come for what is left here. Clones are the same.
#[derive(Debug, Clone, Default)]
pub struct Scrap(Arc<Mutex<Pieces>>);

#[derive(Debug, Default)]
struct Pieces {
    all: Vec<Piece>,
    /// The system does not move pages.
    is_refused: bool,
}

#[derive(Debug)]
struct Piece {
    memory: MmapMut,
    /// Where its large pages end that are still there.
    end: usize,
}

impl Scrap {
    /// Bytes that are here.
    #[cfg(test)]
    fn bytes(&self) -> usize {
        self.pieces().all.iter().map(|piece| piece.end).sum()
    }

    /// Gives back to the system what is here.
    pub fn clear(&self) {
        let all = std::mem::take(&mut self.pieces().all);
        drop(all);
    }

    /// Takes memory that nothing refers to any more, of which so many bytes are in use.
    pub(crate) fn leave(&self, memory: MmapMut, bytes: usize) {
        let end = bytes.min(memory.len()) / LARGE * LARGE;
        let mut pieces = self.pieces();
        // Where large pages begin elsewhere there are none to be had.
        if end > 0 && memory.as_ptr().addr().is_multiple_of(LARGE) && !pieces.is_refused {
            pieces.all.push(Piece { memory, end });
        }
    }

    /// Memory of at least so many bytes, which is not empty.
    pub(crate) fn make(&self, bytes: usize) -> Result<MmapMut, StoreError> {
        made(bytes, |page| self.put(page))
    }

    /// Puts a large page in the place of another one that has no memory yet, if there is one.
    fn put(&self, place: &mut [u8]) -> Put {
        let mut pieces = self.pieces();
        if !place.as_ptr().addr().is_multiple_of(LARGE) {
            return Put::Nothing;
        }
        let Some(piece) = pieces.all.last_mut() else { return Put::Nothing };
        piece.end -= LARGE;
        let put = moved(&mut piece.memory[piece.end..][..LARGE], place);
        let is_used_up = piece.end == 0;
        pieces.is_refused |= put != Put::Done;
        let done_with = match put {
            Put::Done if is_used_up => pieces.all.pop().into_iter().collect(),
            Put::Done => Vec::new(),
            Put::Nothing | Put::Lost => std::mem::take(&mut pieces.all),
        };
        drop(pieces);
        // What goes back to the system does so while nobody waits for the lock.
        drop(done_with);
        put
    }

    fn pieces(&self) -> MutexGuard<'_, Pieces> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Moves pages, if the system can. Where they were there are none then.
#[cfg(target_os = "linux")]
fn moved(from: &mut [u8], to: &mut [u8]) -> Put {
    assert_eq!(from.len(), to.len());
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
    // SAFETY: both are private anonymous memory of this process, that nothing else refers to: they are borrowed here. What was mapped
    // at either address stays mapped there, so that who unmaps it unmaps nothing else.
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
        return Put::Done;
    }
    // An older system refuses what it does not know before it does anything. Any other fault may come after it has unmapped what was there.
    let error = std::io::Error::last_os_error().raw_os_error();
    if error == Some(libc::EINVAL) { Put::Nothing } else { Put::Lost }
}

#[cfg(not(target_os = "linux"))]
fn moved(_: &mut [u8], _: &mut [u8]) -> Put {
    Put::Nothing
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::*;
    use crate::memory::anonymous;

    fn filled(bytes: usize, with: u8) -> MmapMut {
        let mut memory = anonymous(bytes).unwrap();
        memory[..bytes].fill(with);
        memory
    }

    #[test]
    fn large_pages_are_used_again_in_memory_of_another_size() {
        let scrap = Scrap::default();
        scrap.leave(filled(LARGE + 5000, 1), LARGE + 5000);
        scrap.leave(filled(2 * LARGE, 2), 2 * LARGE);
        assert_eq!(scrap.bytes(), 3 * LARGE);
        let bytes = 4 * LARGE + 8192;
        let mut made = scrap.make(bytes).unwrap();
        assert_eq!(scrap.bytes(), 0);
        for (large, was) in [2, 2, 1, 0].into_iter().enumerate() {
            assert!(made[large * LARGE..][..LARGE].iter().all(|byte| *byte == was), "large page {large}");
        }
        assert!(made[4 * LARGE..bytes].iter().all(|byte| *byte == 0));
        made[..bytes].fill(7);
        assert!(made[..bytes].iter().all(|byte| *byte == 7));
    }

    #[test]
    fn what_was_left_is_unmapped_without_what_was_made_of_it() {
        let scrap = Scrap::default();
        scrap.leave(filled(3 * LARGE, 1), 3 * LARGE);
        let made = scrap.make(LARGE).unwrap();
        let other = filled(3 * LARGE, 2);
        scrap.clear();
        assert_eq!(scrap.bytes(), 0);
        assert!(made[..LARGE].iter().all(|byte| *byte == 1) && other.iter().all(|byte| *byte == 2));
    }

    #[test]
    fn what_has_no_large_pages_goes_back_at_once() {
        let scrap = Scrap::default();
        scrap.leave(filled(LARGE - 4096, 1), LARGE - 4096);
        scrap.leave(filled(2 * LARGE, 1), 5000);
        assert_eq!(scrap.bytes(), 0);
    }
}
