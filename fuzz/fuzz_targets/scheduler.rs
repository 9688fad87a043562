//! Requests, models and heat in any order: no task starves, none is held up by a less urgent one, and all of them end.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    firebox_schedule::check_events(input);
});
