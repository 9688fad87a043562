//! `firebox.json`: the contents of a bundle and the encodings of its tensors.

use std::collections::HashSet;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::encoding::{Encoding, Quantization};
use crate::error::Fault;
use crate::excerpt::Excerpt;
use crate::segment::SegmentId;

/// The manifest's file name, by which a directory is recognized as a bundle.
pub const MANIFEST: &str = "firebox.json";

const FORMAT: &str = "firebox-bundle";
const VERSION: u32 = 1;

/// The prefix of padding tensors, which fill the space up to the next multiple of 64 bytes.
pub(crate) const PADDING: &str = "__pad_";

/// The suffix of the name of a tensor's scales.
pub(crate) const SCALES: &str = ".scales";

/// The manifest of a bundle.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Always `firebox-bundle`.
    pub format: String,
    /// The version of the format; readers refuse other versions.
    pub version: u32,
    /// The configuration's `model_type`.
    pub architecture: String,
    /// The program that wrote it.
    pub created_by: String,
    /// `huggingface`, `gguf` or `bundle`.
    pub source: String,
    /// The scheme that the weights were quantized with, if any.
    pub quantization: Option<Quantization>,
    /// The hash of the configuration and all segments.
    pub hash: String,
    /// The segments, in the order of a forward pass.
    pub segments: Vec<ManifestSegment>,
}

/// One segment of a bundle.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestSegment {
    /// The segment's id in the form of [`SegmentId`]'s `Display`.
    pub id: String,
    /// The safetensors file, below the bundle's directory.
    pub file: String,
    /// The file's length.
    pub bytes: u64,
    /// blake3 of the file, as hexadecimal digits.
    pub hash: String,
    /// Its tensors.
    pub tensors: Vec<ManifestTensor>,
}

/// One tensor of a bundle.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestTensor {
    /// The Hugging Face name.
    pub name: String,
    /// The logical shape.
    pub shape: Vec<usize>,
    /// The encoding of its bytes.
    pub encoding: Encoding,
}

impl Manifest {
    pub(crate) fn new(
        architecture: &str,
        source: &str,
        quantization: Option<Quantization>,
        hash: String,
        segments: Vec<ManifestSegment>,
    ) -> Self {
        Self {
            format: FORMAT.into(),
            version: VERSION,
            architecture: architecture.into(),
            created_by: CREATED_BY.into(),
            source: source.into(),
            quantization,
            hash,
            segments,
        }
    }

    /// Reads and checks a manifest.
    pub fn parse(json: &[u8]) -> Result<Self, Fault> {
        let manifest: Self = parse_versioned(json, (FORMAT, VERSION), "import the model again")?;
        manifest.check()?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), Fault> {
        if let Some(quantization) = &self.quantization {
            quantization.check().map_err(|reason| Fault::new("quantization", reason))?;
        }
        check_segments(&self.segments, file_of)
    }
}

impl ManifestSegment {
    /// The parsed id.
    pub fn segment(&self) -> Result<SegmentId, String> {
        self.id.parse()
    }
}

/// Checks the segments of a bundle or of a head. `file_of` gives the only valid file name of a segment.
pub(crate) fn check_segments(
    segments: &[ManifestSegment],
    file_of: impl Fn(SegmentId) -> String,
) -> Result<(), Fault> {
    let mut names = HashSet::new();
    let mut before = None;
    for (at, segment) in segments.iter().enumerate() {
        let field = |what: &str| format!("segments[{at}].{what}");
        let id = segment.segment().map_err(|reason| Fault::new(field("id"), reason))?;
        if before.is_some_and(|before| before >= id) {
            return Err(Fault::new(field("id"), format!("{id} is listed twice or out of order")));
        }
        before = Some(id);
        // A segment has a single valid name, so a path that leads elsewhere never reaches the file system.
        if segment.file != file_of(id) {
            return Err(Fault::new(
                field("file"),
                format!("{:?}, expected {:?}", Excerpt(&segment.file), file_of(id)),
            ));
        }
        check_hash(&field("hash"), &segment.hash)?;
        for tensor in &segment.tensors {
            let field = |what: &str| format!("tensor {:?}: {what}", tensor.name);
            if tensor.name.is_empty() || tensor.name.starts_with(PADDING) {
                return Err(Fault::new(field("name"), "empty, or reserved for padding"));
            }
            if !names.insert(tensor.name.as_str()) {
                return Err(Fault::new(field("name"), "listed twice"));
            }
            let sizes =
                tensor.encoding.data_bytes(&tensor.shape).and(tensor.encoding.scale_bytes(&tensor.shape));
            sizes.map_err(|reason| Fault::new(field("shape"), reason))?;
        }
    }
    Ok(())
}

/// Checks that a text is a blake3 hash in hexadecimal digits.
pub(crate) fn check_hash(field: &str, hash: &str) -> Result<(), Fault> {
    if hash.len() == 64 && hash.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')) {
        return Ok(());
    }
    Err(Fault::new(field, "expected 64 hexadecimal digits"))
}

/// The program name and version that written files carry.
pub(crate) const CREATED_BY: &str = concat!("firebox-store ", env!("CARGO_PKG_VERSION"));

/// Parses a JSON file after checking its format and version. The caller checks the contents.
pub(crate) fn parse_versioned<T: DeserializeOwned>(
    json: &[u8],
    expected: (&str, u32),
    remedy: &str,
) -> Result<T, Fault> {
    /// Parsed first, to tell a later version from a damaged file.
    #[derive(Deserialize)]
    struct Version {
        format: String,
        version: u32,
    }
    let not_json = |error: serde_json::Error| Fault::json("JSON", &error);
    let Version { format, version } = serde_json::from_slice(json).map_err(not_json)?;
    if format != expected.0 {
        return Err(Fault::new("format", format!("{:?}, expected {:?}", Excerpt(&format), expected.0)));
    }
    if version != expected.1 {
        return Err(Fault::unsupported(
            "version",
            format!("{version}; this program reads {}: update it, or {remedy}", expected.1),
        ));
    }
    serde_json::from_slice(json).map_err(not_json)
}

/// The file of a segment, below the bundle's directory.
pub(crate) fn file_of(segment: SegmentId) -> String {
    format!("segments/{segment}.safetensors")
}
