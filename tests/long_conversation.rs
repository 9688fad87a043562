//! A conversation may go on for ever: it takes no more memory after ten thousand turns than after a few hundred. In a
//! process of its own, so that nothing else is measured.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::path::Path;

use firebox::{Afterwards, Model, Role, WholeTurns, anonymous_bytes, device, mapped_file_bytes};

/// Turns before memory is measured: until then threads and the allocator take what they keep.
const WARM_UP: usize = 3_000;
const TURNS: usize = 10_000;

fn resident_bytes() -> u64 {
    anonymous_bytes().unwrap() + mapped_file_bytes().unwrap()
}

#[test]
fn memory_stays_flat_over_ten_thousand_turns() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference/llama");
    let policy = WholeTurns { afterwards: Afterwards::Stay };
    let mut session = Model::open(fixture, &device("cpu").unwrap())
        .unwrap()
        .session()
        .unwrap()
        .with_turn_capacity(256, policy);
    let pool = session.cache().pool().clone();
    // Looking brings code into memory that looks.
    resident_bytes();
    let mut warm = None;
    for turn in 0..WARM_UP + TURNS {
        if turn == WARM_UP {
            warm = Some((resident_bytes(), pool.pages()));
        }
        session.begin_turn(&[Role::User, Role::Assistant]).unwrap();
        let said: Vec<u32> = (0..3 + turn as u32 % 17).map(|at| (at * 31 + turn as u32) % 300).collect();
        session.feed(&said).unwrap();
        session.feed(&[5]).unwrap();
        assert!(session.tokens().len() <= 256);
    }
    let (bytes, pages) = warm.unwrap();
    let after = resident_bytes();
    println!("{bytes} bytes after {WARM_UP} turns, {after} after {TURNS} more");
    assert_eq!(pool.pages(), pages, "pages are used again");
    assert!(after as f64 <= bytes as f64 * 1.01, "{bytes} bytes have become {after}");
}
