//! GGUF models that are no single file: split ones, vocabularies, and projectors beside a model.
#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

mod support;

use std::fs;
use std::path::Path;

use firebox_store::{Checkpoint, TokenizerSource};
use support::{Gguf, write};
use tempfile::tempdir;

const LAYER: [(&str, [u64; 2]); 2] = [("attn_q", [64, 64]), ("ffn_down", [64, 96])];

fn with_layer(mut gguf: Gguf, layer: usize) -> Gguf {
    for (name, shape) in LAYER {
        gguf = gguf.f32(&format!("blk.{layer}.{name}.weight"), &shape);
    }
    gguf
}

fn split(gguf: Gguf, no: u16, count: u16) -> Gguf {
    // The types that llama.cpp writes.
    gguf.raw_key("split.no", 2, &no.to_le_bytes()).raw_key("split.count", 2, &count.to_le_bytes()).raw_key(
        "split.tensors.count",
        5,
        &6i32.to_le_bytes(),
    )
}

fn part(no: u16) -> Gguf {
    let model = if no == 0 { Gguf::model("llama") } else { with_layer(Gguf::new(), usize::from(no) - 1) };
    split(model, no, 3)
}

fn name(no: u16) -> String {
    format!("m-{:05}-of-00003.gguf", no + 1)
}

fn refuse(path: &Path, words: &[&str]) {
    let error = Checkpoint::open(path).unwrap_err().to_string();
    for word in words {
        assert!(error.contains(word), "{error:?} does not mention {word:?}");
    }
}

#[test]
fn any_part_of_a_split_model_opens_all() {
    let whole = with_layer(with_layer(Gguf::model("llama"), 0), 1);
    let whole = support::open(&whole);
    let folder = tempdir().unwrap();
    let parts = [0, 1, 2].map(|no| write(folder.path(), &name(no), &part(no).build()));
    for path in parts.iter().map(|path| path.as_path()).chain([folder.path()]) {
        let found = Checkpoint::open(path).unwrap();
        assert_eq!(found.config(), whole.config());
        assert_eq!(found.path(), parts[0]);
        assert_eq!(found.tensors().collect::<Vec<_>>(), whole.tensors().collect::<Vec<_>>());
        for info in whole.tensors() {
            let (found, expected) = (found.weight(&info.name).unwrap(), whole.weight(&info.name).unwrap());
            assert_eq!(found.data, expected.data, "{}", info.name);
            assert!(found.mapped);
        }
    }
}

#[test]
fn missing_and_foreign_parts_are_named() {
    let folder = tempdir().unwrap();
    let paths = [0, 1].map(|no| write(folder.path(), &name(no), &part(no).build()));
    refuse(&paths[1], &[&name(2), "part 3 of 3", "missing", "download"]);
    let last = write(folder.path(), &name(2), &part(1).build());
    refuse(&paths[0], &[&name(2), "split.no", "part 2 of 3"]);
    fs::write(&last, split(Gguf::new().f32("blk.1.attn_q.weight", &[64, 64]), 2, 3).build()).unwrap();
    refuse(&paths[0], &["split.tensors.count", "6 tensors", "have 5"]);
    fs::write(&last, with_layer(split(Gguf::new(), 2, 3), 0).build()).unwrap();
    refuse(&paths[0], &["stored twice"]);
    refuse(
        &write(folder.path(), "renamed.gguf", &part(0).build()),
        &["split.count", "model-00001-of-00003.gguf"],
    );
}

#[test]
fn a_vocabulary_is_opened_for_its_text_alone() {
    let folder = tempdir().unwrap();
    let vocabulary = Gguf::new()
        .text("general.architecture", "command-r")
        .text("tokenizer.ggml.model", "gpt2")
        .texts("tokenizer.ggml.tokens", &["a", "b", "<end>"])
        .texts("tokenizer.ggml.merges", &["a b"])
        .list("tokenizer.ggml.token_type", 5, 3, &[1, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0])
        .int("tokenizer.ggml.eos_token_id", 2);
    let path = write(folder.path(), "vocab.gguf", &vocabulary.build());
    refuse(&path, &["vocab.gguf", "firebox tokenize", "model's own file"]);
    let text = Checkpoint::open_text(&path).unwrap();
    assert!(matches!(text.text().tokenizer, Some(TokenizerSource::Gguf(_))));
    assert_eq!((text.config()["eos_token_id"].as_u64(), text.tensors().count()), (Some(2), 0));
    let whole = write(folder.path(), "whole.gguf", &Gguf::model("llama").build());
    assert_eq!(Checkpoint::open_text(&whole).unwrap().tensors().count(), 2);
}

#[test]
fn projectors_are_told_from_models() {
    let folder = tempdir().unwrap();
    let by_type = Gguf::new().text("general.type", "mmproj").text("general.architecture", "clip");
    let projector =
        write(folder.path(), "mmproj-m.gguf", &by_type.f32("v.blk.0.attn_q.weight", &[4, 4]).build());
    refuse(&projector, &["mmproj-m.gguf", "mmproj", "not beside it"]);
    refuse(folder.path(), &["mmproj-m.gguf", "model's own GGUF"]);
    let model = write(folder.path(), "m.gguf", &with_layer(Gguf::model("llama"), 0).build());
    refuse(&projector, &["open ", &model.display().to_string()]);
    assert_eq!(Checkpoint::open(folder.path()).unwrap().path(), model);
    let by_architecture = Gguf::new().text("general.architecture", "clip").f32("v.class_embd", &[4]);
    refuse(&write(folder.path(), "clip.gguf", &by_architecture.build()), &["mmproj", "m.gguf"]);
    write(folder.path(), "n.gguf", &Gguf::model("llama").build());
    refuse(folder.path(), &["2 models", "m.gguf, n.gguf"]);
}
