//! The trunk hash, to which heads are bound: the hash of everything before a head's first layer.

use std::collections::BTreeMap;

use crate::checkpoint::{Checkpoint, combined_hash};
use crate::error::StoreError;
use crate::parts::SourceKind;
use crate::segment::SegmentId;
use crate::segment_writer::{segment_hash, segment_ids};

/// The hash of the trunk that ends before layer `split`: embeddings, the layers before it and the configuration.
///
/// For a bundle the hash is computed from the manifest. For a Hugging Face directory every call reads all weights of the
/// trunk; the result equals that of the bundle that an unquantized import would write, so a head made for one fits the
/// other. A GGUF file has to be imported first.
pub fn trunk_hash(checkpoint: &Checkpoint, split: usize) -> Result<String, StoreError> {
    if checkpoint.source() == SourceKind::Gguf {
        return Err(StoreError::HeadsNeedImport { model: checkpoint.path().to_owned() });
    }
    let segments = segment_ids(checkpoint);
    let layers = segments.iter().filter_map(|segment| match segment {
        SegmentId::Layer(layer) => Some(layer + 1),
        _ => None,
    });
    let layers = layers.max().unwrap_or(0);
    if split > layers {
        return Err(StoreError::NoSuchSplit { model: checkpoint.path().to_owned(), split, layers });
    }
    if let Some(hash) = checkpoint.trunk_hash(split) {
        return Ok(hash);
    }
    let mut hashes = BTreeMap::new();
    for segment in segments.into_iter().filter(|segment| segment.in_trunk(split)) {
        hashes.insert(segment, segment_hash(checkpoint, segment)?);
    }
    Ok(combined_hash(checkpoint.config(), hashes.iter()))
}
