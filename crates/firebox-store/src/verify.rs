//! Whether a model on disk still is what was written.

use std::path::{Path, PathBuf};

use crate::bundle;
use crate::checkpoint::{Checkpoint, SourceKind};
use crate::error::{Fault, StoreError};
use crate::folder::Folder;
use crate::import::Progress;
use crate::manifest::MANIFEST;
use crate::mapping::Mapping;
use crate::segment::SegmentId;

/// What a verification has found to be sound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifyReport {
    /// The model.
    pub path: PathBuf,
    /// Its format.
    pub source: SourceKind,
    /// Tensors whose place, shape and encoding were checked.
    pub tensors: usize,
    /// Segments whose content was hashed and found equal; empty for formats that carry no hashes.
    pub segments: Vec<(SegmentId, String)>,
    /// Bytes hashed.
    pub bytes: u64,
}

/// Checks the structure of any model, and for a bundle that every segment's bytes are those it was written with.
pub fn verify(
    path: impl AsRef<Path>,
    progress: &mut dyn FnMut(Progress),
) -> Result<VerifyReport, StoreError> {
    let checkpoint = Checkpoint::open(path)?;
    let mut report = VerifyReport {
        path: checkpoint.path().to_owned(),
        source: checkpoint.source(),
        tensors: checkpoint.tensors().count(),
        segments: Vec::new(),
        bytes: 0,
    };
    if checkpoint.source() != SourceKind::Bundle {
        return Ok(report);
    }
    let folder = Folder::open(checkpoint.path())?;
    let manifest = bundle::manifest(&folder)?;
    let manifest_path = checkpoint.path().join(MANIFEST);
    let total = manifest.segments.iter().map(|segment| segment.bytes).sum();
    for segment in &manifest.segments {
        let id =
            segment.segment().map_err(|reason| Fault::new("segments", reason).in_file(&manifest_path))?;
        let file = folder.resolve(&manifest_path, &format!("segment {id}: file"), &segment.file)?;
        let mut on_bytes = |bytes: u64| {
            report.bytes += bytes;
            progress(Progress { item: id.to_string(), done: report.bytes, total });
        };
        let found = hash_file(&file, &mut on_bytes)?;
        if found != segment.hash {
            return Err(StoreError::HashMismatch {
                file,
                segment: id.to_string(),
                expected: segment.hash.clone(),
                found,
            });
        }
        report.segments.push((id, found));
    }
    match checkpoint.hash() {
        Some(found) if found != manifest.hash => Err(StoreError::HashMismatch {
            file: checkpoint.path().join("config.json"),
            segment: "configuration".into(),
            expected: manifest.hash,
            found,
        }),
        _ => Ok(report),
    }
}

fn hash_file(path: &Path, on_bytes: &mut dyn FnMut(u64)) -> Result<String, StoreError> {
    let mapping = Mapping::open(path)?;
    let length = mapping.bytes().len();
    let mut buffer = vec![0; length.min(4 << 20)];
    let mut hasher = blake3::Hasher::new();
    let mut at = 0;
    while at < length {
        let len = buffer.len().min(length - at);
        mapping.read_at(&mut buffer[..len], at)?;
        hasher.update(&buffer[..len]);
        on_bytes(len as u64);
        at += len;
    }
    Ok(hasher.finalize().to_hex().to_string())
}
