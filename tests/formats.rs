//! Tests that a checkpoint computes the same in every format: a Hugging Face directory, a GGUF file, and a bundle of
//! either.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use firebox::internals::eval::{Prefill, Verification, perplexity, verify_against};
use firebox::internals::store::{Bits, Checkpoint, ImportOptions, Quantization, import};
use firebox::{KvType, Model, available_devices, device};
use serde_json::Value;

fn fixtures(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(folder)
}

fn imported(source: &Path, destination: &Path, quantize: Option<Quantization>) {
    import(source, destination, &ImportOptions::from(quantize), &mut |_| ()).unwrap();
}

fn open(path: &Path) -> Model {
    Model::open(path, &device("cpu").unwrap()).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Verifies a checkpoint on every device of this build.
fn verified(path: &Path, expected: &Path) -> Vec<(&'static str, Verification)> {
    let verified = |name| {
        let model = Model::open(path, &device(name).unwrap()).unwrap();
        (name, verify_against(&model, expected, Prefill::Whole).unwrap())
    };
    available_devices().into_iter().map(verified).collect()
}

/// Returns the directory that a GGUF file was made from.
fn directory_of(gguf: &Path) -> PathBuf {
    let name = gguf.file_name().unwrap();
    let places = [gguf.join("hf"), fixtures("reference").join(name), fixtures("variants").join(name)];
    places.into_iter().find(|place| place.exists()).unwrap()
}

#[test]
fn gguf_and_bundles_equal_the_directory() {
    equal_the_directory("gguf", 35);
}

#[test]
fn gguf_and_bundles_of_encoders_equal_the_directory() {
    equal_the_directory("gguf_encoders", 4);
}

/// Verifies each GGUF file of a folder, what it was made from, and bundles of both.
fn equal_the_directory(folder: &str, count: usize) {
    let scratch = tempfile::tempdir().unwrap();
    let mut families = 0;
    let mut failures = Vec::new();
    for entry in std::fs::read_dir(fixtures(folder)).unwrap() {
        let folder = entry.unwrap().path();
        let family = folder.file_name().unwrap().to_str().unwrap().to_owned();
        let (directory, gguf) = (directory_of(&folder), folder.join("model.gguf"));
        let (bundle, gguf_bundle) =
            (scratch.path().join(&family), scratch.path().join(format!("{family}-gguf")));
        imported(&directory, &bundle, None);
        imported(&gguf, &gguf_bundle, None);
        let expected = directory.join("expected.safetensors");
        // `reference` checks the directories of other folders.
        let own = directory.starts_with(&folder).then_some(&directory);
        for path in own.into_iter().chain([&gguf, &bundle, &gguf_bundle]) {
            for (device, found) in verified(path, &expected) {
                if !found.passes(1e-4) {
                    failures.push(format!("{} on {device}: {found:?}", path.display()));
                }
            }
        }
        families += 1;
    }
    assert_eq!(families, count);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn an_encoder_survives_its_bundle() {
    let scratch = tempfile::tempdir().unwrap();
    let (source, bundle) = (fixtures("reference/bert"), scratch.path().join("bert"));
    imported(&source, &bundle, None);
    for (device, found) in verified(&bundle, &source.join("expected.safetensors")) {
        assert!(found.passes(1e-5), "on {device}: {found:?}");
    }
}

/// The loss of quantized weights equals that of the same rounding by another program; a difference would be a fault of
/// this one.
#[test]
fn quantization_errors_are_those_of_rounding() {
    let oracle: Value =
        serde_json::from_slice(&std::fs::read(fixtures("quantization.json")).unwrap()).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    for family in ["qwen3", "llama"] {
        let source = fixtures("reference").join(family);
        let ids: Vec<u32> = serde_json::from_value(oracle[family]["ids"].clone()).unwrap();
        let mut q8_loss = f64::NAN;
        for (name, bits, group) in
            [("q8_32", Bits::Q8, 32), ("q4_32", Bits::Q4, 32), ("q4_128", Bits::Q4, 128)]
        {
            let bundle = scratch.path().join(format!("{family}-{name}"));
            imported(&source, &bundle, Some(Quantization { bits, group }));
            let found =
                perplexity(&open(&bundle), &ids, ids.len(), KvType::F32, Some(&open(&source))).unwrap();
            let mean_kl = found.divergence.unwrap().mean_kl;
            let expected = oracle[family][name]["ids"].as_f64().unwrap();
            assert!(
                (mean_kl / expected - 1.0).abs() < 0.05,
                "{family} {name}: {mean_kl} instead of {expected}"
            );
            if bits == Bits::Q8 {
                q8_loss = mean_kl;
            } else {
                assert!(mean_kl > 50.0 * q8_loss, "{family} {name}: {mean_kl} against {q8_loss}");
            }
        }
    }
}

#[test]
fn a_quantized_model_keeps_its_tokens_when_stored_again() {
    let scratch = tempfile::tempdir().unwrap();
    let (first, second) = (scratch.path().join("first"), scratch.path().join("second"));
    let quantize = Some(Quantization { bits: Bits::Q4, group: 32 });
    imported(&fixtures("reference/qwen3"), &first, quantize);
    imported(&first, &second, None);
    let hashes = |path: &Path| -> Vec<_> {
        Checkpoint::open(path).unwrap().segments().into_iter().map(|segment| segment.hash).collect()
    };
    assert_eq!(hashes(&first), hashes(&second));
}

/// A quantized model computes the same on every device: the CPU has kernels for it, others dequantize. With 4-bit
/// weights the CPU quantizes activations to 8 bits, which is 257 times as coarse as the 16 bits with 8-bit weights.
#[test]
#[cfg(any(feature = "ndarray", feature = "wgpu"))]
fn quantized_weights_mean_the_same_everywhere() {
    let scratch = tempfile::tempdir().unwrap();
    let within = |bound: f32, found: &[f32], expected: &[f32]| {
        found.iter().zip(expected).all(|(f, e)| (f - e).abs() < bound)
    };
    for (bits, group, of_cpu) in [(Bits::Q8, 32, 1e-3), (Bits::Q4, 32, 257e-3), (Bits::Q4, 128, 257e-3)] {
        let bundle = scratch.path().join(format!("{bits:?}-{group}"));
        imported(&fixtures("reference/qwen3"), &bundle, Some(Quantization { bits, group }));
        let logits = |name| {
            let model = Model::open(&bundle, &device(name).unwrap()).unwrap();
            model.session().unwrap().with_kv_type(KvType::F32).feed(&[5, 77, 130, 9, 201]).unwrap()
        };
        let of_the_cpu = logits("cpu");
        let unpacked: Vec<_> = available_devices()
            .into_iter()
            .filter(|name| *name != "cpu")
            .map(|name| (name, logits(name)))
            .collect();
        assert!(!unpacked.is_empty());
        for (name, found) in &unpacked {
            let first = &unpacked[0];
            assert!(within(of_cpu, found, &of_the_cpu), "{bits:?}, group {group}: {name} and the CPU");
            assert!(within(1e-3, found, &first.1), "{bits:?}, group {group}: {name} and {}", first.0);
        }
    }
}
