//! A chat template and a conversation.
#![no_main]

#[path = "../checks/chat_template.rs"]
mod check;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    check::check(input);
});
