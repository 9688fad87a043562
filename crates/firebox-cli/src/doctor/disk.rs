//! Measurement of the disk's read rate, for `firebox doctor`.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;
use firebox_runtime::residency::disk_rate;
use firebox_store::{Checkpoint, Dtype, NewTensor, NewTensorFile};
use serde::Serialize;

use crate::hub;

/// A model's files tell how fast the disk is if they have so much.
const ENOUGH: u64 = 32 << 20;

/// Tensors of the file that is made where there is no model, and their elements.
const TENSORS: usize = 8;
const ELEMENTS: usize = 2 << 20;

/// The measured read rate of a disk.
#[derive(Debug, Serialize)]
pub struct Disk {
    pub read_bytes_per_second: f64,
    /// A description of the file that was read.
    pub file: String,
}

/// Reads a model past the page cache, or a file that is made for it, beside models that come from the hub.
pub fn measured(checkpoint: Option<&Checkpoint>) -> anyhow::Result<Disk> {
    if let Some(checkpoint) = checkpoint.filter(|checkpoint| bytes(checkpoint) >= ENOUGH) {
        checkpoint.evict()?;
        return Ok(Disk {
            read_bytes_per_second: disk_rate(checkpoint)?,
            file: format!("read from {}", checkpoint.path().display()),
        });
    }
    let place = place();
    let folder = tempfile::Builder::new()
        .prefix(".firebox-doctor-")
        .tempdir_in(&place)
        .with_context(|| format!("cannot write to {}", place.display()))?;
    fs::write(folder.path().join("config.json"), r#"{"model_type": "none"}"#)?;
    write(folder.path().join("model.safetensors"))?;
    let checkpoint = Checkpoint::open(folder.path())?;
    checkpoint.evict()?;
    Ok(Disk {
        read_bytes_per_second: disk_rate(&checkpoint)?,
        file: format!("read from {}", place.display()),
    })
}

fn bytes(checkpoint: &Checkpoint) -> u64 {
    checkpoint.tensors().map(|tensor| tensor.bytes).sum()
}

/// Where models are kept, or as near to it as there is a folder.
fn place() -> PathBuf {
    let cache = hub::cache_folder().ok();
    let there = cache.as_deref().and_then(|cache| cache.ancestors().find(|folder| folder.is_dir()));
    there.map_or_else(std::env::temp_dir, PathBuf::from)
}

fn write(path: PathBuf) -> anyhow::Result<()> {
    let tensor = |index| NewTensor {
        name: format!("model.layers.{index}.weight"),
        dtype: Dtype::F32,
        shape: vec![ELEMENTS],
    };
    let tensors: Vec<NewTensor> = (0..TENSORS).map(tensor).collect();
    let mut file = NewTensorFile::create(path, &BTreeMap::new(), &tensors)?;
    // Some file systems store zeros, and whatever comes again, as next to nothing.
    let mut state = 1u64;
    let mut noise = vec![0; ELEMENTS * size_of::<f32>()];
    for _ in 0..TENSORS {
        for chunk in noise.chunks_exact_mut(size_of::<u64>()) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            chunk.copy_from_slice(&state.to_le_bytes());
        }
        file.write(&noise)?;
    }
    Ok(file.publish()?)
}
