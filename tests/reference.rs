//! Tests that every family computes what the reference computes, however the prompt is divided, on every device of this
//! build.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use firebox::internals::eval::{Prefill, Verification, expected_input_ids, verify_against};
use firebox::internals::model::EncoderInput;
use firebox::internals::runtime::read_floats;
use firebox::{Model, available_devices, device};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

const MODES: [Prefill; 3] = [Prefill::Whole, Prefill::Chunked, Prefill::Stepwise];

/// Relative to the logit range, and to an embedding's elements.
const LOGIT_TOLERANCE: f64 = 1e-4;
const EMBEDDING_TOLERANCE: f64 = 1e-5;

fn fixtures(folder: &str) -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(folder);
    let entries = std::fs::read_dir(&root).unwrap_or_else(|error| panic!("{}: {error}", root.display()));
    let mut folders: Vec<_> =
        entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()).collect();
    folders.sort();
    folders
}

/// Checks one checkpoint in every mode and collects the failures.
fn check(path: &Path, expected: &Path, failures: &mut Vec<String>) {
    for device_name in available_devices() {
        let model = match Model::open(path, &device(device_name).unwrap()) {
            Ok(model) => model,
            Err(error) => {
                failures.push(format!("{} on {device_name}: {error}", path.display()));
                continue;
            }
        };
        let modes = if model.decoder().is_ok() { &MODES[..] } else { &MODES[..1] };
        for &mode in modes {
            let found = verify_against(&model, expected, mode).unwrap();
            let tolerance = match found {
                Verification::Logits(_) => LOGIT_TOLERANCE,
                Verification::Embedding(_) => EMBEDDING_TOLERANCE,
            };
            if !found.passes(tolerance) {
                failures.push(format!("{} on {device_name}, {mode:?}: {found:?}", path.display()));
            }
        }
    }
}

fn check_all(folders: Vec<PathBuf>, at_least: usize) {
    assert!(folders.len() >= at_least, "only {} fixtures found", folders.len());
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    // Software Vulkan hardly takes more than a core for one model.
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(|| {
                while let Some(folder) = folders.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let mut found = Vec::new();
                    check(folder, &folder.join("expected.safetensors"), &mut found);
                    failures.lock().unwrap().extend(found);
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{} checks fail:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn reference_checkpoints() {
    check_all(fixtures("reference"), 40);
}

/// Stacks the experts of a checkpoint as some publishers store them.
fn stacked(source: &Path, folder: &Path) {
    let bytes = std::fs::read(source.join("model.safetensors")).unwrap();
    let model = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: BTreeMap<String, (Vec<usize>, Vec<u8>)> = BTreeMap::new();
    let expert = |prefix: &str, expert: usize, projection: &str| {
        model.tensor(&format!("{prefix}.experts.{expert}.{projection}.weight")).ok()
    };
    for (name, view) in model.tensors() {
        let Some((prefix, _)) = name.split_once(".experts.") else {
            tensors.insert(name, (view.shape().to_vec(), view.data().to_vec()));
            continue;
        };
        for (stack, projections) in
            [("gate_up_proj", &["gate_proj", "up_proj"][..]), ("down_proj", &["down_proj"])]
        {
            let (mut data, mut shape) = (Vec::new(), vec![0, 0, 0]);
            while let Some(first) = expert(prefix, shape[0], projections[0]) {
                for projection in projections {
                    data.extend_from_slice(expert(prefix, shape[0], projection).unwrap().data());
                }
                shape = vec![shape[0] + 1, first.shape()[0] * projections.len(), first.shape()[1]];
            }
            tensors.insert(format!("{prefix}.experts.{stack}"), (shape, data));
        }
    }
    let views = tensors
        .iter()
        .map(|(name, (shape, data))| (name, TensorView::new(Dtype::F32, shape.clone(), data).unwrap()));
    std::fs::write(folder.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    std::fs::copy(source.join("config.json"), folder.join("config.json")).unwrap();
}

#[test]
fn experts_may_be_stored_as_one_tensor() {
    let mut failures = Vec::new();
    for family in ["qwen3_5_moe_text", "qwen3_next"] {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference").join(family);
        let folder = tempfile::tempdir().unwrap();
        stacked(&source, folder.path());
        check(folder.path(), &source.join("expected.safetensors"), &mut failures);
    }
    assert!(failures.is_empty(), "{} checks fail:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn unusual_shapes_and_configurations() {
    check_all(fixtures("variants"), 24);
}

#[test]
fn classifiers_score_as_the_reference() {
    for (name, labels) in [("modernbert-classifier", 1), ("roberta-classifier", 3)] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/variants").join(name);
        let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
        let scores = SafeTensors::deserialize(&bytes).unwrap().tensor("scores").unwrap();
        let floats = |data: &[u8]| -> Vec<f32> {
            data.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
        };
        let expected = floats(scores.data());
        let ids = expected_input_ids(&folder.join("expected.safetensors")).unwrap();
        for device_name in available_devices() {
            let model = Model::open(&folder, &device(device_name).unwrap()).unwrap();
            let encoder = model.encoder().unwrap();
            assert_eq!(encoder.labels(), Some(labels));
            // Beside another text, which must not change the scores.
            let inputs = [EncoderInput::new(&ids[..5]), EncoderInput::new(&ids)];
            let found = read_floats(encoder.classify(&inputs).unwrap().unwrap()).unwrap();
            assert_eq!(found.len(), labels + expected.len());
            for (found, expected) in found[labels..].iter().zip(&expected) {
                assert!((found - expected).abs() < 1e-4, "{name} on {device_name}: {found}, not {expected}");
            }
        }
    }
}

/// More checkpoints than the repository holds: every folder with an `expected.safetensors` below the one that
/// `FIREBOX_VARIANTS` names.
#[test]
#[ignore = "soak: checkpoints below FIREBOX_VARIANTS; tests/fixtures/make_variants.py makes more"]
fn further_checkpoints() {
    let root = std::env::var("FIREBOX_VARIANTS").expect("FIREBOX_VARIANTS names a folder of checkpoints");
    let only = std::env::var("FIREBOX_ONLY").unwrap_or_default();
    let mut folders: Vec<_> = std::fs::read_dir(root)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("expected.safetensors").exists())
        .filter(|path| path.to_string_lossy().contains(&only))
        .collect();
    folders.sort();
    check_all(folders, 1);
}
