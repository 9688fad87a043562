//! Tests of `firebox import`.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::args;
use crate::support::*;

#[test]
fn a_bundle_computes_what_its_source_does() {
    let folder = tempfile::tempdir().unwrap();
    for model in ["reference/qwen3", "reference/bert", "variants/llama-sharded-bf16"] {
        let source = fixture(model);
        let bundle = folder.path().join(model.replace('/', "-"));
        let ran = firebox_with(args!["import", source, bundle, "--json"]).ends_with(0);
        let json = ran.json();
        assert_eq!(json["quantized"], 0);
        assert_eq!(json["hash"].as_str().unwrap().len(), 64);
        let ran = firebox_with(args!["verify", bundle, "--json"]).ends_with(0);
        assert_eq!(
            ran.json()["segments"].as_object().unwrap().len() as u64,
            json["segments"].as_u64().unwrap()
        );
        let expected = source.join("expected.safetensors");
        firebox_with(args!["verify", bundle, "--against", expected]).ends_with(0);
    }
}

#[test]
fn what_stands_in_a_folder_beside_the_weights_comes_along_and_what_does_not_is_told() {
    let source = copy_of("reference/bert");
    let folder = tempfile::tempdir().unwrap();
    let bundle = folder.path().join("bundle");
    let pooling = "{\"pooling_mode_cls_token\": true}";
    fs::create_dir(source.path().join("1_Pooling")).unwrap();
    fs::write(source.path().join("1_Pooling/config.json"), pooling).unwrap();
    let ran = firebox_with(args!["import", source.path(), bundle, "--json"]).ends_with(0);
    assert_eq!(fs::read_to_string(bundle.join("1_Pooling/config.json")).unwrap(), pooling);
    assert_eq!((&ran.json()["heads_left"], &*ran.stderr), (&serde_json::json!([]), ""));

    let pocket = fixture("../../assets/pocket");
    let copy = folder.path().join("pocket");
    let ran = firebox_with(args!["import", pocket, copy, "--json"]).ends_with(0);
    let left = ran.json()["heads_left"].clone();
    assert_eq!(left, serde_json::json!(["chat", "code", "router", "summarize", "universal"]));
    assert!(ran.stderr.contains("router") && ran.stderr.contains("firebox head add"), "{}", ran.stderr);
}

#[test]
fn a_changed_byte_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = folder.path().join("bundle");
    firebox_with(args!["import", fixture("reference/llama"), bundle]).ends_with(0);
    let segment = bundle.join("segments/layer-0001.safetensors");
    let mut bytes = fs::read(&segment).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&segment, bytes).unwrap();
    firebox_with(args!["verify", bundle]).fails(CHECK_FAILED, &["layer-0001", "hash"]);
    let ran = firebox_with(args!["verify", bundle, "--json"]).ends_with(CHECK_FAILED);
    assert_eq!(ran.json()["passed"], false);
}

#[test]
fn what_makes_no_sense_is_refused_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let source = fixture("reference/llama");
    let bundle = folder.path().join("bundle");
    for group in ["0", "7", "8192"] {
        firebox_with(args!["import", source, bundle, "--quantize", "q8", "--group", group])
            .fails(USAGE, &["group"]);
    }
    firebox_with(args!["import", source, bundle, "--quantize", "q3"]).ends_with(USAGE);
    firebox_with(args!["import", source, bundle, "--group", "32"]).ends_with(USAGE);
    firebox_with(args!["import", folder.path().join("nowhere"), bundle]).fails(UNUSABLE, &["nowhere"]);
    assert!(!bundle.exists());
    fs::create_dir(&bundle).unwrap();
    fs::write(bundle.join("precious"), "do not touch").unwrap();
    firebox_with(args!["import", source, bundle]).fails(UNUSABLE, &["bundle"]);
    assert_eq!(fs::read_to_string(bundle.join("precious")).unwrap(), "do not touch");
}

