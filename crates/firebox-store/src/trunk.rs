//! What a head is bound to: the hash of everything before its first layer.

use std::collections::BTreeMap;

use crate::checkpoint::{Checkpoint, SourceKind, combined_hash};
use crate::error::StoreError;
use crate::import::{segment_hash, segment_ids};
use crate::segment::SegmentId;

/// The hash of the trunk that ends before layer `split`: embeddings, the layers before it and the configuration.
///
/// A bundle's manifest has the hashes that it is made of. Of a Hugging Face directory all of the trunk's weights are
/// read, each time: the result is the hash that its bundle would have if it was imported as it is, so a head that was
/// made for the one fits the other. A GGUF file has to be imported first.
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
