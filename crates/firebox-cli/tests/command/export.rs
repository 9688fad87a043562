//! Tests of `firebox export`.

use std::fs;

use crate::args;
use crate::support::*;

#[test]
fn both_formats_compute_what_the_model_does() {
    let folder = tempfile::tempdir().unwrap();
    let source = fixture("reference/qwen3");
    let expected = source.join("expected.safetensors");
    let (directory, file) = (folder.path().join("hf"), folder.path().join("model.gguf"));
    let ran = firebox_with(args!["export", source, "--safetensors", directory, "--json"]).ends_with(0);
    assert_eq!((&ran.json()["unpacked"], &*ran.stderr), (&serde_json::json!(0), ""));
    let ran = firebox_with(args!["export", directory, "--gguf", file]).ends_with(0);
    assert!(ran.stdout.contains("model.gguf") && ran.stderr.contains("no tokenizer"), "{ran:?}");
    for model in [directory, file] {
        firebox_with(args!["verify", model, "--against", expected]).ends_with(0);
    }
}

#[test]
fn a_quantized_bundle_says_the_same_as_gguf() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    firebox_with(args!["import", fixture("reference/qwen3"), path("bundle"), "--quantize", "q8"])
        .ends_with(0);
    firebox_with(args!["export", path("bundle"), "--gguf", path("again.gguf")]).ends_with(0);
    let answers = ["bundle", "again.gguf"].map(|name| {
        let run = args!["run", path(name), "--ids", "5,77,130,9", "-n", "12", "--temp", "0", "--json"];
        firebox_with(run).ends_with(0).json()["tokens"].clone()
    });
    assert!(answers[0].as_array().is_some_and(|ids| !ids.is_empty()), "{}", answers[0]);
    assert_eq!(answers[0], answers[1]);
}

#[test]
fn a_vocabulary_goes_from_format_to_format() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    firebox_with(args!["import", gguf("qwen3"), path("bundle")]).ends_with(0);
    firebox_with(args!["export", path("bundle"), "--safetensors", path("hf"), "--dtype", "f32"]).ends_with(0);
    firebox_with(args!["export", path("hf"), "--gguf", path("again.gguf")]).ends_with(0);
    let ids = |name: &str| firebox_with(args!["tokenize", path(name), "the other hat", "--ids"]).json();
    assert_eq!(ids("bundle"), ids("hf"));
    assert_eq!(ids("bundle"), ids("again.gguf"));
}

#[test]
fn what_cannot_be_exported_is_refused_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let source = fixture("reference/llama");
    firebox_with(args!["export", source]).ends_with(USAGE);
    firebox_with(args!["export", source, "--gguf", path("a"), "--safetensors", path("b")]).ends_with(USAGE);
    firebox_with(args!["export", source, "--gguf", path("a"), "--dtype", "f32"]).ends_with(USAGE);
    firebox_with(args!["export", path("nowhere"), "--gguf", path("a")]).fails(UNUSABLE, &["nowhere"]);
    firebox_with(args!["export", fixture("reference/bert"), "--gguf", path("a")])
        .fails(UNUSABLE, &["bert", "--safetensors"]);
    firebox_with(args!["export", fixture("reference/lfm2"), "--safetensors", path("b")])
        .fails(UNUSABLE, &["lfm2", "published directory"]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    fs::write(path("a"), "precious").unwrap();
    fs::create_dir(path("b")).unwrap();
    fs::write(path("b/c"), "precious").unwrap();
    firebox_with(args!["export", source, "--gguf", path("a")]).fails(UNUSABLE, &["already exists"]);
    firebox_with(args!["export", source, "--safetensors", path("b")]).fails(UNUSABLE, &["already exists"]);
    assert_eq!(fs::read_to_string(path("a")).unwrap(), "precious");
}
