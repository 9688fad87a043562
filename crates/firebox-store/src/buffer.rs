//! Buffers that tensors are read into, and the pool that keeps their memory for the next read.
//!
//! A [`BufferGuard`] owns a buffer and hands it to its [`BufferHome`] when the last tensor over it is dropped. A stream is the home of
//! its ring of buffers, a [`BufferPool`] that of the buffers it lends. A [`DetachFlag`] tells the home that the contents were kept, so
//! that the buffer is no longer one of those that circulate.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::StoreError;
use crate::memory::{HUGE_PAGE, Memory, PageMove, allocate, allocate_from, move_pages};

/// Memory that was released and is reused by the next read. New memory has to be cleared by the kernel, and a virtual machine may have
/// to fetch it from its host: either can take longer than the disk takes to fill it.
///
/// The pool's memory belongs to no budget, so code that accounts for memory [clears](Self::clear) it. Clones share the pool.
#[derive(Debug, Clone)]
pub struct BufferPool(Arc<Pool>);

#[derive(Debug)]
struct Pool {
    reuse: Reuse,
    idle: Mutex<Idle>,
}

/// What a pool keeps of a released buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reuse {
    Largest,
    HugePages,
}

#[derive(Debug, Default)]
struct Idle {
    /// Where huge pages are reused, those that are left are the used bytes.
    buffers: Vec<Memory>,
    /// The system cannot move pages.
    is_unsupported: bool,
}

impl BufferPool {
    /// A pool that keeps the largest released buffer whole and lends it to the next read that it is large enough for.
    pub fn of_largest() -> Self {
        Self::new(Reuse::Largest)
    }

    /// A pool that moves the huge pages of released buffers into new buffers, whatever their sizes.
    pub fn of_huge_pages() -> Self {
        Self::new(Reuse::HugePages)
    }

    fn new(reuse: Reuse) -> Self {
        Self(Arc::new(Pool { reuse, idle: Mutex::default() }))
    }

    /// Bytes that are idle in the pool.
    pub fn bytes(&self) -> usize {
        self.0.idle().buffers.iter().map(Memory::used).sum()
    }

    /// Returns the idle memory to the system.
    pub fn clear(&self) {
        let idle = std::mem::take(&mut self.0.idle().buffers);
        drop(idle);
    }

    /// Memory of at least so many bytes. It may hold the contents of earlier reads.
    pub(crate) fn take(&self, bytes: usize) -> Result<Memory, StoreError> {
        match self.0.reuse {
            Reuse::Largest => {
                let fits = self.0.idle().buffers.pop().filter(|idle| idle.used() >= bytes);
                fits.map_or_else(|| allocate(bytes), Ok)
            }
            Reuse::HugePages => allocate_from(bytes, |page| self.0.move_page_to(page)),
        }
    }

    /// A buffer of at least so many bytes that returns to the pool, unless it is detached.
    pub(crate) fn lend(&self, bytes: usize) -> Result<BufferGuard, StoreError> {
        Ok(BufferGuard::new(self.take(bytes)?, self.0.clone(), DetachFlag::default()))
    }

    /// Takes in a buffer that nothing refers to any more.
    pub(crate) fn put(&self, buffer: Memory) {
        self.0.put(buffer);
    }
}

impl Pool {
    fn put(&self, mut buffer: Memory) {
        let surplus = match self.reuse {
            Reuse::Largest => {
                let mut idle = self.idle();
                match idle.buffers.last_mut() {
                    Some(other) if other.used() >= buffer.used() => Some(buffer),
                    Some(other) => Some(std::mem::replace(other, buffer)),
                    None => {
                        idle.buffers.push(buffer);
                        None
                    }
                }
            }
            Reuse::HugePages => {
                buffer.set_used(buffer.used() / HUGE_PAGE * HUGE_PAGE);
                let mut idle = self.idle();
                if buffer.used() > 0 && buffer.has_huge_pages() && !idle.is_unsupported {
                    idle.buffers.push(buffer);
                    None
                } else {
                    Some(buffer)
                }
            }
        };
        // Unmapped without the lock.
        drop(surplus);
    }

    /// Moves an idle huge page to a place that has no memory yet.
    fn move_page_to(&self, place: &mut [u8]) -> PageMove {
        let mut idle = self.idle();
        if !place.as_ptr().addr().is_multiple_of(HUGE_PAGE) {
            return PageMove::Unavailable;
        }
        let Some(buffer) = idle.buffers.last_mut() else { return PageMove::Unavailable };
        let left = buffer.used() - HUGE_PAGE;
        buffer.set_used(left);
        let moved = move_pages(&mut buffer.as_mut()[left..][..HUGE_PAGE], place);
        let is_used_up = left == 0;
        idle.is_unsupported |= moved != PageMove::Moved;
        let surplus = match moved {
            PageMove::Moved if is_used_up => idle.buffers.pop().into_iter().collect(),
            PageMove::Moved => Vec::new(),
            PageMove::Unavailable | PageMove::Lost => std::mem::take(&mut idle.buffers),
        };
        drop(idle);
        // Unmapped without the lock.
        drop(surplus);
        moved
    }