/// A model of many tensors, so that an import takes long enough to be killed in the middle of it.
fn large_model(folder: &Path) {
    let source = fixture("reference/llama");
    let config = fs::read_to_string(source.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    let layers = 120;
    config["num_hidden_layers"] = layers.into();
    fs::create_dir(folder).unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut tensors = read_tensors(&source.join("model.safetensors"));
    tensors.retain(|tensor| !tensor.name.contains("layers.") || tensor.name.contains("layers.0."));
    let block: Vec<usize> = (0..tensors.len()).filter(|&at| tensors[at].name.contains("layers.0.")).collect();
    assert!(!block.is_empty());
    for layer in 1..layers {
        for &at in &block {
            let Tensor { name, dtype, shape, data } = &tensors[at];
            let name = name.replace("layers.0.", &format!("layers.{layer}."));
            let copy = Tensor { name, dtype: *dtype, shape: shape.clone(), data: data.clone() };
            tensors.push(copy);
        }
    }
    write_tensors(&folder.join("model.safetensors"), &tensors);
}

#[test]
#[cfg(unix)]
fn a_killed_import_leaves_nothing_that_opens() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    large_model(&source);
    let began = std::time::Instant::now();
    firebox_with(args!["import", source, folder.path().join("whole")]).ends_with(0);
    let whole = began.elapsed();
    let (mut cut, mut complete) = (0, 0);
    for round in 0..12u32 {
        let bundle = folder.path().join(format!("bundle-{round}"));
        let mut child = firebox().args(args!["import", source, bundle]).spawn().unwrap();
        // Spread over the whole import; the odd thirteenth keeps the moments off its regular steps.
        std::thread::sleep(whole * (2 * round + 1) / 25 + Duration::from_micros(137) * round);
        child.kill().unwrap();
        child.wait().unwrap();
        if bundle.exists() {
            // It had been finished, or else it must not look so.
            complete += 1;
            firebox_with(args!["verify", bundle]).ends_with(0);
        } else {
            cut += 1;
            firebox_with(args!["verify", bundle]).ends_with(UNUSABLE);
        }
        for entry in fs::read_dir(folder.path()).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            if name != "source" && name != "whole" && !name.starts_with("bundle-") {
                let code = firebox_with(args!["verify", path]).code;
                assert_eq!(code, Some(UNUSABLE), "{name} opens");
            }
        }
        // Files that a killed import left behind do not prevent the next import.
        if round % 4 == 0 && !bundle.exists() {
            firebox_with(args!["import", source, bundle]).ends_with(0);
        }
    }
    assert!(cut >= 3, "{cut} cut, {complete} complete: the kills come too late");
}

/// The bytes of a bundle's weights, and how far its predictions of a text are from those of its source.
fn size_and_divergence(bundle: &Path, text: &Path, source: &Path) -> (u64, f64) {
    let segments = fs::read_dir(bundle.join("segments")).unwrap();
    let bytes = segments.map(|file| file.unwrap().metadata().unwrap().len()).sum();
    let ran = firebox_with(args!["perplexity", bundle, text, "--against", source, "--json"]).ends_with(0);
    (bytes, ran.json()["divergence"]["mean_kl"].as_f64().unwrap())
}

#[test]
fn what_is_learned_from_a_text_makes_four_bits_lose_less() {
    let folder = tempfile::tempdir().unwrap();
    let source = fixture("../../assets/pocket");
    let text = folder.path().join("text");
    let words =
        "I am the pocket model of Firebox. A model that fits a pocket runs on the machines people carry. ";
    fs::write(&text, words.repeat(8)).unwrap();
    let import = |name: &str, more: &[&str]| {
        let bundle = folder.path().join(name);
        let arguments = args!["import", source, bundle, "--json", "--quantize", "q4", "--group", "64"];
        let json = firebox_with(arguments.into_iter().chain(more.iter().map(Into::into))).ends_with(0).json();
        (json, size_and_divergence(&bundle, &text, &source))
    };
    let learned = ["--calibrate", text.to_str().unwrap()];
    let (plain, (bytes, lost)) = import("plain", &[]);
    let (calibrated, (same_bytes, lost_less)) = import("calibrated", &learned);
    assert_eq!((&plain["calibrated"], &calibrated["calibrated"]), (&0.into(), &calibrated["quantized"]));
    assert_eq!(same_bytes, bytes);
    assert!(lost_less < 0.8 * lost, "{lost_less} against {lost}");

    let (mixed, (more_bytes, lost_least)) = import("mixed", &[learned[0], learned[1], "--target-bits", "7"]);
    let (wide, quantized) = (mixed["wide"].as_u64().unwrap(), mixed["quantized"].as_u64().unwrap());
    assert!(wide > 0 && wide < quantized, "{mixed}");
    assert!(more_bytes > bytes && lost_least < 0.8 * lost_less, "{lost_least} against {lost_less}");

    let refused = folder.path().join("refused");
    let refuses = |more: &[&str]| {
        let arguments = args!["import", source, refused, "--calibrate", text];
        firebox_with(arguments.into_iter().chain(more.iter().map(Into::into)))
    };
    refuses(&[]).ends_with(USAGE);
    refuses(&["--quantize", "q4", "--target-bits", "3"]).fails(UNUSABLE, &["3 bits", "4.13 to 8.13"]);
    refuses(&["--quantize", "q8", "--target-bits", "5"]).fails(USAGE, &["--quantize q4"]);
}
