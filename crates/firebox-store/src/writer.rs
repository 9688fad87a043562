//! Writes a safetensors file whose tensors start on multiples of 64 bytes, hashed as it is written.

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

/// Where tensors start: a cache line, which is also the widest vector register.
pub(crate) const ALIGNMENT: usize = 64;

/// The tensors a file will have, in order.
#[derive(Debug)]
pub(crate) struct Plan {
    /// What the file is called in the names of its padding.
    label: String,
    header: Map<String, Value>,
    /// Bytes of each tensor and whether it is padding.
    slots: Vec<(usize, bool)>,
    end: usize,
    paddings: usize,
}

impl Plan {
    pub(crate) fn new(label: impl Display) -> Self {
        Self { label: label.to_string(), header: Map::new(), slots: Vec::new(), end: 0, paddings: 0 }
    }

    /// The same, with texts beside the tensors.
    pub(crate) fn with_metadata(mut self, metadata: &BTreeMap<String, String>) -> Self {
        self.header.insert(METADATA.into(), json!(metadata));
        self
    }

    /// Adds a tensor, and before it what brings it to a multiple of 64 bytes. Readers reject a hole between two
    /// tensors, so the space in between is a tensor as well.
    pub(crate) fn push(&mut self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<(), String> {
        let bytes = Encoding::Plain(dtype).data_bytes(shape)?;
        let padding = self.end.next_multiple_of(ALIGNMENT) - self.end;
        if padding > 0 {
            // With the label in its name: tools that read all segments as one model want names to differ.
            let name = format!("{PADDING}{}_{}", self.label, self.paddings);
            self.paddings += 1;
            self.slot(&name, Dtype::U8, &[padding], padding, true)?;
        }
        self.slot(name, dtype, shape, bytes, false)
    }

    /// Adds a tensor in the encoding it is stored in, and its scales where it has some.
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

    /// The length, the header, and spaces up to where the data begins.
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

/// Writes the tensors of a plan one after another.
pub(crate) struct TensorWriter {
    path: PathBuf,
    /// Absent where only the hash of such a file is asked for.
    file: Option<File>,
    hasher: blake3::Hasher,
    slots: std::vec::IntoIter<(usize, bool)>,
    /// Bytes that the tensor being written still lacks.
    lacking: usize,
    written: u64,
}

impl TensorWriter {
    pub(crate) fn create(path: &Path, plan: Plan) -> Result<Self, StoreError> {
        let file = File::create_new(path).map_err(|error| StoreError::io(path, "create", error))?;
        Self::filling(path, file, plan)
    }

    /// The same, in a file that has nothing in it yet.
    pub(crate) fn filling(path: &Path, file: File, plan: Plan) -> Result<Self, StoreError> {
        Self::begin(path, Some(file), plan)
    }

    /// Writes nothing, and so finds out the hash that the file would have.
    pub(crate) fn hashing(path: &Path, plan: Plan) -> Result<Self, StoreError> {
        Self::begin(path, None, plan)
    }

    fn begin(path: &Path, file: Option<File>, plan: Plan) -> Result<Self, StoreError> {
        let head = plan.head();
        let mut writer = Self {
            path: path.to_owned(),
            file,
            hasher: blake3::Hasher::new(),
            slots: plan.slots.into_iter(),
            lacking: 0,
            written: 0,
        };
        writer.put(&head)?;
        Ok(writer)
    }

    /// Goes on to the plan's next tensor, filling the space before it.
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
            // Padding is shorter than the alignment it brings about.
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

    /// The hash of what has been written so far.
    pub(crate) fn hash(&self) -> blake3::Hash {
        self.hasher.finalize()
    }

    /// Makes the file durable; gives its length and its hash.
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
