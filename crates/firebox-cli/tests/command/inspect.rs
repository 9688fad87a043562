//! Tests of `firebox inspect`.

use crate::args;
use crate::support::*;

#[test]
fn every_form_shows_the_same_network() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = folder.path().join("bundle");
    firebox_with(args!["import", fixture("gguf/gemma3_text/hf"), bundle, "--quantize", "q4"]).ends_with(0);
    let mut seen = Vec::new();
    for (model, source) in [
        (fixture("gguf/gemma3_text/hf"), "huggingface"),
        (gguf("gemma3_text"), "gguf"),
        (bundle.clone(), "bundle"),
    ] {
        let json = firebox_with(args!["inspect", model, "--json", "--tensors"]).ends_with(0).json();
        assert_eq!(json["source"], source);
        assert_eq!(json["family"], "gemma3_text");
        assert_eq!(json["quantization"].is_string(), source == "bundle");
        assert_eq!(json["tokenizer"].is_object(), source == "gguf");
        assert_eq!(json["hash"].is_string(), source == "bundle");
        seen.push((
            json["parameters"].clone(),
            json["tensors"].as_array().unwrap().len(),
            json["shape"]["layer_runs"].clone(),
        ));
    }
    assert_eq!(seen[0], seen[1]);
    assert_eq!(seen[0], seen[2]);

    let text = firebox_with(args!["inspect", bundle, "--tensors"]).ends_with(0).stdout;
    for word in
        ["gemma3_text", "q4 in groups of 32", "layer-0003", "window", "q_proj.weight", "chat template  none"]
    {
        assert!(text.contains(word), "no {word:?} in\n{text}");
    }
}

#[test]
fn an_encoder_and_an_unknown_family_are_shown_too() {
    let text = firebox_with(args!["inspect", fixture("reference/bert")]).ends_with(0).stdout;
    assert!(text.contains("sentence encoder"), "{text}");
    let copy = copy_of("reference/llama");
    let config = copy.path().join("config.json");
    let changed = std::fs::read_to_string(&config).unwrap().replace("\"llama\"", "\"mamba9\"");
    std::fs::write(&config, changed).unwrap();
    let json = firebox_with(args!["inspect", copy.path(), "--json"]).ends_with(0).json();
    assert_eq!(json["family"], "mamba9");
    assert!(json["unsupported"].as_str().unwrap().contains("mamba9"));
}

#[test]
fn colours_are_for_terminals() {
    let model = fixture("reference/llama");
    assert!(!firebox_with(args!["inspect", model]).ends_with(0).stdout.contains('\x1b'));
    assert!(firebox_with(args!["inspect", model, "--color", "always"]).ends_with(0).stdout.contains('\x1b'));
}

/// The placement is the one that `firebox plan` prints.
#[test]
fn a_placement_is_explained_where_memory_is_given() {
    let model = fixture("reference/llama");
    let json = firebox_with(args!["inspect", model, "--memory", "2G", "--json"]).ends_with(0).json();
    let planned = firebox_with(args!["plan", model, "--memory", "2G", "--json"]).ends_with(0).json();
    let placement = &json["placement"];
    for same in ["kept_layers", "keep_unembedding", "buffers", "memory_bytes", "mode", "context", "kv_tokens"]
    {
        assert!(!planned[same].is_null(), "no {same}");
        assert_eq!(placement[same], planned[same], "{same}");
    }
    assert!(!placement["explanation"]["compared"].is_null(), "{placement}");
    let text = firebox_with(args!["inspect", model, "--memory", "2G"]).ends_with(0).stdout;
    for word in ["Placement", "measured on this machine", "all layers and the unembedding", "tok/s"] {
        assert!(text.contains(word), "no {word:?} in\n{text}");
    }
    let without = firebox_with(args!["inspect", model, "--json"]).ends_with(0).json();
    assert!(without["placement"].is_null());
    firebox_with(args!["inspect", model, "--memory", "1M"]).fails(UNUSABLE, &["too little"]);
}

#[test]
fn matrices_are_said_to_be_multiplied_unpacked_or_imported() {
    let model = gguf("llama");
    let json = firebox_with(args!["inspect", model, "--json"]).ends_with(0).json();
    for kind in json["matrices"].as_array().unwrap() {
        assert_eq!(kind["use"], "multiplied where they lie", "{kind}");
        assert_eq!(kind["bytes"], kind["loaded_bytes"]);
    }
    let packed =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../firebox-store/tests/fixtures/packed/awq");
    let text = firebox_with(args!["inspect", packed]).ends_with(0).stdout;
    for word in ["AWQ of 4 bits in groups of 64", "to be unpacked by `firebox import` first"] {
        assert!(text.contains(word), "no {word:?} in\n{text}");
    }
    let json = firebox_with(args!["inspect", packed, "--json"]).ends_with(0).json();
    assert!(json["matrices"][0]["loaded_bytes"].is_null());
}
