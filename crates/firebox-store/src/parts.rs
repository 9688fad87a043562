//! The parts of a checkpoint, which opening any format yields.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::Value;

use crate::encoding::Quantization;
use crate::mapping::Mapping;
use crate::packed::PackedTensor;
use crate::segment::SegmentId;
use crate::tensor_index::{Place, TensorInfo};
use crate::text::TextAssets;

/// The format a checkpoint was opened from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SourceKind {
    /// A directory of safetensors files in the layout of the Hugging Face hub.
    HuggingFace,
    /// A GGUF file.
    Gguf,
    /// A directory written by [`import`](crate::import()).
    Bundle,
}

/// The result of opening any format. Spans have been checked against the lengths of the files.
pub(crate) struct Parts {
    pub(crate) path: PathBuf,
    pub(crate) source: SourceKind,
    pub(crate) config: Value,
    pub(crate) text: TextAssets,
    pub(crate) files: Vec<Mapping>,
    pub(crate) tensors: Vec<(TensorInfo, Place)>,
    pub(crate) quantization: Option<Quantization>,
    /// Tensors that only an import unpacks, by name.
    pub(crate) packed: BTreeMap<String, PackedTensor>,
    /// Content hashes of segments; known for bundles only.
    pub(crate) hashes: BTreeMap<SegmentId, String>,
}
