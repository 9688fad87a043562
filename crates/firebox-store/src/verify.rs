//! Verification of a model on disk against its hashes.

use std::path::{Path, PathBuf};

use crate::bundle;
use crate::checkpoint::Checkpoint;
use crate::error::{Fault, StoreError};
use crate::folder::Folder;
use crate::heads::{HeadInfo, Heads};
use crate::manifest::MANIFEST;
use crate::mapping::Mapping;
use crate::parts::SourceKind;
use crate::progress::Progress;
use crate::segment::SegmentId;

/// The remedy for a damaged bundle.
const IMPORT_AGAIN: &str = "import the model again";

/// The result of a successful verification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifyReport {
    /// The model.
    pub path: PathBuf,
    /// Its format.
    pub source: SourceKind,
    /// The number of tensors whose location, shape and encoding were checked.
    pub tensors: usize,
    /// Segments whose content matched their hash; empty for formats without hashes.
    pub segments: Vec<(SegmentId, String)>,
    /// Installed heads whose content matched their hashes, rollback targets included.
    pub heads: Vec<HeadInfo>,
    /// Bytes hashed.
    pub bytes: u64,
}

/// Checks the structure of any model, and the content of every segment of a bundle.
///
/// Heads are checked in every format: their content must match their hashes, and they must belong to this trunk.
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
        heads: Vec::new(),
        bytes: 0,
    };
    if checkpoint.source() == SourceKind::Bundle {
        verify_segments(&checkpoint, &mut report, progress)?;
    }
    if checkpoint.source() != SourceKind::Gguf {
        verify_heads(checkpoint, &mut report, progress)?;
    }
    Ok(report)
}

fn verify_segments(
    checkpoint: &Checkpoint,
    report: &mut VerifyReport,
    progress: &mut dyn FnMut(Progress),
) -> Result<(), StoreError> {
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
        let found = Mapping::open(&file)?.hash(&mut on_bytes)?;
        if found != segment.hash {
            return Err(StoreError::HashMismatch {
                file,
                segment: id.to_string(),
                expected: segment.hash.clone(),
                found,
                remedy: IMPORT_AGAIN,
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
            remedy: IMPORT_AGAIN,
        }),
        _ => Ok(()),
    }
}

fn verify_heads(
    checkpoint: Checkpoint,
    report: &mut VerifyReport,
    progress: &mut dyn FnMut(Progress),
) -> Result<(), StoreError> {
    let heads = Heads::of(checkpoint)?;
    let (before, mut done) = (report.bytes, 0);
    report.heads = heads.verify(&mut |name, bytes, total| {
        done += bytes;
        progress(Progress { item: format!("head {name}"), done: before + done, total: before + total });
    })?;
    report.bytes += done;
    Ok(())
}
