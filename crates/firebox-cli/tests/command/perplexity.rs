//! Tests of `firebox perplexity`.

use std::path::Path;

use crate::args;
use crate::support::*;

fn measure(model: &Path, against: &Path) -> serde_json::Value {
    let text = fixture("reference/llama").join("expected.safetensors");
    firebox_with(args!["perplexity", model, text, "--against", against, "--json"]).ends_with(0).json()
}

/// Quantization costs as much as rounding the same weights in NumPy, as computed by tests/fixtures/quantization.py.
#[test]
fn quantizing_costs_what_its_rounding_costs() {
    let folder = tempfile::tempdir().unwrap();
    let costs = std::fs::read(fixture("quantization.json")).unwrap();
    let costs: serde_json::Value = serde_json::from_slice(&costs).unwrap();
    for family in ["llama", "qwen3"] {
        let source = fixture(&format!("reference/{family}"));
        let prompt = source.join("expected.safetensors");
        let ids = folder.path().join(format!("{family}.json"));
        std::fs::write(&ids, costs[family]["ids"].to_string()).unwrap();
        let measured = |bits: &str, group: &str| {
            let bundle = folder.path().join(format!("{family}-{bits}-{group}"));
            let args = args!["import", source, bundle, "--quantize", bits, "--group", group, "--json"];
            assert!(firebox_with(args).ends_with(0).json()["quantized"].as_u64().unwrap() > 0);
            firebox_with(args!["verify", bundle]).ends_with(0);
            let mut found = Vec::new();
            for (text, name) in [(&prompt, "prompt"), (&ids, "ids")] {
                let args = args!["perplexity", bundle, text, "--ids", "--against", source, "--json"];
                let kl = firebox_with(args).ends_with(0).json()["divergence"]["mean_kl"].as_f64().unwrap();
                let expected = costs[family][format!("{bits}_{group}")][name].as_f64().unwrap();
                assert!(
                    (kl / expected - 1.0).abs() < 0.05,
                    "{family} {bits} {group} {name}: {kl:e}, NumPy {expected:e}"
                );
                found.push(kl);
            }
            found
        };
        let (q8, q4, q4_coarse) = (measured("q8", "32"), measured("q4", "32"), measured("q4", "128"));
        for text in 0..2 {
            assert!(q8[text] * 50.0 < q4[text] && q4[text] < q4_coarse[text], "{q8:?} {q4:?} {q4_coarse:?}");
        }
    }
}

#[test]
fn a_model_does_not_differ_from_itself() {
    let model = fixture("reference/llama");
    let json = measure(&model, &model);
    assert_eq!(json["divergence"]["mean_kl"], 0.0);
    assert_eq!(json["divergence"]["same_top"], 1.0);
    assert_eq!(json["divergence"]["other_perplexity"], json["perplexity"]);
    let text = model.join("expected.safetensors");
    let readable = firebox_with(args!["perplexity", model, text, "--against", model]).ends_with(0).stdout;
    assert!(readable.contains("perplexity") && readable.contains("same top    100.00 %"), "{readable}");
}

#[test]
fn a_text_comes_as_words_or_as_ids_from_a_file_or_a_pipe() {
    let model = gguf("llama");
    let folder = tempfile::tempdir().unwrap();
    let text = "Hello there, hello again.";
    let file = folder.path().join("text.txt");
    std::fs::write(&file, text).unwrap();
    let of_text = firebox_with(args!["perplexity", model, file, "--json"]).ends_with(0).json();
    let piped = firebox_fed(args!["perplexity", model, "-", "--json"], text).ends_with(0).json();
    assert_eq!(of_text["perplexity"], piped["perplexity"]);
    let ids = firebox_with(args!["tokenize", model, text, "--ids"]).ends_with(0).stdout;
    let of_ids = firebox_fed(args!["perplexity", model, "-", "--ids", "--json"], &ids).ends_with(0).json();
    assert_eq!(of_text["perplexity"], of_ids["perplexity"]);
    let spread = ids.replace([',', '[', ']'], " ");
    let of_ids = firebox_fed(args!["perplexity", model, "-", "--ids", "-c", "8", "--json"], &spread)
        .ends_with(0)
        .json();
    assert_eq!(of_ids["context"], 8);
    assert_ne!(of_text["perplexity"], of_ids["perplexity"]);
}

#[test]
fn what_cannot_be_measured_says_why() {
    let model = fixture("reference/llama");
    firebox_with(args!["perplexity", model, "nowhere.txt"]).fails(UNUSABLE, &["nowhere.txt"]);
    firebox_fed(args!["perplexity", model, "-", "--ids"], "7").fails(USAGE, &["two tokens"]);
    firebox_fed(args!["perplexity", model, "-", "--ids"], "7 eight").fails(USAGE, &["eight"]);
    firebox_fed(args!["perplexity", model, "-"], "words").fails(UNUSABLE, &["tokenizer"]);
    firebox_fed(args!["perplexity", fixture("reference/bert"), "-", "--ids"], "1 2")
        .fails(UNUSABLE, &["encoder"]);
}
