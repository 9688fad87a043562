//! A directory as the Hugging Face hub has it.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use serde_json::Value;

use crate::catalog::{Place, Span, TensorInfo};
use crate::checkpoint::{Parts, SourceKind};
use crate::encoding::Encoding;
use crate::error::{Fault, StoreError};
use crate::excerpt::Excerpt;
use crate::folder::{Folder, MAX_INDEX, MAX_JSON};
use crate::manifest::PADDING;
use crate::mapping::Mapping;
use crate::safetensors::Header;
use crate::segment::SegmentId;
use crate::text::TextAssets;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

pub(crate) fn open(path: &Path) -> Result<Parts, StoreError> {
    let folder = Folder::open(path)?;
    let mut files = Vec::new();
    let mut tensors = Vec::new();
    if let Some(single) = folder.find(SINGLE)? {
        add_file(&single, &mut files, &mut tensors)?;
    } else if let Some(index) = folder.read_object(INDEX, MAX_INDEX)? {
        add_shards(&folder, &index, &mut files, &mut tensors)?;
    } else {
        return Err(StoreError::NotAModel { path: path.to_owned(), reason: what_is_there(path) });
    }
    let config = folder.read_object("config.json", MAX_JSON)?.ok_or_else(|| StoreError::NotAModel {
        path: path.to_owned(),
        reason: "config.json is missing; download it beside the weights".into(),
    })?;
    Ok(Parts {
        path: path.to_owned(),
        source: SourceKind::HuggingFace,
        config,
        text: TextAssets::read(&folder)?,
        files,
        tensors,
        quantization: None,
        hashes: BTreeMap::new(),
    })
}

fn add_file(
    path: &Path,
    files: &mut Vec<Mapping>,
    tensors: &mut Vec<(TensorInfo, Place)>,
) -> Result<(), StoreError> {
    let mapping = Mapping::open(path)?;
    let header = Header::parse(mapping.bytes()).map_err(|fault| fault.in_file(path))?;
    let file = files.len();
    // A bundle without its manifest is such a directory, and the space between its tensors is none of them.
    let entries = header.entries.into_iter().filter(|entry| !entry.name.starts_with(PADDING));
    tensors.extend(entries.map(|entry| {
        let info = TensorInfo {
            segment: SegmentId::of(&entry.name),
            name: entry.name,
            shape: entry.shape,
            encoding: Encoding::Plain(entry.dtype),
            bytes: entry.len as u64,
        };
        (info, Place { data: Span { file, start: entry.start, len: entry.len }, scales: None })
    }));
    files.push(mapping);
    Ok(())
}

fn add_shards(
    folder: &Folder,
    index: &Value,
    files: &mut Vec<Mapping>,
    tensors: &mut Vec<(TensorInfo, Place)>,
) -> Result<(), StoreError> {
    let index_path = folder.path().join(INDEX);
    let malformed = |field: String, reason: String| Fault::new(field, reason).in_file(&index_path);
    let map = index.get("weight_map").and_then(Value::as_object).ok_or_else(|| {
        malformed("weight_map".into(), "expected an object of tensor names to files".into())
    })?;

    // Tensors by shard, so that each is opened once and then asked for all that it should have.
    let mut shards: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (tensor, file) in map.iter().filter(|(tensor, _)| !tensor.starts_with(PADDING)) {
        let file = file.as_str().ok_or_else(|| {
            malformed(
                format!("weight_map.{tensor}"),
                format!("expected a file name, found {:?}", Excerpt(&file.to_string())),
            )
        })?;
        shards.entry(file).or_default().push(tensor);
    }
    for (shard, expected) in shards {
        let path = folder.resolve(&index_path, "weight_map", shard)?;
        let before = tensors.len();
        add_file(&path, files, tensors)?;
        let stored: HashMap<&str, ()> =
            tensors[before..].iter().map(|(info, _)| (info.name.as_str(), ())).collect();
        if let Some(missing) = expected.into_iter().find(|tensor| !stored.contains_key(tensor)) {
            return Err(malformed(
                format!("weight_map.{missing}"),
                format!("said to be in {:?}, which does not have it; download both again", Excerpt(shard)),
            ));
        }
    }
    Ok(())
}

/// Why a directory could not be opened, in view of what people often have instead.
fn what_is_there(path: &Path) -> String {
    let mut reason = format!("no {SINGLE}, {INDEX} or firebox.json");
    let names: Vec<String> = std::fs::read_dir(path)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    if let Some(gguf) = names.iter().find(|name| name.ends_with(".gguf")) {
        reason.push_str(&format!("; give the path of the GGUF file itself ({gguf})"));
    } else if names.iter().any(|name| name.ends_with(".bin") || name.ends_with(".pth")) {
        reason.push_str(
            "; the weights are in PyTorch's format, which can run code: convert them to safetensors",
        );
    }
    reason
}
