//! Memory that one read leaves to the next.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memmap2::MmapMut;

use crate::error::StoreError;
use crate::memory::anonymous;
use crate::read_unit::Loan;

/// Where memory goes that was [read](crate::HeadFiles::read) into, once nothing refers to it any more, and whence the next
/// read takes it: memory that is new to a process comes slower than many a disk reads. Of two pieces the larger one is
/// kept. Clones are the same.
#[derive(Debug, Clone, Default)]
pub struct Spare(Arc<Mutex<Option<Piece>>>);

#[derive(Debug)]
struct Piece {
    memory: MmapMut,
    /// Those that were asked for: it has room for more, which takes no memory.
    bytes: usize,
}

impl Spare {
    /// Bytes that are kept for whoever reads next.
    pub fn bytes(&self) -> usize {
        self.kept().as_ref().map_or(0, |piece| piece.bytes)
    }

    /// Gives what is kept back to the system.
    pub fn clear(&self) {
        let kept = self.kept().take();
        drop(kept);
    }

    /// Memory for so many bytes. What is kept goes back to the system where it is too small.
    pub(crate) fn lend(&self, bytes: usize) -> Result<Lent, StoreError> {
        let kept = self.kept().take().filter(|piece| piece.bytes >= bytes);
        let new = || anonymous(bytes).map(|memory| Piece { memory, bytes });
        let piece = Some(kept.map_or_else(new, Ok)?);
        Ok(Lent { piece, home: self.clone(), loan: Loan::default() })
    }

    fn kept(&self) -> MutexGuard<'_, Option<Piece>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory that goes back to where it came from.
pub(crate) struct Lent {
    piece: Option<Piece>,
    home: Spare,
    pub(crate) loan: Loan,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        self.piece.as_ref().map_or(&[], |piece| &piece.memory)
    }
}

impl AsMut<[u8]> for Lent {
    fn as_mut(&mut self) -> &mut [u8] {
        self.piece.as_mut().map_or(&mut [], |piece| &mut piece.memory)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let Some(piece) = self.piece.take().filter(|_| !self.loan.is_kept()) else {
            return;
        };
        let mut kept = self.home.kept();
        let smaller = match &*kept {
            Some(other) if other.bytes >= piece.bytes => Some(piece),
            _ => kept.replace(piece),
        };
        drop(kept);
        // What goes back to the system does so while nobody waits for the lock.
        drop(smaller);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back_and_is_used_again_unless_it_is_kept() {
        let spare = Spare::default();
        let mut first = spare.lend(8192).unwrap();
        first.as_mut()[8191] = 7;
        let place = first.as_ref().as_ptr();
        drop(first);
        assert_eq!(spare.bytes(), 8192);
        let second = spare.lend(4096).unwrap();
        assert_eq!((second.as_ref().as_ptr(), spare.bytes()), (place, 0));
        assert!(second.loan.keep());
        drop(second);
        assert_eq!(spare.bytes(), 0);
    }

    #[test]
    fn the_larger_piece_is_kept() {
        let spare = Spare::default();
        let (small, large) = (spare.lend(100).unwrap(), spare.lend(5000).unwrap());
        drop(large);
        drop(small);
        assert_eq!(spare.bytes(), 5000);
        assert_eq!(spare.lend(6000).unwrap().as_ref().len(), 6000);
        assert_eq!(spare.bytes(), 6000);
        spare.clear();
        assert_eq!(spare.bytes(), 0);
    }
}
