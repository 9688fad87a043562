//! The buffers of a stream under any order of wishes.
#![no_main]

#[path = "../checks/stream_ring.rs"]
mod check;
#[allow(dead_code)] // Some of it is only used by a stream.
#[path = "../../crates/firebox-store/src/stream/ring.rs"]
mod ring;

mod error {
    pub use firebox_store::StoreError;
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    check::check(input);
});
