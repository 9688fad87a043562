//! Tests that a conversation takes no more memory after ten thousand turns than after a few thousand. It has a process
//! of its own, so that nothing else is measured.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::path::Path;

use firebox::internals::runtime::{anonymous_bytes, mapped_file_bytes};
use firebox::{AfterEviction, Model, Role, WholeTurns, device};

/// Turns before memory is first measured, until threads and the allocator have what they keep.
const WARM_UP: usize = 3_000;
const TURNS: usize = 10_000;
/// Number of measurements, all of which must show growth to fail. A leak grows every time; a thread that starts late,
/// or code that is paged in again, affects one. It once was a hundred pages of 4 KiB, more than the hundredth that is
/// allowed.
const ATTEMPTS: usize = 3;

fn resident_bytes() -> u64 {
    anonymous_bytes().unwrap() + mapped_file_bytes().unwrap()
}

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
    // Pages in the code that measures.
    resident_bytes();
    let mut turns = 0_u32..;
    let mut converse = |count: usize| {
        for turn in turns.by_ref().take(count) {
            session.begin_turn(&[Role::User, Role::Assistant]).unwrap();
            let said: Vec<u32> = (0..3 + turn % 17).map(|at| (at * 31 + turn) % 300).collect();
            session.feed(&said).unwrap();
            session.feed(&[5]).unwrap();
            assert!(session.tokens().len() <= 256);
        }
    };
    converse(WARM_UP);
    let pages = pool.pages();
    let flat = (0..ATTEMPTS).any(|_| {
        let before = resident_bytes();
        converse(TURNS);
        let after = resident_bytes();
        println!("{before} bytes have become {after} in {TURNS} turns");
        assert_eq!(pool.pages(), pages, "pages are used again");
        after as f64 <= before as f64 * 1.01
    });
    assert!(flat, "memory grew {ATTEMPTS} times in a row");
}
