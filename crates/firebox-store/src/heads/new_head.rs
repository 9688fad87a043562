//! The construction of a head.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::head::{HEAD, HeadFiles, HeadManifest, file_of, segment_of};
use crate::checkpoint::Checkpoint;
use crate::encoding::{Encoding, Quantization};
use crate::error::StoreError;
use crate::import::write_json;
use crate::manifest::{ManifestSegment, ManifestTensor, PADDING};
use crate::partial::PartialFolder;
use crate::safetensors::METADATA;
use crate::safetensors_writer::{FileLayout, TensorWriter};
use crate::segment::SegmentId;
use crate::trunk::trunk_hash;
use crate::weight::Weight;

/// A head under construction: its tensors, under their names in the trunk's model, and its description.
///
/// The tensors of a low-rank adapter are named like the weight that they adapt, with `.lora_A.weight` and `.lora_B.weight`
/// in place of `.weight`. Tensors are written as given; use [`encode`](crate::encode()) for numbers that are not encoded
/// yet. A [mapped](Weight::mapped) tensor takes no memory until it is written.
#[derive(Debug)]
pub struct NewHead {
    trunk: String,
    split: usize,
    spec: Value,
    quantization: Option<Quantization>,
    segments: BTreeMap<SegmentId, BTreeMap<String, Weight>>,
}

impl NewHead {
    /// Begins a head over the trunk that ends before layer `split`. For a Hugging Face directory this reads the trunk; see
    /// [`trunk_hash`](crate::trunk_hash()).
    pub fn new(trunk: &Checkpoint, split: usize, spec: Value) -> Result<Self, StoreError> {
        Ok(Self::for_trunk(trunk_hash(trunk, split)?, split, spec))
    }

    /// Begins a head over a trunk of a known hash.
    pub fn for_trunk(trunk: String, split: usize, spec: Value) -> Self {
        Self { trunk, split, spec, quantization: None, segments: BTreeMap::new() }
    }

    /// Adds a tensor.
    pub fn push(&mut self, weight: Weight) -> Result<(), StoreError> {
        let refuse = |reason: String| StoreError::NotInHead { tensor: weight.name.clone(), reason };
        if weight.name.is_empty() || weight.name == METADATA || weight.name.starts_with(PADDING) {
            return Err(refuse("the name is empty or means something else in a file".into()));
        }
        let segment = segment_of(&weight.name, self.split).map_err(refuse)?;
        weight.check_lengths()?;
        if let Encoding::Grouped(quantization) = weight.encoding {
            let known = *self.quantization.get_or_insert(quantization);
            if known != quantization {
                return Err(refuse(format!(
                    "it is in {quantization}, others in {known}; a head has one scheme"
                )));
            }
        }
        let tensors = self.segments.entry(segment).or_default();
        if tensors.contains_key(&weight.name) {
            return Err(refuse("the head has it already".into()));
        }
        tensors.insert(weight.name.clone(), weight);
        Ok(())
    }

    /// Writes the head to the new directory `destination`, completely or not at all, and opens it.
    pub fn write(self, destination: impl AsRef<Path>) -> Result<HeadFiles, StoreError> {
        let destination = destination.as_ref();
        let partial = PartialFolder::create(destination)?;
        let mut segments = Vec::new();
        for (id, tensors) in &self.segments {
            segments.push(write_segment(&partial.path, *id, tensors)?);
        }
        let manifest = HeadManifest::new(self.trunk, self.split, self.spec, self.quantization, segments);
        let path: PathBuf = partial.path.join(HEAD);
        write_json(&path, &manifest)?;
        // Opened before it is published: a head that cannot be opened is not one.
        HeadFiles::open(&partial.path)?;
        partial.publish(destination)?;
        HeadFiles::open(destination)
    }
}

fn write_segment(
    folder: &Path,
    id: SegmentId,
    weights: &BTreeMap<String, Weight>,
) -> Result<ManifestSegment, StoreError> {
    let mut layout = FileLayout::new(id);
    let mut tensors = Vec::new();
    for Weight { name, shape, encoding, .. } in weights.values() {
        layout
            .push_encoded(name, shape, *encoding)
            .map_err(|reason| StoreError::NotInHead { tensor: name.clone(), reason })?;
        tensors.push(ManifestTensor { name: name.clone(), shape: shape.clone(), encoding: *encoding });
    }
    let file = file_of(id);
    let mut writer = TensorWriter::create(&folder.join(&file), layout)?;
    for weight in weights.values() {
        writer.next_tensor()?;
        writer.write(&weight.data)?;
        if let Some(scales) = &weight.scales {
            writer.next_tensor()?;
            writer.write(scales)?;
        }
    }
    let (bytes, hash) = writer.finish()?;
    Ok(ManifestSegment { id: id.to_string(), file, bytes, hash, tensors })
}