    fn idle(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes buffers back that were handed out.
pub(crate) trait BufferHome: Send + Sync {
    /// Takes a buffer that nothing refers to any more. `is_detached` says that it has left circulation.
    fn release(&self, buffer: Memory, is_detached: bool);
}

impl BufferHome for Pool {
    fn release(&self, buffer: Memory, is_detached: bool) {
        if !is_detached {
            self.put(buffer);
        }
    }
}

/// A buffer that goes to its home when it is dropped.
pub(crate) struct BufferGuard {
    /// There until the guard is dropped.
    buffer: Option<Memory>,
    home: Arc<dyn BufferHome>,
    flag: DetachFlag,
}

impl BufferGuard {
    pub fn new(buffer: Memory, home: Arc<dyn BufferHome>, flag: DetachFlag) -> Self {
        Self { buffer: Some(buffer), home, flag }
    }

    pub fn detach_flag(&self) -> &DetachFlag {
        &self.flag
    }

    /// Returns the unused end of the buffer to the system.
    pub fn trim(&self) {
        self.buffer.iter().for_each(Memory::trim);
    }
}

impl AsRef<[u8]> for BufferGuard {
    fn as_ref(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], Memory::as_ref)
    }
}

impl AsMut<[u8]> for BufferGuard {
    fn as_mut(&mut self) -> &mut [u8] {
        self.buffer.as_mut().map_or(&mut [], Memory::as_mut)
    }
}

impl Drop for BufferGuard {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.home.release(buffer, self.flag.is_detached());
        }
    }
}

impl fmt::Debug for BufferGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferGuard").field("buffer", &self.buffer).finish_non_exhaustive()
    }
}

/// Takes a lent buffer out of circulation, for as long as its contents stay in use. Clones refer to the same buffer.
#[derive(Debug, Clone, Default)]
pub struct DetachFlag(Arc<AtomicBool>);

impl DetachFlag {
    /// Detaches the buffer. Returns whether it was in circulation until now.
    pub fn detach(&self) -> bool {
        !self.0.swap(true, Ordering::Relaxed)
    }

    pub(crate) fn is_detached(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_released_buffer_is_lent_again_unless_it_is_detached() {
        let pool = BufferPool::of_largest();
        let mut first = pool.lend(8192).unwrap();
        first.as_mut()[8191] = 7;
        let place = first.as_ref().as_ptr();
        drop(first);
        assert_eq!(pool.bytes(), 8192);
        let second = pool.lend(4096).unwrap();
        assert_eq!((second.as_ref().as_ptr(), pool.bytes()), (place, 0));
        assert!(second.detach_flag().detach());
        drop(second);
        assert_eq!(pool.bytes(), 0);
    }

    #[test]
    fn the_larger_of_two_buffers_is_kept() {
        let pool = BufferPool::of_largest();
        let (small, large) = (pool.lend(100).unwrap(), pool.lend(5000).unwrap());
        drop(large);
        drop(small);
        assert_eq!(pool.bytes(), 5000);
        assert_eq!(pool.lend(6000).unwrap().as_ref().len(), 6000);
        assert_eq!(pool.bytes(), 6000);
        pool.clear();
        assert_eq!(pool.bytes(), 0);
    }

    #[cfg(target_os = "linux")]
    fn filled(bytes: usize, used: usize, with: u8) -> Memory {
        let mut memory = allocate(bytes).unwrap();
        memory.as_mut()[..bytes].fill(with);
        memory.set_used(used);
        memory
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn huge_pages_are_reused_in_buffers_of_another_size() {
        let pool = BufferPool::of_huge_pages();
        pool.put(filled(HUGE_PAGE + 5000, HUGE_PAGE + 5000, 1));
        pool.put(filled(2 * HUGE_PAGE, 2 * HUGE_PAGE, 2));
        assert_eq!(pool.bytes(), 3 * HUGE_PAGE);
        let bytes = 4 * HUGE_PAGE + 8192;
        let mut made = pool.take(bytes).unwrap();
        let made = made.as_mut();
        assert_eq!(pool.bytes(), 0);
        for (page, was) in [2, 2, 1, 0].into_iter().enumerate() {
            assert!(
                made[page * HUGE_PAGE..][..HUGE_PAGE].iter().all(|byte| *byte == was),
                "huge page {page}"
            );
        }
        assert!(made[4 * HUGE_PAGE..bytes].iter().all(|byte| *byte == 0));
        made[..bytes].fill(7);
        assert!(made[..bytes].iter().all(|byte| *byte == 7));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn clearing_the_pool_unmaps_no_page_that_was_moved() {
        let pool = BufferPool::of_huge_pages();
        pool.put(filled(3 * HUGE_PAGE, 3 * HUGE_PAGE, 1));
        let made = pool.take(HUGE_PAGE).unwrap();
        let other = filled(3 * HUGE_PAGE, 3 * HUGE_PAGE, 2);
        pool.clear();
        assert_eq!(pool.bytes(), 0);
        assert!(made.as_ref().iter().all(|byte| *byte == 1) && other.as_ref().iter().all(|byte| *byte == 2));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_buffer_without_huge_pages_is_unmapped_at_once() {
        let pool = BufferPool::of_huge_pages();
        pool.put(filled(HUGE_PAGE - 4096, HUGE_PAGE - 4096, 1));
        pool.put(filled(2 * HUGE_PAGE, 5000, 1));
        assert_eq!(pool.bytes(), 0);
    }
}
