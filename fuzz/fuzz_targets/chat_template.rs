//! A chat template and a conversation.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    firebox_testing::checks::chat_template::check(input);
});
