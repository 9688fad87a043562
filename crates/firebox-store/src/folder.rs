//! A model's directory: bounded reads of files that lie inside of it.

use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Component, Path, PathBuf};

use serde_json::Value;

use crate::error::{Fault, StoreError};
use crate::excerpt::Excerpt;
use crate::files::File;

/// Limits on the small files beside the weights. The largest tokenizers in use take 35 MB.
pub(crate) const MAX_JSON: u64 = 16 << 20;
pub(crate) const MAX_TOKENIZER: u64 = 256 << 20;
pub(crate) const MAX_TEMPLATE: u64 = 4 << 20;
/// An index has one line per tensor, so it is bounded like a safetensors header.
pub(crate) const MAX_INDEX: u64 = 100_000_000;

/// A directory whose files are read only if they lie inside of it.
#[derive(Debug, Clone)]
pub(crate) struct Folder {
    path: PathBuf,
    /// The directory that files must lie in after links are resolved.
    within: PathBuf,
}

impl Folder {
    pub(crate) fn open(path: &Path) -> Result<Self, StoreError> {
        let real = fs::canonicalize(path).map_err(|error| StoreError::io(path, "open", error))?;
        // The hub's cache links `models--ORG--NAME/snapshots/REVISION/FILE` to `models--ORG--NAME/blobs/HASH`, so there the
        // repository, not the snapshot, is the model's own directory.
        let is_repository = |path: &&Path| {
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("models--"))
        };
        let repository = real
            .ancestors()
            .skip(1)
            .find(|ancestor| ancestor.ends_with("snapshots"))
            .and_then(Path::parent)
            .filter(is_repository);
        let within = repository.unwrap_or(&real).to_owned();
        Ok(Self { path: path.to_owned(), within })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The path of a regular file in the folder, or `None` if there is none. Refuses links that lead out of the folder, and
    /// pipes and devices, which could block forever.
    pub(crate) fn find(&self, name: &str) -> Result<Option<PathBuf>, StoreError> {
        let path = self.path.join(name);
        match fs::symlink_metadata(&path) {
            Ok(_) => {}
            // A name that is too long cannot exist.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::InvalidFilename) => {
                return Ok(None);
            }
            Err(error) => return Err(StoreError::io(&path, "look up", error)),
        }
        let real = fs::canonicalize(&path).map_err(|error| StoreError::io(&path, "follow", error))?;
        if !real.starts_with(&self.within) {
            return Err(StoreError::UnsafePath {
                field: "symbolic link".into(),
                reason: format!("it lies outside of {}; copy the file there", self.within.display()),
                target: real,
                file: path,
            });
        }
        regular(&path)?;
        Ok(Some(path))
    }

    /// Checks a file name given by another file: it must be a path of plain components below the folder.
    pub(crate) fn resolve(&self, referrer: &Path, field: &str, name: &str) -> Result<PathBuf, StoreError> {
        let unsafe_path = |reason: &str| StoreError::UnsafePath {
            file: referrer.to_owned(),
            field: field.to_owned(),
            target: PathBuf::from(name),
            reason: reason.to_owned(),
        };
        let plain = !name.is_empty()
            && !name.contains(['\\', '\0'])
            && Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
        if !plain {
            return Err(unsafe_path("a file of the model is named by a plain path inside of its directory"));
        }
        self.find(name)?.ok_or_else(|| StoreError::Malformed {
            file: referrer.to_owned(),
            field: field.to_owned(),
            reason: format!(
                "names {:?}, which is not in {}; download it again",
                Excerpt(name),
                self.path.display()
            ),
        })
    }

    /// The bytes of a small file, or None if there is none.
    pub(crate) fn read(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>, StoreError> {
        self.find(name)?.map(|path| read_bounded(&path, limit)).transpose()
    }

    /// The text of a small file, or None if there is none.
    pub(crate) fn read_text(&self, name: &str, limit: u64) -> Result<Option<String>, StoreError> {
        let Some(bytes) = self.read(name, limit)? else { return Ok(None) };
        let text = String::from_utf8(bytes).map_err(|error| StoreError::Malformed {
            file: self.path.join(name),
            field: "text".into(),
            reason: format!("not UTF-8: {error}"),
        })?;
        Ok(Some(text))
    }

    /// The JSON object in a small file, or None if there is no file.
    pub(crate) fn read_object(&self, name: &str, limit: u64) -> Result<Option<Value>, StoreError> {
        let Some(mut bytes) = self.read(name, limit)? else { return Ok(None) };
        let malformed = |fault: Fault| fault.in_file(&self.path.join(name));
        let value: Value = serde_json::from_slice(&bytes)
            .or_else(|_| {
                infinities_as_null(&mut bytes);
                serde_json::from_slice(&bytes)
            })
            .map_err(|error| malformed(Fault::json("JSON", &error)))?;
        if !value.is_object() {
            return Err(malformed(Fault::new("JSON", "expected an object")));
        }
        Ok(Some(value))
    }
}

/// Replaces infinite numbers by null: Python writes them as a word that JSON does not have.
fn infinities_as_null(json: &mut [u8]) {
    const WORD: &[u8; 8] = b"Infinity";
    let (mut at, mut quoted) = (0, false);
    while let Some(byte) = json.get(at) {
        match byte {
            b'"' => quoted = !quoted,
            b'\\' if quoted => at += 1,
            b'I' if !quoted && json[at..].starts_with(WORD) => {
                json[at..][..WORD.len()].copy_from_slice(b"null    ");
            }
            _ => {}
        }
        at += 1;
    }
}

/// Refuses what is not a regular file.
pub(crate) fn regular(path: &Path) -> Result<fs::Metadata, StoreError> {
    let metadata = fs::metadata(path).map_err(|error| StoreError::io(path, "look up", error))?;
    if !metadata.is_file() {
        return Err(StoreError::NotAModel {
            path: path.to_owned(),
            reason: "expected a regular file here".into(),
        });
    }
    Ok(metadata)
}

fn read_bounded(path: &Path, limit: u64) -> Result<Vec<u8>, StoreError> {
    let file = File::open(path).map_err(|error| StoreError::io(path, "open", error))?;
    let mut bytes = Vec::new();
    // One byte beyond the limit tells a file that is too long from one that just fits, whatever length it claims.
    file.take(limit + 1).read_to_end(&mut bytes).map_err(|error| StoreError::io(path, "read", error))?;
    if bytes.len() as u64 > limit {
        return Err(StoreError::Malformed {
            file: path.to_owned(),
            field: "file".into(),
            reason: format!("longer than the {limit} bytes allowed for it"),
        });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infinite_numbers_are_null_and_texts_are_kept() {
        let mut json =
            br#"{"a": [0, Infinity], "Infinity": "\"Infinity", "b": "\\", "c": Infinity}"#.to_vec();
        infinities_as_null(&mut json);
        let expected = serde_json::json!({"a": [0, null], "Infinity": "\"Infinity", "b": "\\", "c": null});
        assert_eq!(serde_json::from_slice::<Value>(&json).unwrap(), expected);
        let mut short = b"Infin".to_vec();
        infinities_as_null(&mut short);
        assert_eq!(short, b"Infin");
    }
}
