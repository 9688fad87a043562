//! Opening GGUF models: one file, the parts of a split one, or a folder that holds either.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::metadata::Metadata;
use super::reader::{Entry, Header};
use super::split_name::SplitName;
use super::{Model, text};
use crate::error::{Fault, StoreError};
use crate::mapping::Mapping;
use crate::parts::{Parts, SourceKind};
use crate::text::TextAssets;

/// What a file is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To run: everything has to be there.
    Model,
    /// To tokenize: a vocabulary is enough.
    Text,
    /// To import: packed weights may be there.
    Import,
    /// To list its tensors: packed weights may be there, and a vocabulary is enough.
    Listing,
}

/// Opens a file and, if it is part of a split model, the others beside it.
pub(crate) fn open(path: &Path, purpose: Purpose) -> Result<Parts, StoreError> {
    let mapping = Mapping::open(path)?;
    if !mapping.bytes().starts_with(b"GGUF") {
        let hint = match path.extension().and_then(|extension| extension.to_str()) {
            Some("safetensors") => {
                "; give the directory of a safetensors file, which has config.json beside it"
            }
            _ => "",
        };
        return Err(StoreError::NotAModel {
            path: path.to_owned(),
            reason: format!("neither a directory nor a GGUF file{hint}"),
        });
    }
    let header = Header::parse(mapping.bytes()).map_err(|fault| fault.in_file(path))?;
    refuse_projector(path, &header.metadata).map_err(|reason| not_a_model(path, reason))?;
    let (files, metadata, entries) = gather(path, mapping, header)?;
    let first = files.first().map_or(path, Mapping::path).to_owned();
    let parts = |config, text, files, tensors| Parts {
        path: first.clone(),
        source: SourceKind::Gguf,
        config,
        text,
        files,
        tensors,
        quantization: None,
        packed: BTreeMap::new(),
        hashes: BTreeMap::new(),
    };
    if entries.is_empty() && metadata.get("tokenizer.ggml.model").is_some() {
        if matches!(purpose, Purpose::Model | Purpose::Import) {
            let reason = "a vocabulary without weights; `firebox tokenize` takes it, and everything else needs the \
                          model's own file";
            return Err(not_a_model(path, reason.into()));
        }
        let (config, text) = vocabulary_only(&metadata).map_err(|fault| fault.in_file(path))?;
        return Ok(parts(config, text, files, Vec::new()));
    }
    let bytes: Vec<&[u8]> = files.iter().map(Mapping::bytes).collect();
    let model = Model::translate(&metadata, entries, &bytes).map_err(|fault| fault.in_file(&first))?;
    Ok(parts(model.config, model.text, files, model.tensors))
}

/// The mapped files of a model, the metadata of the first, and all tensors, each with the index of its file.
type Gathered = (Vec<Mapping>, Metadata, Vec<(usize, Entry)>);

/// Collects the parts of a split model. A file that is not split is all of its model.
fn gather(path: &Path, mapping: Mapping, header: Header) -> Result<Gathered, StoreError> {
    let count = header.metadata.uniform("split.count").map_err(|fault| fault.in_file(path))?.unwrap_or(1);
    if count <= 1 {
        let entries = header.entries.into_iter().map(|entry| (0, entry)).collect();
        return Ok((vec![mapping], header.metadata, entries));
    }
    let named = SplitName::of(path).filter(|name| name.count as u64 == count).ok_or_else(|| {
        let reason =
            format!("{count} parts; name them like model-00001-of-{count:05}.gguf, as they were published");
        Fault::new("split.count", reason).in_file(path)
    })?;
    let mut given = Some((mapping, header));
    let (mut files, mut entries, mut first) = (Vec::new(), Vec::new(), None);
    for part in 1..=named.count {
        let beside = named.beside(path, part);
        let (mapping, header) = match given.take_if(|_| part == named.part) {
            Some(given) => given,
            None => {
                if fs::metadata(&beside).is_err() {
                    let reason = format!(
                        "part {part} of {count} of the model of {} is missing; download it into that folder",
                        path.display()
                    );
                    return Err(not_a_model(&beside, reason));
                }
                let mapping = Mapping::open(&beside)?;
                let header = Header::parse(mapping.bytes()).map_err(|fault| fault.in_file(&beside))?;
                (mapping, header)
            }
        };
        check_part(&header.metadata, part, count).map_err(|fault| fault.in_file(&beside))?;
        entries.extend(header.entries.into_iter().map(|entry| (part - 1, entry)));
        files.push(mapping);
        first.get_or_insert(header.metadata);
    }
    let metadata = first.unwrap_or_default();
    let stated = metadata.uniform("split.tensors.count").map_err(|fault| fault.in_file(path))?;
    if let Some(stated) = stated.filter(|stated| *stated != entries.len() as u64) {
        let reason =
            format!("{stated} tensors, but the {count} parts have {}; download them again", entries.len());
        return Err(Fault::new("split.tensors.count", reason).in_file(files[0].path()));
    }
    Ok((files, metadata, entries))
}

