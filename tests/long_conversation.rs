//! Tests that a conversation takes no more memory after ten thousand turns than after a few thousand. It has a process
//! of its own, whose allocator counts, so that nothing else is measured.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicIsize, Ordering};

use firebox::{AfterEviction, Model, Role, WholeTurns, device};

/// The system's allocator, which counts the bytes in use.
struct Counting;

static IN_USE: AtomicIsize = AtomicIsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count(bytes: usize) -> isize {
    isize::try_from(bytes).unwrap_or(isize::MAX)
}

// SAFETY: every call is passed on unchanged, and counting neither allocates nor panics.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        IN_USE.fetch_add(count(layout.size()), Ordering::Relaxed);
        // SAFETY: the caller fulfils the trait's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        IN_USE.fetch_add(count(layout.size()), Ordering::Relaxed);
        // SAFETY: the caller fulfils the trait's contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        IN_USE.fetch_add(count(size) - count(layout.size()), Ordering::Relaxed);
        // SAFETY: the caller fulfils the trait's contract.
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(count(layout.size()), Ordering::Relaxed);
        // SAFETY: the caller fulfils the trait's contract.
        unsafe { System.dealloc(block, layout) }
    }
}

/// Turns before memory is first counted, until everything that is cached is there.
const WARM_UP: usize = 3_000;
const TURNS: usize = 10_000;

/// Growth that is no leak: what threads of the pool keep of their last piece of work. A byte a turn would be more.
const SLACK: isize = TURNS as isize / 2;

#[test]
fn memory_stays_flat_over_ten_thousand_turns() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference/llama");
    let policy = WholeTurns { after: AfterEviction::KeepPositions };
    let mut session = Model::open(fixture, &device("cpu").unwrap())
        .unwrap()
        .session()
        .unwrap()
        .with_turn_capacity(256, policy);
    let pool = session.cache().pool().clone();
    let mut turns = 0_u32..;
    // The last turn is of the same kind every time, so that as many tokens are there.
    let mut converse = |count: usize| {
        for turn in turns.by_ref().take(count) {
            session.begin_turn(&[Role::User, Role::Assistant]).unwrap();
            let said: Vec<u32> = (0..3 + turn % 17).map(|at| (at * 31 + turn) % 300).collect();
            session.feed(&said).unwrap();
            session.feed(&[5]).unwrap();
            assert!(session.tokens().len() <= 256);
        }
        IN_USE.load(Ordering::Relaxed)
    };
    let before = converse(WARM_UP / 17 * 17);
    let pages = pool.pages();
    let after = converse(TURNS / 17 * 17);
    println!("{before} bytes have become {after} in {TURNS} turns");
    assert_eq!(pool.pages(), pages, "pages are used again");
    assert!(after - before <= SLACK, "{before} bytes have become {after} in {TURNS} turns");
}
