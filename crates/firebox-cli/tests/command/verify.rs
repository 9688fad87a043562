//! Tests of `firebox verify`.

use std::fs;

use crate::args;
use crate::support::*;

const EXPECTED: &str = "expected.safetensors";

#[test]
fn the_right_numbers_pass_however_the_prompt_goes_through() {
    let model = fixture("reference/qwen3");
    let expected = model.join(EXPECTED);
    for prefill in ["whole", "chunked", "stepwise"] {
        let ran = firebox_with(args!["verify", model, "--against", expected, "--prefill", prefill, "--json"])
            .ends_with(0);
        let json = ran.json();
        assert_eq!(json["passed"], true);
        assert_eq!(json["prefill"], prefill);
        assert_eq!(json["device"], "cpu");
        assert_eq!(json["kind"], "logits");
        assert_eq!(json["tolerance"], 1e-4);
        assert_eq!(json["greedy_equal"], true);
        assert_eq!(json["greedy_ids"], json["expected_greedy_ids"]);
        assert!(json["max_fraction"].as_f64().unwrap() < 1e-4);
        for field in ["max_difference", "logit_range", "worst_position"] {
            assert!(json[field].is_number(), "{field}");
        }
    }
    let ran = firebox_with(args!["verify", model, "--against", expected, "--all-prefills"]).ends_with(0);
    assert_eq!(ran.stdout.matches("pass").count(), 3, "{}", ran.stdout);
    assert!(ran.stdout.contains("worst at position") && ran.stdout.contains("tokens equal"));
    let ran =
        firebox_with(args!["verify", model, "--against", expected, "--all-prefills", "--json"]).ends_with(0);
    assert_eq!(ran.json()["prefills"].as_array().unwrap().len(), 3);
}

#[test]
fn an_encoder_is_held_against_its_embedding() {
    let model = fixture("reference/bert");
    let expected = model.join(EXPECTED);
    let ran = firebox_with(args!["verify", model, "--against", expected, "--json"]).ends_with(0);
    assert_eq!(ran.json()["kind"], "embedding");
    assert_eq!(ran.json()["tolerance"], 1e-5);
    assert!(ran.json()["max_hidden_difference"].is_number());
    let ran = firebox_with(args!["verify", model, "--against", expected]).ends_with(0);
    assert!(ran.stdout.contains("embedding"), "{}", ran.stdout);
}

#[test]
fn wrong_numbers_fail_the_check() {
    let copy = copy_of("reference/llama");
    let expected = copy.path().join(EXPECTED);
    edit_tensors(&expected, |tensors| {
        let logits = tensors.iter_mut().find(|tensor| tensor.name == "logits").unwrap();
        let vocab = logits.shape[1];
        let at = 4 * (3 * vocab + 5);
        let logit = f32::from_le_bytes(logits.data[at..at + 4].try_into().unwrap()) + 0.5;
        logits.data[at..at + 4].copy_from_slice(&logit.to_le_bytes());
    });
    let ran =
        firebox_with(args!["verify", copy.path(), "--against", expected, "--json"]).ends_with(CHECK_FAILED);
    assert_eq!(ran.json()["passed"], false);
    assert_eq!(ran.json()["worst_position"], 3);
    assert_eq!(ran.json()["greedy_equal"], true);
    let ran = firebox_with(args!["verify", copy.path(), "--against", expected]).ends_with(CHECK_FAILED);
    assert!(ran.stdout.contains("FAIL") && ran.stdout.contains("position 3"), "{}", ran.stdout);
    firebox_with(args!["verify", copy.path(), "--against", expected, "--tolerance", "0.9"]).ends_with(0);
}

#[test]
fn another_greedy_token_fails_whatever_the_tolerance() {
    let copy = copy_of("reference/llama");
    let expected = copy.path().join(EXPECTED);
    edit_tensors(&expected, |tensors| {
        let greedy = tensors.iter_mut().find(|tensor| tensor.name == "greedy_ids").unwrap();
        greedy.data[8] ^= 1;
    });
    let ran = firebox_with(args!["verify", copy.path(), "--against", expected, "--tolerance", "1e9"])
        .ends_with(CHECK_FAILED);
    assert!(ran.stdout.contains("differs at token 2"), "{}", ran.stdout);
}

#[test]
fn tolerances_that_make_no_sense_are_refused() {
    let model = fixture("reference/llama");
    for tolerance in ["-1", "nan", "much"] {
        let tolerance = format!("--tolerance={tolerance}");
        firebox_with(args!["verify", model, "--against", model.join(EXPECTED), tolerance]).ends_with(USAGE);
    }
    firebox_with(args!["verify", model, "--prefill", "chunked"]).ends_with(USAGE);
    firebox_with(args!["verify", model, "--device", "abacus", "--against", model.join(EXPECTED)])
        .fails(USAGE, &["abacus", "cpu"]);
}