/// Checks that a part's metadata agrees with its name.
fn check_part(metadata: &Metadata, part: usize, count: u64) -> Result<(), Fault> {
    let stated = (metadata.uniform("split.no")?, metadata.uniform("split.count")?);
    if stated == (Some(part as u64 - 1), Some(count)) {
        return Ok(());
    }
    let (no, of) = (stated.0.map_or(0, |no| no.saturating_add(1)), stated.1.unwrap_or(0));
    Err(Fault::new(
        "split.no",
        format!("part {no} of {of}, but its name says {part} of {count}; download it again"),
    ))
}

/// The configuration and the text files of a file without tensors.
fn vocabulary_only(metadata: &Metadata) -> Result<(serde_json::Value, TextAssets), Fault> {
    let text = text(metadata)?;
    let id = |name: &str| metadata.id(&format!("tokenizer.ggml.{name}_token_id"));
    let config = json!({
        "model_type": metadata.text("general.architecture")?,
        "bos_token_id": id("bos")?,
        "eos_token_id": id("eos")?,
        "pad_token_id": id("padding")?,
        "firebox": {"source": "gguf"},
    });
    Ok((config, text))
}

fn not_a_model(path: &Path, reason: String) -> StoreError {
    StoreError::NotAModel { path: path.to_owned(), reason }
}

/// Whether a file holds the vision or audio projector of a multimodal model.
fn is_projector(metadata: &Metadata) -> bool {
    let is = |key, expected| metadata.text(key).ok().flatten() == Some(expected);
    is("general.type", "mmproj") || is("general.architecture", "clip")
}

/// Returns an error that names the model to open instead if a file is a projector.
fn refuse_projector(path: &Path, metadata: &Metadata) -> Result<(), String> {
    if !is_projector(metadata) {
        return Ok(());
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let models = candidates(folder).models;
    let instead = if models.is_empty() {
        "the model's own GGUF file, which is not beside it".to_owned()
    } else {
        models.iter().map(|model| model.display().to_string()).collect::<Vec<_>>().join(" or ")
    };
    Err(format!(
        "the projector of a multimodal model's images or sound (mmproj), not a model; open {instead}"
    ))
}

/// The GGUF files of a folder.
#[derive(Default)]
struct Candidates {
    /// Models; of split ones the first part, or the first that is there.
    models: Vec<PathBuf>,
    /// Projectors of multimodal models.
    projectors: Vec<PathBuf>,
}

fn candidates(folder: &Path) -> Candidates {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "gguf") && path.is_file());
    paths.sort();
    let (mut found, mut split) = (Candidates::default(), BTreeSet::new());
    for path in paths {
        if let Some(name) = SplitName::of(&path)
            && !split.insert(name.name(1))
        {
            continue;
        }
        // A file that cannot be read is a model until someone opens it and is told what is wrong.
        let header = Mapping::open(&path).ok().and_then(|mapping| Header::parse(mapping.bytes()).ok());
        match header.is_some_and(|header| is_projector(&header.metadata)) {
            true => found.projectors.push(path),
            false => found.models.push(path),
        }
    }
    found
}

/// The GGUF model of a folder; `None` if the folder has no GGUF files.
pub(crate) fn in_folder(folder: &Path) -> Result<Option<PathBuf>, StoreError> {
    let mut found = candidates(folder);
    match (found.models.len(), found.projectors.as_slice()) {
        (1, _) => Ok(found.models.pop()),
        (0, []) => Ok(None),
        (0, projectors) => {
            let names: Vec<String> = projectors.iter().map(|path| file_name(path)).collect();
            let reason = format!(
                "{} is the projector of a multimodal model's images or sound (mmproj); download the model's own GGUF \
                 file too",
                names.join(", ")
            );
            Err(not_a_model(folder, reason))
        }
        (count, _) => {
            let names: Vec<String> = found.models.iter().map(|path| file_name(path)).collect();
            let reason =
                format!("{count} models; give the path of the GGUF file itself: {}", names.join(", "));
            Err(not_a_model(folder, reason))
        }
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
