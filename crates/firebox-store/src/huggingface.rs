//! Directories in the layout of the Hugging Face hub.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use serde::de::{IgnoredAny, MapAccess};

use crate::encoding::Encoding;
use crate::error::{Fault, StoreError};
use crate::excerpt::Excerpt;
use crate::folder::{Folder, MAX_INDEX, MAX_JSON};
use crate::json::{Ignored, Json, Object};
use crate::manifest::PADDING;
use crate::mapping::Mapping;
use crate::parts::{Parts, SourceKind};
use crate::safetensors::Header;
use crate::segment::SegmentId;
use crate::tensor_index::{Place, Span, TensorInfo};
use crate::text::TextAssets;
use crate::{expert_stacks, own_names, packed};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Whether a directory has safetensors files that [`open`] looks for.
pub(crate) fn has_weights(path: &Path) -> Result<bool, StoreError> {
    let folder = Folder::open(path)?;
    Ok(folder.find(SINGLE)?.is_some() || folder.find(INDEX)?.is_some())
}

pub(crate) fn open(path: &Path) -> Result<Parts, StoreError> {
    let folder = Folder::open(path)?;
    let mut files = Vec::new();
    let mut tensors = Vec::new();
    if let Some(single) = folder.find(SINGLE)? {
        add_file(&single, &mut files, &mut tensors)?;
    } else if let Some(index) = folder.read(INDEX, MAX_INDEX)? {
        add_shards(&folder, &index, &mut files, &mut tensors)?;
    } else {
        return Err(StoreError::NotAModel { path: path.to_owned(), reason: what_is_there(path) });
    }
    let config = folder.read_object("config.json", MAX_JSON)?.ok_or_else(|| StoreError::NotAModel {
        path: path.to_owned(),
        reason: "config.json is missing; download it beside the weights".into(),
    })?;
    own_names::rename(&config, &mut tensors);
    let mut packed = packed::find(&config, &files, &mut tensors)
        .map_err(|fault| fault.in_file(&folder.path().join("config.json")))?;
    let tensors =
        expert_stacks::divide(&config, tensors, &mut packed).map_err(|fault| fault.in_file(path))?;
    Ok(Parts {
        path: path.to_owned(),
        source: SourceKind::HuggingFace,
        config,
        text: TextAssets::read(&folder)?,
        files,
        tensors,
        quantization: None,
        packed,
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
    // A bundle without its manifest is such a directory; its padding tensors are not part of the model.
    let entries = header.entries.into_iter().filter(|entry| !entry.name.starts_with(PADDING));
    tensors.extend(entries.map(|entry| {
        let info = TensorInfo {
            segment: SegmentId::from_tensor_name(&entry.name),
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

/// The parts of an index that are needed.
#[derive(Default)]
struct Index {
    files: Option<Files>,
}

/// The file of each tensor, or the first entry whose value is not a file name, with that value.
#[derive(Default)]
struct Files {
    by_tensor: BTreeMap<String, String>,
    wrong: Option<(String, String)>,
}

impl Object for Index {
    fn read<'de, A: MapAccess<'de>>(mut entries: A) -> Result<Self, A::Error> {
        let mut index = Self::default();
        while let Some(name) = entries.next_key::<String>()? {
            if name != "weight_map" {
                entries.next_value::<IgnoredAny>()?;
            } else if let Json::Object(files) = entries.next_value()? {
                index.files = Some(files);
            }
        }
        Ok(index)
    }
}

impl Object for Files {
    fn read<'de, A: MapAccess<'de>>(mut entries: A) -> Result<Self, A::Error> {
        let mut files = Self::default();
        while let Some(tensor) = entries.next_key::<String>()? {
            match entries.next_value::<Json<Ignored>>()? {
                _ if tensor.starts_with(PADDING) => {}
                Json::Text(file) => _ = files.by_tensor.insert(tensor, file),
                other if files.wrong.is_none() => files.wrong = Some((tensor, other.into_json_text())),
                _ => {}
            }
        }
        Ok(files)
    }
}

fn add_shards(
    folder: &Folder,
    index: &[u8],
    files: &mut Vec<Mapping>,
    tensors: &mut Vec<(TensorInfo, Place)>,
) -> Result<(), StoreError> {
    let index_path = folder.path().join(INDEX);
    let malformed =
        |field: &str, reason: &str| Fault::new(field.to_owned(), reason.to_owned()).in_file(&index_path);
    let index: Json<Index> =
        serde_json::from_slice(index).map_err(|error| Fault::json("JSON", &error).in_file(&index_path))?;
    let Json::Object(index) = index else { return Err(malformed("JSON", "expected an object")) };
    let Some(map) = index.files else {
        return Err(malformed("weight_map", "expected an object of tensor names to files"));
    };
    if let Some((tensor, found)) = map.wrong {
        let reason = format!("expected a file name, found {:?}", Excerpt(&found));
        return Err(malformed(&format!("weight_map.{tensor}"), &reason));
    }

    // Tensors grouped by shard, so that each shard is opened once and checked for all of its tensors.
    let mut shards: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (tensor, file) in &map.by_tensor {
        shards.entry(file).or_default().push(tensor);
    }
    for (shard, expected) in shards {
        let path = folder.resolve(&index_path, "weight_map", shard)?;
        let before = tensors.len();
        add_file(&path, files, tensors)?;
        let stored: HashMap<&str, ()> =
            tensors[before..].iter().map(|(info, _)| (info.name.as_str(), ())).collect();
        if let Some(missing) = expected.into_iter().find(|tensor| !stored.contains_key(tensor)) {
            let reason =
                format!("said to be in {:?}, which does not have it; download both again", Excerpt(shard));
            return Err(malformed(&format!("weight_map.{missing}"), &reason));
        }
    }
    Ok(())
}

/// The reason why a directory could not be opened, with hints for common mistakes.
fn what_is_there(path: &Path) -> String {
    let mut reason = format!("no {SINGLE}, {INDEX} or firebox.json");
    let names: Vec<String> = std::fs::read_dir(path)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    if names.iter().any(|name| name.ends_with(".bin") || name.ends_with(".pth")) {
        reason.push_str(
            "; the weights are in PyTorch's format, which can run code: convert them to safetensors",
        );
    }
    reason
}
