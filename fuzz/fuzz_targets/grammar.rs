//! A grammar of llama.cpp.
#![no_main]

#[path = "../checks/grammar.rs"]
mod check;
#[path = "../../crates/firebox-runtime/src/constraint/gbnf/mod.rs"]
mod gbnf;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    check::check(input, gbnf::to_lark);
});
