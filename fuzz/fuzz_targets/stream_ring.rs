//! The buffers of a stream under any order of events.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    firebox_store::check_stream_events(input);
});
