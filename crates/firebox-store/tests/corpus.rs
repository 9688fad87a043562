//! The fuzzing corpus, run through the same functions as a regression test.
#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

use std::fs;
use std::path::Path;

use firebox_store::gguf::Model;
use firebox_store::safetensors::Header;
use firebox_store::{HeadManifest, HeadTable, Manifest};

fn replay(target: &str, parse: impl Fn(&[u8]) -> bool) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let inputs = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let accepted = inputs.filter(|entry| parse(&fs::read(entry.as_ref().unwrap().path()).unwrap())).count();
    assert!(accepted > 0, "no input in {} is well formed", folder.display());
}

#[test]
fn gguf() {
    replay("gguf", |file| Model::parse(file).is_ok_and(|model| model.tensors().count() > 0));
}

#[test]
fn safetensors_header() {
    replay("safetensors_header", |file| Header::parse(file).is_ok_and(|header| !header.entries.is_empty()));
}

#[test]
fn manifest() {
    replay("manifest", |json| Manifest::parse(json).is_ok());
}

#[test]
fn head() {
    replay("head", |json| HeadManifest::parse(json).is_ok());
    replay("head", |json| HeadTable::parse(json).is_ok());
}
