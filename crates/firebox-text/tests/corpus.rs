//! The fuzzing corpus, run through the same checks as a regression test.
#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

use std::fs;
use std::path::Path;

use firebox_testing::checks::{chat_template, tool_calls};

fn replay(target: &str, check: impl Fn(&[u8]) -> bool) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let inputs = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let met = inputs.filter(|entry| check(&fs::read(entry.as_ref().unwrap().path()).unwrap())).count();
    assert!(met > 0, "no input in {} is what it should be", folder.display());
}

#[test]
fn calls() {
    replay("calls", tool_calls::check);
}

#[test]
fn chat_template() {
    replay("chat_template", chat_template::check);
}