#[test]
fn devices_are_compared_with_the_cpu_on_request() {
    let model = fixture("reference/llama");
    // There is nothing to compare the CPU with.
    firebox_with(args!["verify", model, "--text", model.join("config.json")])
        .fails(USAGE, &["--against", "--device"]);
    firebox_with(args!["verify", model, "--tolerance", "0.1"]).fails(USAGE, &["--against", "--device"]);
    assert!(firebox_with(args!["verify", model, "--json"]).ends_with(0).json()["comparison"].is_null());
}

#[cfg(feature = "ndarray")]
#[test]
fn another_device_is_compared_with_the_cpu() {
    let model = fixture("reference/llama");
    let ran = firebox_with(args!["verify", model, "--device", "ndarray", "--json"]).ends_with(0);
    let compared = &ran.json()["comparison"];
    assert_eq!((compared["passed"].as_bool(), compared["positions"].as_u64()), (Some(true), Some(128)));
    assert!(compared["mean_kl_bits"].as_f64().unwrap() < 1e-6);
    let ran = firebox_with(args!["verify", model, "--device", "ndarray"]).ends_with(0);
    assert!(ran.stdout.contains("divergence") && ran.stdout.contains("greedy"), "{}", ran.stdout);
    firebox_with(args!["verify", model, "--device", "ndarray", "--text", "nowhere"])
        .fails(UNUSABLE, &["--text", "nowhere"]);
}

#[test]
fn a_sound_directory_passes_without_hashes() {
    for model in
        ["reference/gemma3_text", "variants/llama-sharded-bf16", "reference/bert", "gguf/phi3/model.gguf"]
    {
        let ran = firebox_with(args!["verify", fixture(model)]).ends_with(0);
        assert!(ran.stdout.contains("pass"), "{model}: {}", ran.stdout);
    }
}

#[test]
fn broken_models_are_refused_by_name() {
    let truncated = copy_of("reference/llama");
    let file = truncated.path().join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    refused(truncated.path(), &["model.safetensors"]);
    fs::write(&file, &bytes[..5]).unwrap();
    refused(truncated.path(), &["model.safetensors"]);

    let unknown = copy_of("reference/llama");
    let config = unknown.path().join("config.json");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("\"llama\"", "\"mamba9\"")).unwrap();
    refused(unknown.path(), &["mamba9", "llama"]);
    fs::write(&config, "{\"model_type\": ").unwrap();
    refused(unknown.path(), &["config.json"]);

    let lost = "model.layers.1.mlp.up_proj.weight";
    let missing = copy_of("reference/llama");
    edit_tensors(&missing.path().join("model.safetensors"), |tensors| {
        tensors.retain(|tensor| tensor.name != lost)
    });
    refused(missing.path(), &[lost]);

    let extra = copy_of("reference/llama");
    edit_tensors(&extra.path().join("model.safetensors"), |tensors| {
        tensors[0].name = format!("{}.twin", tensors[0].name);
        let (name, shape) = ("model.layers.0.self_attn.surprise".to_owned(), vec![1]);
        tensors.push(Tensor { name, shape, dtype: safetensors::Dtype::F32, data: vec![0; 4] });
    });
    refused(extra.path(), &[]);
    let extra = copy_of("reference/llama");
    edit_tensors(&extra.path().join("model.safetensors"), |tensors| {
        let (name, shape) = ("model.layers.0.self_attn.surprise".to_owned(), vec![1]);
        tensors.push(Tensor { name, shape, dtype: safetensors::Dtype::F32, data: vec![0; 4] });
    });
    refused(extra.path(), &["surprise"]);

    let sharded = copy_of("variants/llama-sharded-bf16");
    fs::remove_file(sharded.path().join("model-00002-of-00003.safetensors")).unwrap();
    refused(sharded.path(), &["model-00002-of-00003.safetensors"]);

    let empty = tempfile::tempdir().unwrap();
    refused(empty.path(), &[]);
    refused(&empty.path().join("nowhere"), &["nowhere"]);
    let torn = empty.path().join("torn.gguf");
    fs::write(&torn, &fs::read(gguf("llama")).unwrap()[..4000]).unwrap();
    refused(&torn, &["torn.gguf"]);
}

fn refused(model: &std::path::Path, words: &[&str]) {
    firebox_with(args!["verify", model]).fails(UNUSABLE, words);
    firebox_with(args!["run", model, "--ids", "1,2", "-n", "1"]).fails(UNUSABLE, words);
}

#[test]
fn broken_expectations_are_refused() {
    let model = fixture("reference/llama");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(EXPECTED);
    firebox_with(args!["verify", model, "--against", file]).fails(UNUSABLE, &[EXPECTED]);
    fs::write(&file, b"not safetensors").unwrap();
    firebox_with(args!["verify", model, "--against", file]).fails(UNUSABLE, &[EXPECTED]);
    let other = fixture("reference/bert").join(EXPECTED);
    firebox_with(args!["verify", model, "--against", other]).fails(UNUSABLE, &["last_hidden_state"]);
}
