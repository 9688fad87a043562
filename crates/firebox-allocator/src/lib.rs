//! The allocator of Firebox's programs, which keeps freed memory for the next operation. The system allocator returns large
//! blocks to the kernel at once, which then clears every page of a prompt's intermediate results again and again.
//!
//! ```
//! #[global_allocator]
//! static ALLOCATOR: firebox_allocator::Allocator = firebox_allocator::Allocator;
//!
//! fn main() {
//!     let pages = vec![0u8; 1 << 20];
//!     drop(pages);
//!     firebox_allocator::release_to_os();
//! }
//! ```

use std::alloc::{GlobalAlloc, Layout};

use libmimalloc_sys::{
    mi_collect, mi_free, mi_malloc, mi_malloc_aligned, mi_realloc, mi_realloc_aligned, mi_zalloc,
    mi_zalloc_aligned,
};

/// Alignment of all blocks that are at least as large.
const NATURAL_ALIGNMENT: usize = 16;

/// mimalloc, called with an alignment only if its blocks would not have it anyway.
///
/// The crate `mimalloc` always passes an alignment, for which mimalloc reserves space from 8 to 512 KiB: powers of two, as
/// pages of keys and values and many results are, then take a quarter more.
#[derive(Debug, Clone, Copy, Default)]
pub struct Allocator;

/// Whether mimalloc aligns a block of `size` bytes to `align` by default.
#[inline]
fn is_naturally_aligned(size: usize, align: usize) -> bool {
    align <= NATURAL_ALIGNMENT && align <= size
}

// SAFETY: mimalloc guarantees that blocks are as large as requested and belong to the caller until they are freed. It aligns
// blocks of 16 bytes and more to 16, and smaller ones to the largest power of two that fits them, which is all that is relied
// on where no alignment is passed. Its blocks may be freed and reallocated from any thread.
unsafe impl GlobalAlloc for Allocator {
    // SAFETY: the caller fulfils the trait's contract; there is no further one.
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let (size, align) = (layout.size(), layout.align());
        // SAFETY: mimalloc accepts any size, and any alignment of a layout.
        let block = unsafe {
            if is_naturally_aligned(size, align) { mi_malloc(size) } else { mi_malloc_aligned(size, align) }
        };
        block.cast()
    }

    // SAFETY: the caller fulfils the trait's contract; there is no further one.
    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let (size, align) = (layout.size(), layout.align());
        // SAFETY: mimalloc accepts any size, and any alignment of a layout.
        let block = unsafe {
            if is_naturally_aligned(size, align) { mi_zalloc(size) } else { mi_zalloc_aligned(size, align) }
        };
        block.cast()
    }

    // SAFETY: the trait requires a block of this allocator and its layout.
    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let align = layout.align();
        // SAFETY: the block is from this allocator and is not used again if another one is returned.
        let block = unsafe {
            if is_naturally_aligned(size, align) {
                mi_realloc(block.cast(), size)
            } else {
                mi_realloc_aligned(block.cast(), size, align)
            }
        };
        block.cast()
    }

    // SAFETY: the trait requires a block of this allocator.
    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, _: Layout) {
        // SAFETY: the block is from this allocator and is not used again.
        unsafe { mi_free(block.cast()) }
    }
}

/// Returns freed memory to the operating system: that of the calling thread and that which all threads share.
pub fn release_to_os() {
    // SAFETY: `mi_collect` may be called from any thread and leaves memory in use alone.
    unsafe { mi_collect(true) }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use libmimalloc_sys::mi_usable_size;
    use proptest::prelude::*;

    use super::*;

    /// Returns the bytes that a block of this layout takes.
    fn taken(layout: Layout) -> usize {
        // SAFETY: the block has this layout and is not used after it is freed.
        unsafe {
            let block = Allocator.alloc(layout);
            let taken = mi_usable_size(block.cast());
            Allocator.dealloc(block, layout);
            taken
        }
    }

    #[test]
    fn powers_of_two_have_no_overhead() {
        for align in [1, 2, 4, 8, 16] {
            for size in (4..24).map(|power| 1 << power) {
                let layout = Layout::from_size_align(size, align).unwrap();
                assert_eq!(taken(layout), size, "aligned to {align}");
            }
        }
    }

    proptest! {
        #[test]
        fn blocks_are_aligned_zeroed_and_preserved(
            size in prop_oneof![1usize..200, 1usize..1 << 20],
            grown in prop_oneof![1usize..200, 1usize..1 << 20],
            align in (0u32..14).prop_map(|power| 1usize << power),
            zeroed: bool,
        ) {
            let layout = Layout::from_size_align(size, align).unwrap();
            // SAFETY: accesses stay within the requested sizes, and the block is freed once, with its layout.
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

    /// Returns the anonymous resident memory of this process in bytes.
    #[cfg(target_os = "linux")]
    fn resident() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn freed_memory_is_kept_until_it_is_released() {
        const MUCH: usize = 128 << 20;
        let layout = Layout::from_size_align(MUCH, 1).unwrap();
        let before = resident();
        // SAFETY: the block has this layout and is not used after it is freed.
        unsafe {
            let block = Allocator.alloc(layout);
            block.write_bytes(1, MUCH);
            Allocator.dealloc(block, layout);
        }
        assert!(resident() > before + MUCH / 2);
        release_to_os();
        assert!(resident() < before + MUCH / 2);
    }
}
