//! A conversation may go on for ever: it takes no more memory after ten thousand turns than after a few hundred. In a
//! process of its own, so that nothing else is measured.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::path::Path;

use firebox::{AfterEviction, Model, Role, WholeTurns, anonymous_bytes, device, mapped_file_bytes};

/// Turns before memory is measured: until then threads and the allocator take what they keep.
const WARM_UP: usize = 3_000;
const TURNS: usize = 10_000;
/// A conversation that keeps something of its turns grows every time. A thread that the system is late to start, or code that
/// is read from disk again, adds to one of them: a hundred pages of 4 KiB once were more than the hundredth that is allowed.
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
    // Looking brings code into memory that looks.
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
