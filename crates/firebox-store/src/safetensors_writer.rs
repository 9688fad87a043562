//! A writer of safetensors files whose tensors start on multiples of 64 bytes. It hashes the file as it writes.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::encoding::{Dtype, Encoding, element_count};
use crate::error::StoreError;
use crate::excerpt::Shape;
use crate::files::File;
use crate::manifest::{PADDING, SCALES};
use crate::safetensors::{LENGTH_BYTES, METADATA};

/// The alignment of tensors: a cache line, which is also the widest vector register.
pub(crate) const ALIGNMENT: usize = 64;

/// The tensors of a file to be written, in order.
#[derive(Debug)]
pub(crate) struct FileLayout {
    /// A label in the names of the file's padding tensors.
    label: String,
    header: Map<String, Value>,
    /// Bytes of each tensor, and whether it is padding.
    slots: Vec<(usize, bool)>,
    end: usize,
    paddings: usize,
    alignment: usize,
}

impl FileLayout {
    pub(crate) fn new(label: impl Display) -> Self {
        Self {
            label: label.to_string(),
            header: Map::new(),
            slots: Vec::new(),
            end: 0,
            paddings: 0,
            alignment: ALIGNMENT,
        }
    }

    /// Leaves no space between tensors.
    pub(crate) fn without_padding(self) -> Self {
        Self { alignment: 1, ..self }
    }

    /// Creates a plan with metadata texts.
    pub(crate) fn with_metadata(mut self, metadata: &BTreeMap<String, String>) -> Self {
        self.header.insert(METADATA.into(), json!(metadata));
        self
    }

    /// Adds a tensor, preceded by padding up to a multiple of 64 bytes. Readers reject gaps between tensors, so the padding is
    /// itself a tensor.
    pub(crate) fn push(&mut self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<(), String> {
        let bytes = Encoding::Plain(dtype).data_bytes(shape)?;
        let padding = self.end.next_multiple_of(self.alignment) - self.end;
        if padding > 0 {
            // The label keeps names distinct across segments, which tools load as one model.
            let name = format!("{PADDING}{}_{}", self.label, self.paddings);
            self.paddings += 1;
            self.slot(&name, Dtype::U8, &[padding], padding, true)?;
        }
        self.slot(name, dtype, shape, bytes, false)
    }

    /// Adds a tensor in its stored encoding, followed by its scales if it has any.
    pub(crate) fn push_encoded(
        &mut self,
        name: &str,
        shape: &[usize],
        encoding: Encoding,
    ) -> Result<(), String> {
        if element_count(shape).is_none() {
            return Err(format!("shape {:?} overflows", Shape(shape)));
        }
        let (dtype, stored) = encoding.storage(shape)?;
        self.push(name, dtype, &stored)?;
        if let Some(shape) = encoding.scales_storage(shape)? {
            self.push(&format!("{name}{SCALES}"), Dtype::F16, &shape)?;
        }
        Ok(())
    }

    fn slot(
        &mut self,
        name: &str,
        dtype: Dtype,
        shape: &[usize],
        bytes: usize,
        padding: bool,
    ) -> Result<(), String> {
        let end = self.end.checked_add(bytes).ok_or("the file is larger than the address space")?;
        let entry = json!({"dtype": dtype.name(), "shape": shape, "data_offsets": [self.end, end]});
        if self.header.insert(name.to_owned(), entry).is_some() {
            return Err("the name is taken by another tensor of the file".into());
        }
        self.slots.push((bytes, padding));
        self.end = end;
        Ok(())
    }

    /// The length, the header, and spaces up to the beginning of the data.
    fn head(&self) -> Vec<u8> {
        let header = Value::Object(self.header.clone()).to_string();
        let data_start = (LENGTH_BYTES + header.len()).next_multiple_of(ALIGNMENT);
        let length = (data_start - LENGTH_BYTES) as u64;
        let mut head = Vec::with_capacity(data_start);
        head.extend_from_slice(&length.to_le_bytes());
        head.extend_from_slice(header.as_bytes());
        head.resize(data_start, b' ');
        head
    }
}

/// Writes the tensors of a plan in order.
pub(crate) struct TensorWriter {
    path: PathBuf,
    /// `None` if only the hash of such a file is wanted.
    file: Option<File>,
    hasher: blake3::Hasher,
    slots: std::vec::IntoIter<(usize, bool)>,
    /// Remaining bytes of the current tensor.
    lacking: usize,
    written: u64,
}

impl TensorWriter {
    pub(crate) fn create(path: &Path, layout: FileLayout) -> Result<Self, StoreError> {
        let file = File::create_new(path).map_err(|error| StoreError::io(path, "create", error))?;
        Self::filling(path, file, layout)
    }

    /// Writes into a given empty file.
    pub(crate) fn filling(path: &Path, file: File, layout: FileLayout) -> Result<Self, StoreError> {
        Self::begin(path, Some(file), layout)
    }

    /// Writes nothing and only computes the hash that the file would have.
    pub(crate) fn hashing(path: &Path, layout: FileLayout) -> Result<Self, StoreError> {
        Self::begin(path, None, layout)
    }

    fn begin(path: &Path, file: Option<File>, layout: FileLayout) -> Result<Self, StoreError> {
        let head = layout.head();
        let mut writer = Self {
            path: path.to_owned(),
            file,
            hasher: blake3::Hasher::new(),
            slots: layout.slots.into_iter(),
            lacking: 0,
            written: 0,
        };
        writer.put(&head)?;
        Ok(writer)
    }

    /// Advances to the plan's next tensor and fills the padding before it.
    pub(crate) fn next_tensor(&mut self) -> Result<(), StoreError> {
        if self.lacking != 0 {
            return Err(self.misfit("fewer bytes than planned"));
        }
        for (bytes, padding) in self.slots.by_ref() {
            if !padding {
                self.lacking = bytes;
                break;
            }
            let zeros = [0; ALIGNMENT];
            // Padding is shorter than the alignment.
            put(&mut self.hasher, &mut self.file, &zeros[..bytes])
                .map_err(|error| StoreError::io(&self.path, "write", error))?;
            self.written += bytes as u64;
        }
        Ok(())
    }

    /// Appends to the current tensor.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        self.lacking =
            self.lacking.checked_sub(bytes.len()).ok_or_else(|| self.misfit("more bytes than planned"))?;
        self.put(bytes)
    }

    /// The hash of everything written so far.
    pub(crate) fn hash(&self) -> blake3::Hash {
        self.hasher.finalize()
    }

    /// Makes the file durable; returns its length and its hash.
    pub(crate) fn finish(self) -> Result<(u64, String), StoreError> {
        if self.lacking != 0 || self.slots.len() != 0 {
            return Err(self.misfit("fewer bytes than planned"));
        }
        if let Some(file) = self.file {
            file.sync_all().map_err(|error| StoreError::io(&self.path, "make durable", error))?;
        }
        Ok((self.written, self.hasher.finalize().to_hex().to_string()))
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        put(&mut self.hasher, &mut self.file, bytes)
            .map_err(|error| StoreError::io(&self.path, "write", error))?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    fn misfit(&self, reason: &str) -> StoreError {
        StoreError::Malformed { file: self.path.clone(), field: "data".into(), reason: reason.into() }
    }
}

fn put(hasher: &mut blake3::Hasher, file: &mut Option<File>, bytes: &[u8]) -> std::io::Result<()> {
    hasher.update(bytes);
    file.as_mut().map_or(Ok(()), |file| file.write_all(bytes))
}
