//! Tests of `firebox tokenize`.

use crate::args;
use crate::support::*;

const TEXTS: [&str; 5] = ["Hello", "two words", "", "a \"quoted\" line", "tabs\tand\nbreaks"];

#[test]
fn lines_go_in_and_come_out_again() {
    let model = gguf("llama");
    let lines: String = TEXTS.map(|text| serde_json::to_string(text).unwrap() + "\n").concat();
    let ids = firebox_fed(args!["tokenize", model, "--ids", "--no-special"], &lines).ends_with(0).stdout;
    assert_eq!(ids.lines().count(), TEXTS.len());
    let parsed: Vec<Vec<u32>> = ids.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(parsed[2].is_empty() && !parsed[0].is_empty());
    assert_eq!(firebox_fed(args!["tokenize", model, "--no-special"], &lines).ends_with(0).stdout, ids);
    let back = firebox_fed(args!["tokenize", model, "--decode"], &ids).ends_with(0).stdout;
    // The fixture's vocabulary has no bytes for line breaks and tabs.
    assert_eq!(back.lines().take(4).collect::<Vec<_>>(), lines.lines().take(4).collect::<Vec<_>>());
}

#[test]
fn a_text_on_the_command_line_is_shown_piece_by_piece() {
    let model = gguf("llama");
    let table = firebox_with(args!["tokenize", model, "Hello you"]).ends_with(0).stdout;
    assert!(table.contains("id") && table.contains("Ġ"), "{table}");
    let ids = firebox_with(args!["tokenize", model, "Hello you", "--ids"]).ends_with(0).json();
    assert!(ids.as_array().unwrap().len() > 1);
}

#[test]
fn a_bad_line_is_named() {
    let model = gguf("llama");
    let ran = firebox_fed(args!["tokenize", model], "\"fine\"\nnot json\n");
    assert_eq!(ran.stdout.lines().count(), 1);
    ran.fails(UNUSABLE, &["line 2", "JSON string"]);
    firebox_fed(args!["tokenize", model, "--decode"], "[1, -1]\n").fails(UNUSABLE, &["line 1"]);
    firebox_fed(args!["tokenize", fixture("reference/llama")], "").fails(UNUSABLE, &["tokenizer.json"]);
}
