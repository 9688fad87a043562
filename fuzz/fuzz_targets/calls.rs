//! An answer in any syntax of calls.
#![no_main]

#[path = "../checks/calls.rs"]
mod check;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    check::check(input);
});
