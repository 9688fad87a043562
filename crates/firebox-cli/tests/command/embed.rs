//! Tests of `firebox embed`.

use serde_json::Value;

use crate::args;
use crate::support::*;

fn lines(ran: &Ran) -> Vec<Value> {
    ran.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn every_text_is_a_line() {
    let ran = firebox_with(args!["embed", gguf("llama"), "Hello", "Hello", "you"]).ends_with(0);
    let vectors = lines(&ran);
    assert_eq!(vectors.len(), 3);
    assert_eq!(vectors[2]["index"], 2);
    assert_eq!(vectors[0]["embedding"], vectors[1]["embedding"]);
    assert_ne!(vectors[0]["embedding"], vectors[2]["embedding"]);
    let piped =
        firebox_fed(args!["embed", gguf("llama"), "--pooling", "last", "--no-normalize"], "Hello\nyou\n");
    assert_eq!(lines(&piped.ends_with(0)).len(), 2);
}

#[test]
fn documents_are_put_in_order() {
    let ran = firebox_with(args!["embed", gguf("llama"), "--query", "Hello", "you", "Hello"]).ends_with(0);
    let ranked = lines(&ran);
    assert_eq!((&ranked[0]["index"], &ranked[0]["text"]), (&1.into(), &"Hello".into()));
    assert!(ranked[0]["score"].as_f64() >= ranked[1]["score"].as_f64());
}

#[test]
fn without_a_text_there_is_nothing_to_embed() {
    firebox_with(args!["embed", gguf("llama")]).fails(USAGE, &["no text"]);
    let too_many = args!["embed", gguf("llama"), "--dimensions", "33", "Hello"];
    firebox_with(too_many).fails(USAGE, &["--dimensions 33", "32"]);
    firebox_with(args!["embed", fixture("reference/bert"), "Hello"]).fails(UNUSABLE, &["tokenizer"]);
}
