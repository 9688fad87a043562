//! A grammar of llama.cpp.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    firebox_testing::checks::gbnf::check(input, firebox_grammar::gbnf_to_lark);
});
