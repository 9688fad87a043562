//! An answer in any syntax of calls.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    firebox_testing::checks::tool_calls::check(input);
});
