//! Tests that every family computes what the reference computes, however the prompt is divided, on every device of this
//! build.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use firebox::internals::eval::{Prefill, Verification, verify_against};
use firebox::{Model, available_devices, device};

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
    let mut failures = Vec::new();
    for folder in folders {
        check(&folder, &folder.join("expected.safetensors"), &mut failures);
    }
    assert!(failures.is_empty(), "{} checks fail:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn reference_checkpoints() {
    check_all(fixtures("reference"), 10);
}

#[test]
fn unusual_shapes_and_configurations() {
    check_all(fixtures("variants"), 16);
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
