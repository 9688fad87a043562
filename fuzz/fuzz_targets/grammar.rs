//! A grammar of llama.cpp.
#![no_main]

#[path = "../checks/grammar.rs"]
mod check;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    check::check(input, firebox_grammar::gbnf_to_lark);
});
