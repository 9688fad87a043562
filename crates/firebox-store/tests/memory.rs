//! What the kernel says about memory: mapped weights are not copied, an import does not grow with the model, and what is of no
//! use in a header or an index is not built.
//!
//! One test per process would be safest; all measure growth and run one after the other under one lock.
#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]
#![cfg(target_os = "linux")]

mod support;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use firebox_store::{Bits, Checkpoint, ImportOptions, Quantization, import};
use support::directory;
use tempfile::tempdir;

static ALONE: Mutex<()> = Mutex::new(());

const MIB: i64 = 1 << 20;
const ROWS: usize = 16384;
const WIDTH: usize = 1024;

/// A field of /proc/self/status in bytes.
fn status(field: &str) -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<i64>().unwrap() * 1024
}

/// A model of one tensor of 64 MiB.
fn large(folder: &Path) -> PathBuf {
    let path = directory(folder, &[("config.json", b"{\"model_type\": \"llama\"}")]);
    let bytes = ROWS * WIDTH * 4;
    let mut header = format!(
        "{{\"lm_head.weight\":{{\"dtype\":\"F32\",\"shape\":[{ROWS},{WIDTH}],\"data_offsets\":[0,{bytes}]}}}}"
    );
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    let mut file = File::create(path.join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    let row: Vec<u8> = (0..WIDTH).flat_map(|i| (i as f32 * 1e-3).to_le_bytes()).collect();
    for _ in 0..ROWS {
        file.write_all(&row).unwrap();
    }
    path
}

#[test]
fn weights_are_mapped_not_copied() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempdir().unwrap();
    let path = large(folder.path());
    let (anonymous, mapped) = (status("RssAnon"), status("RssFile"));
    let model = Checkpoint::open(path).unwrap();
    let weight = model.weight("lm_head.weight").unwrap();
    let sum: u64 = weight.data.iter().map(|byte| u64::from(*byte)).sum();
    let (anonymous, mapped) = (status("RssAnon") - anonymous, status("RssFile") - mapped);
    assert!(sum > 0);
    assert!(anonymous < 8 * MIB, "anonymous memory grew by {anonymous}");
    assert!(mapped >= 60 * MIB, "file memory grew by {mapped} only");

    model.release(model.segments()[0].id).unwrap();
    let released = status("RssFile");
    assert!(released < 60 * MIB, "{released} bytes still mapped in after release");
}

#[test]
fn an_import_takes_a_bounded_buffer() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempdir().unwrap();
    let path = large(&folder.path().join("source"));
    for (name, quantize) in [("plain", None), ("q4", Some(Quantization { bits: Bits::Q4, group: 32 }))] {
        let before = status("VmRSS");
        let mut most = 0;
        import(&path, folder.path().join(name), &ImportOptions::from(quantize), &mut |_| {
            most = most.max(status("VmRSS") - before);
        })
        .unwrap();
        assert!(most > 0, "progress was never reported");
        assert!(most < 24 * MIB, "{name}: memory grew by {most} while a tensor of 64 MiB passed through");
    }
}

#[test]
fn large_unused_json_is_not_held_in_memory() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempdir().unwrap();
    let zeros = format!("[{}0]", "0,".repeat(8 << 20));
    let header = format!("{{\"__metadata__\":{{\"a\":{zeros},\"b\":\"c\"}}}}");
    let weights = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
    let index = format!("{{\"metadata\":{zeros},\"weight_map\":{{\"x\":\"a.safetensors\"}}}}");
    let wrong = format!("{{\"weight_map\":{{\"x\":{zeros}}}}}");
    let config: (&str, &[u8]) = ("config.json", b"{\"model_type\": \"llama\"}");
    let model = |name: &str, index: &str| {
        let index = ("model.safetensors.index.json", index.as_bytes());
        directory(&folder.path().join(name), &[config, ("a.safetensors", &weights), index])
    };
    for (path, word) in [
        (model("index", &index), "does not have it"),
        (model("wrong", &wrong), "a file name, found \"[0,…]\""),
    ] {
        let before = status("VmHWM");
        let error = Checkpoint::open(path).unwrap_err().to_string();
        let grown = status("VmHWM") - before;
        assert!(error.contains(word), "{error}");
        assert!(grown < 64 * MIB, "memory grew by {grown} for 16 MiB of zeros");
    }
}
