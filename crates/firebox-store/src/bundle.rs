//! Opens bundles, the directories that an import writes.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use crate::encoding::{Dtype, Encoding};
use crate::error::{Fault, StoreError};
use crate::excerpt::Shape;
use crate::folder::{Folder, MAX_INDEX, MAX_JSON};
use crate::manifest::{MANIFEST, Manifest, ManifestSegment, PADDING, SCALES};
use crate::mapping::Mapping;
use crate::parts::{Parts, SourceKind};
use crate::safetensors::{Entry, Header};
use crate::tensor_index::{Place, Span, TensorInfo};
use crate::text::TextAssets;

pub(crate) fn is_bundle(path: &Path) -> bool {
    path.join(MANIFEST).symlink_metadata().is_ok()
}

/// Reads the manifest of a bundle's directory.
pub(crate) fn manifest(folder: &Folder) -> Result<Manifest, StoreError> {
    let bytes = folder.read(MANIFEST, MAX_INDEX)?.ok_or_else(|| StoreError::NotAModel {
        path: folder.path().to_owned(),
        reason: format!("no {MANIFEST}"),
    })?;
    Manifest::parse(&bytes).map_err(|fault| fault.in_file(&folder.path().join(MANIFEST)))
}

pub(crate) fn open(path: &Path) -> Result<Parts, StoreError> {
    let folder = Folder::open(path)?;
    let manifest = manifest(&folder)?;
    let manifest_path = path.join(MANIFEST);
    let mut files = Vec::new();
    let mut tensors = Vec::new();
    let mut hashes = BTreeMap::new();
    for segment in &manifest.segments {
        let id =
            segment.segment().map_err(|reason| Fault::new("segments", reason).in_file(&manifest_path))?;
        let file = folder.resolve(&manifest_path, &format!("segment {id}: file"), &segment.file)?;
        let mapping = Mapping::open(&file)?;
        let read = || read_segment(segment, &mapping, files.len(), "import the model again");
        let mut found = mapping.sparsely(read).map_err(|fault| fault.in_file(&file))?;
        for (info, _) in &mut found {
            // The manifest decides, not the tensor's name: bundles may be divided differently in the future.
            info.segment = id;
        }
        tensors.extend(found);
        hashes.insert(id, segment.hash.clone());
        files.push(mapping);
    }
    let config = folder.read_object("config.json", MAX_JSON)?.ok_or_else(|| StoreError::NotAModel {
        path: path.to_owned(),
        reason: "config.json is missing; import the model again".into(),
    })?;
    Ok(Parts {
        path: path.to_owned(),
        source: SourceKind::Bundle,
        config,
        text: TextAssets::read(&folder)?,
        files,
        tensors,
        quantization: manifest.quantization,
        packed: BTreeMap::new(),
        hashes,
    })
}

/// Finds the tensors of a segment in its file and checks that the file has no others. `remedy` tells in errors what to do.
pub(crate) fn read_segment(
    segment: &ManifestSegment,
    mapping: &Mapping,
    file: usize,
    remedy: &str,
) -> Result<Vec<(TensorInfo, Place)>, Fault> {
    let length = mapping.bytes().len();
    if length as u64 != segment.bytes {
        return Err(Fault::new(
            "file",
            format!("{length} bytes, but the manifest says {}; {remedy}", segment.bytes),
        ));
    }
    let header = Header::parse(mapping.bytes())?;
    let mut entries: HashMap<&str, &Entry> =
        header.entries.iter().map(|entry| (entry.name.as_str(), entry)).collect();
    let mut tensors = Vec::with_capacity(segment.tensors.len());
    for tensor in &segment.tensors {
        let encoding = tensor.encoding;
        let wrong_shape = |reason| Fault::new(format!("tensor {:?}: shape", tensor.name), reason);
        let (dtype, shape) = encoding.storage(&tensor.shape).map_err(wrong_shape)?;
        let data = take(&mut entries, &tensor.name, dtype, &shape, file, remedy)?;
        let scales = match encoding.scales_storage(&tensor.shape).map_err(wrong_shape)? {
            Some(shape) => Some(take(
                &mut entries,
                &format!("{}{SCALES}", tensor.name),
                Dtype::F16,
                &shape,
                file,
                remedy,
            )?),
            None => None,
        };
        tensors.push((
            info(tensor.name.clone(), tensor.shape.clone(), encoding, data, scales),
            Place { data, scales },
        ));
    }
    match entries.keys().find(|name| !name.starts_with(PADDING)) {
        Some(stray) => Err(Fault::new(format!("tensor {stray:?}"), format!("not in the manifest; {remedy}"))),
        None => Ok(tensors),
    }
}

fn info(name: String, shape: Vec<usize>, encoding: Encoding, data: Span, scales: Option<Span>) -> TensorInfo {
    let bytes = (data.len + scales.map_or(0, |scales| scales.len)) as u64;
    TensorInfo { segment: crate::SegmentId::from_tensor_name(&name), name, shape, encoding, bytes }
}

fn take(
    entries: &mut HashMap<&str, &Entry>,
    name: &str,
    dtype: Dtype,
    shape: &[usize],
    file: usize,
    remedy: &str,
) -> Result<Span, Fault> {
    let field = format!("tensor {name:?}");
    let Some(entry) = entries.remove(name) else {
        return Err(Fault::new(field, format!("in the manifest but not in the file; {remedy}")));
    };
    if entry.dtype != dtype || entry.shape != shape {
        return Err(Fault::new(
            field,
            format!(
                "{} {:?}, but the manifest means {dtype} {:?}",
                entry.dtype,
                Shape(&entry.shape),
                Shape(shape)
            ),
        ));
    }
    Ok(Span { file, start: entry.start, len: entry.len })
}
