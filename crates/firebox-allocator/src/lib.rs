//! The allocator of Firebox's programs, which keeps the memory of one operation for the next. The system's gives large pieces
//! back at once, and every page of a prompt's intermediate results would be cleared by the kernel again and again.
//!
//! ```
//! #[global_allocator]
//! static ALLOCATOR: firebox_allocator::Allocator = firebox_allocator::Allocator;
//!
//! fn main() {
//!     let pages = vec![0u8; 1 << 20];
//!     drop(pages);
//!     firebox_allocator::give_back();
//! }
//! ```

use std::alloc::{GlobalAlloc, Layout};

use libmimalloc_sys::{
    mi_collect, mi_free, mi_malloc, mi_malloc_aligned, mi_realloc, mi_realloc_aligned, mi_zalloc,
    mi_zalloc_aligned,
};

/// What mimalloc aligns everything to that is not smaller.
const ALIGNED_ANYWAY: usize = 16;

/// mimalloc, asked for an alignment only where it would not have it anyway.
///
/// The crate `mimalloc` asks for one every time, and from 8 to 512 KiB room is made for it: powers of two, as pages of keys and
/// values and many results are, then take a quarter more.
#[derive(Debug, Clone, Copy, Default)]
pub struct Allocator;

/// Whether mimalloc aligns a block of so many bytes as is wanted without being asked.
#[inline]
fn is_aligned_anyway(size: usize, align: usize) -> bool {
    align <= ALIGNED_ANYWAY && align <= size
}

// SAFETY: blocks are as large as was asked for and are nobody else's until they are freed, all of which is mimalloc's word. It
// aligns blocks of 16 bytes and more to 16, and smaller ones to the powers of two that they are not smaller than, which is what
// is relied on where no alignment is asked for. Whatever it hands out may be freed and made larger by whoever it was asked by.
unsafe impl GlobalAlloc for Allocator {
    // SAFETY: nothing is asked of the caller beyond what the trait asks.
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let (size, align) = (layout.size(), layout.align());
        // SAFETY: any size may be asked for, and any alignment that a layout has.
        let block = unsafe {
            if is_aligned_anyway(size, align) { mi_malloc(size) } else { mi_malloc_aligned(size, align) }
        };
        block.cast()
    }

    // SAFETY: nothing is asked of the caller beyond what the trait asks.
    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let (size, align) = (layout.size(), layout.align());
        // SAFETY: any size may be asked for, and any alignment that a layout has.
        let block = unsafe {
            if is_aligned_anyway(size, align) { mi_zalloc(size) } else { mi_zalloc_aligned(size, align) }
        };
        block.cast()
    }

    // SAFETY: the caller hands over a block of this allocator, with the layout that it has, as the trait asks.
    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let align = layout.align();
        // SAFETY: the caller hands over a block of this allocator, which is not used any more if another one is returned.
        let block = unsafe {
            if is_aligned_anyway(size, align) {
                mi_realloc(block.cast(), size)
            } else {
                mi_realloc_aligned(block.cast(), size, align)
            }
        };
        block.cast()
    }

    // SAFETY: the caller hands over a block of this allocator, as the trait asks.
    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, _: Layout) {
        // SAFETY: the caller hands over a block of this allocator that nobody uses any more.
        unsafe { mi_free(block.cast()) }
    }
}

/// Gives memory back to the system that was freed and is kept for what comes next: what this thread has, and what all threads
/// share.
pub fn give_back() {
    // SAFETY: it takes no memory that is in use, from whichever thread it is called.
    unsafe { mi_collect(true) }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use libmimalloc_sys::mi_usable_size;
    use proptest::prelude::*;

    use super::*;

    /// Bytes that a block of so many takes.
    fn taken(layout: Layout) -> usize {
        // SAFETY: the block is of this layout, and freed when nobody uses it any more.
        unsafe {
            let block = Allocator.alloc(layout);
            let taken = mi_usable_size(block.cast());
            Allocator.dealloc(block, layout);
            taken
        }
    }

    #[test]
    fn powers_of_two_take_no_more_than_they_are() {
        for align in [1, 2, 4, 8, 16] {
            for size in (4..24).map(|power| 1 << power) {
                let layout = Layout::from_size_align(size, align).unwrap();
                assert_eq!(taken(layout), size, "aligned to {align}");
            }
        }
    }

    proptest! {
        #[test]
        fn blocks_are_aligned_whole_and_what_they_were(
            size in prop_oneof![1usize..200, 1usize..1 << 20],
            grown in prop_oneof![1usize..200, 1usize..1 << 20],
            align in (0u32..14).prop_map(|power| 1usize << power),
            zeroed: bool,
        ) {
            let layout = Layout::from_size_align(size, align).unwrap();
            // SAFETY: blocks are used as large as they were asked for, and freed once, with the layout that they have.
            unsafe {
                let block = if zeroed { Allocator.alloc_zeroed(layout) } else { Allocator.alloc(layout) };
                prop_assert!(!block.is_null() && block.addr() % align == 0);
                if zeroed {
                    prop_assert!(slice::from_raw_parts(block, size).iter().all(|&byte| byte == 0));
                }
                (0..size).for_each(|at| block.add(at).write(at as u8));
                let block = Allocator.realloc(block, layout, grown);
                prop_assert!(!block.is_null() && block.addr() % align == 0);
                let kept = slice::from_raw_parts(block, size.min(grown));
                prop_assert!((0..).zip(kept).all(|(at, &byte)| byte == at as u8));
                (0..grown).for_each(|at| block.add(at).write(1));
                Allocator.dealloc(block, Layout::from_size_align(grown, align).unwrap());
            }
        }
    }

    /// Bytes of this process that no file backs.
    #[cfg(target_os = "linux")]
    fn resident() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn what_was_freed_is_kept_until_it_is_given_back() {
        const MUCH: usize = 128 << 20;
        let layout = Layout::from_size_align(MUCH, 1).unwrap();
        let before = resident();
        // SAFETY: the block is of this layout, and freed when nobody uses it any more.
        unsafe {
            let block = Allocator.alloc(layout);
            block.write_bytes(1, MUCH);
            Allocator.dealloc(block, layout);
        }
        assert!(resident() > before + MUCH / 2);
        give_back();
        assert!(resident() < before + MUCH / 2);
    }
}
