//! Files of tensors and texts outside of models, with a hash that proves them complete.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use bytes::Bytes;

use crate::encoding::Dtype;
use crate::error::{Fault, StoreError};
use crate::excerpt::{Excerpt, Shape};
use crate::mapping::Mapping;
use crate::partial::PartialFile;
use crate::safetensors::{Entry, Header};
use crate::safetensors_writer::{FileLayout, TensorWriter};

/// The last tensor: the hash of everything before it. It is stored at the end, not in the header, so that the file can be
/// written in one pass.
const HASH: &str = "__hash__";

/// The label of padding tensors in such a file.
const LABEL: &str = "file";

/// A tensor to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewTensor {
    /// The name.
    pub name: String,
    /// The element type.
    pub dtype: Dtype,
    /// The shape, outermost dimension first.
    pub shape: Vec<usize>,
}

/// A file of tensors under construction. The destination is replaced atomically by [`publish`](Self::publish) and unchanged
/// until then.
pub struct NewTensorFile {
    writer: TensorWriter,
    partial: PartialFile,
}

/// A mapped and verified file of tensors.
///
/// Any safetensors reader can open it. Its tensors start on multiples of 64 bytes, and the last one, `__hash__`, is the blake3
/// of everything before it: header, texts and tensors.
///
/// ```
/// use std::collections::BTreeMap;
///
/// use firebox_store::{Dtype, NewTensor, NewTensorFile, TensorFile};
///
/// # fn main() -> Result<(), firebox_store::StoreError> {
/// # let folder = tempfile::tempdir().unwrap();
/// let path = folder.path().join("counts");
/// let tensor = NewTensor { name: "counts".into(), dtype: Dtype::U8, shape: vec![3] };
/// let metadata = BTreeMap::from([("unit".to_owned(), "sheep".to_owned())]);
/// let mut file = NewTensorFile::create(&path, &metadata, &[tensor])?;
/// file.write(&[1, 2, 3])?;
/// file.publish()?;
///
/// let file = TensorFile::open(&path)?;
/// assert_eq!(file.text("unit")?, "sheep");
/// assert_eq!(file.tensor("counts", Dtype::U8)?.data[..], [1, 2, 3]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct TensorFile {
    mapping: Mapping,
    metadata: BTreeMap<String, String>,
    entries: HashMap<String, Entry>,
}

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileTensor {
    /// The shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// The bytes: a slice of the mapping, which they keep alive.
    pub data: Bytes,
}

impl NewTensorFile {
    /// Begins a file of these texts and tensors. Creates its folder if needed.
    pub fn create(
        path: impl AsRef<Path>,
        metadata: &BTreeMap<String, String>,
        tensors: &[NewTensor],
    ) -> Result<Self, StoreError> {
        let path = path.as_ref();
        let mut layout = FileLayout::new(LABEL).with_metadata(metadata);
        let hash = NewTensor { name: HASH.into(), dtype: Dtype::U8, shape: vec![blake3::OUT_LEN] };
        for tensor in tensors.iter().chain([&hash]) {
            layout.push(&tensor.name, tensor.dtype, &tensor.shape).map_err(|reason| {
                Fault::new(format!("tensor {:?}", Excerpt(&tensor.name)), reason).in_file(path)
            })?;
        }
        let (partial, file) = PartialFile::create(path)?;
        Ok(Self { writer: TensorWriter::filling(&partial.path, file, layout)?, partial })
    }

    /// Writes the next tensor.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        self.writer.next_tensor()?;
        self.writer.write(bytes)
    }

    /// Makes the file durable and moves it to its destination, where it replaces an existing file.
    pub fn publish(mut self) -> Result<(), StoreError> {
        self.writer.next_tensor()?;
        let hash = self.writer.hash();
        self.writer.write(hash.as_bytes())?;
        self.writer.finish()?;
        self.partial.publish()
    }
}

impl TensorFile {
    /// Maps a file after reading all of it to verify its hash, which also leaves it in memory as far as there is room.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        let path = path.as_ref();
        let mapping = Mapping::open(path)?;
        let sealed = mapping.bytes().len().saturating_sub(blake3::OUT_LEN);
        let found = mapping.hash_before(sealed, &mut |_| {})?;
        let Header { entries, metadata } =
            checked(mapping.bytes(), &found).map_err(|fault| fault.in_file(path))?;
        let entries = entries.into_iter().map(|entry| (entry.name.clone(), entry)).collect();
        Ok(Self { mapping, metadata, entries })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        self.mapping.path()
    }

    /// Looks up a text.
    pub fn text(&self, key: &str) -> Result<&str, StoreError> {
        let text = self.metadata.get(key).map(String::as_str);
        text.ok_or_else(|| self.fault(key, "it is missing"))
    }

    /// The element type of a tensor, if there is one of this name.
    pub fn dtype(&self, name: &str) -> Option<Dtype> {
        self.entries.get(name).map(|entry| entry.dtype)
    }

    /// Looks up a tensor by name and element type.
    pub fn tensor(&self, name: &str, dtype: Dtype) -> Result<FileTensor, StoreError> {
        let Some(entry) = self.entries.get(name) else {
            return Err(StoreError::MissingTensor { model: self.path().to_owned(), tensor: name.to_owned() });
        };
        if entry.dtype != dtype {
            let field = format!("tensor {:?}: dtype", Excerpt(name));
            return Err(self.fault(&field, format!("{} instead of {dtype}", entry.dtype)));
        }
        let (data, _) = self.mapping.slice(entry.start, entry.len, dtype.size());
        Ok(FileTensor { shape: entry.shape.clone(), data })
    }

    /// Looks up the bytes of a tensor by name, element type and shape.
    pub fn shaped(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<Bytes, StoreError> {
        let tensor = self.tensor(name, dtype)?;
        if tensor.shape == shape {
            return Ok(tensor.data);
        }
        let field = format!("tensor {:?}: shape", Excerpt(name));
        Err(self.fault(&field, format!("{:?} instead of {:?}", Shape(&tensor.shape), Shape(shape))))
    }

    /// An error about one of its fields, for callers that find inconsistencies between them.
    pub fn fault(&self, field: &str, reason: impl Into<String>) -> StoreError {
        Fault::new(field, reason).in_file(self.path())
    }
}

/// The header of a file that ends in the hash of its content.
fn checked(file: &[u8], found: &blake3::Hash) -> Result<Header, Fault> {
    let header = Header::parse(file)?;
    let hash = header.entries.last().filter(|entry| entry.name == HASH && entry.len == blake3::OUT_LEN);
    let Some(hash) = hash else {
        return Err(Fault::new(HASH, "the file does not end in its hash; remove it and write it again"));
    };
    if found.as_bytes()[..] != file[hash.start..] {
        let reason = format!("the content's is {}, not what the file says; it is damaged", found.to_hex());
        return Err(Fault::new(HASH, reason));
    }
    Ok(header)
}

impl std::fmt::Debug for NewTensorFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewTensorFile").field("path", &self.partial.path).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::*;

    fn tensors() -> Vec<NewTensor> {
        let tensor = |name: &str, dtype, shape: &[usize]| NewTensor {
            name: name.into(),
            dtype,
            shape: shape.to_vec(),
        };
        vec![tensor("b", Dtype::F32, &[2, 3]), tensor("empty", Dtype::U8, &[0]), tensor("a", Dtype::U8, &[5])]
    }

    fn write(path: &Path, text: &str) {
        let metadata = BTreeMap::from([("who".to_owned(), text.to_owned())]);
        let mut file = NewTensorFile::create(path, &metadata, &tensors()).unwrap();
        file.write(&[7; 24]).unwrap();
        file.write(&[]).unwrap();
        file.write(&[1, 2, 3, 4, 5]).unwrap();
        file.publish().unwrap();
    }

    fn names(folder: &TempDir) -> Vec<String> {
        let names = fs::read_dir(folder.path()).unwrap();
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_written_file_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("below/it");
        write(&path, "\"me\"\n");
        let file = TensorFile::open(&path).unwrap();
        assert_eq!(file.text("who").unwrap(), "\"me\"\n");
        assert!(
            file.text("whom").is_err() && file.dtype("a") == Some(Dtype::U8) && file.dtype("c").is_none()
        );
        let a = file.tensor("a", Dtype::U8).unwrap();
        assert_eq!((a.shape, &a.data[..]), (vec![5], &[1, 2, 3, 4, 5][..]));
        assert_eq!(a.data.as_ptr() as usize % 64, 0);
        assert_eq!(file.shaped("b", Dtype::F32, &[2, 3]).unwrap()[..], [7; 24]);
        assert!(matches!(file.tensor("c", Dtype::U8), Err(StoreError::MissingTensor { .. })));
        for wrong in [file.tensor("a", Dtype::I8).map(drop), file.shaped("a", Dtype::U8, &[1, 5]).map(drop)] {
            assert!(matches!(wrong, Err(StoreError::Malformed { .. })), "{wrong:?}");
        }
        // The `safetensors` crate reads it too.
        let bytes = fs::read(&path).unwrap();
        let others = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(others.tensor("a").unwrap().data(), [1, 2, 3, 4, 5]);
    }

    #[test]
    fn damaged_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (path, broken) = (folder.path().join("whole"), folder.path().join("broken"));
        write(&path, "me");
        let whole = fs::read(&path).unwrap();
        let refused = |bytes: &[u8], what: String| {
            fs::write(&broken, bytes).unwrap();
            let error = TensorFile::open(&broken).expect_err(&what);
            assert!(
                matches!(error, StoreError::Malformed { .. } | StoreError::Unsupported { .. }),
                "{error}"
            );
            assert!(error.to_string().contains("broken"), "{error}");
        };
        for length in 0..whole.len() {
            refused(&whole[..length], format!("{length} bytes of {}", whole.len()));
        }
        for at in 0..whole.len() {
            for bit in [1, 1 << (at % 8), 0x80] {
                let mut flipped = whole.clone();
                flipped[at] ^= bit;
                refused(&flipped, format!("{bit} of byte {at} flipped"));
            }
        }
        refused(&[&whole[..], &[0]].concat(), "one byte more".into());
        // The beginning of one file and the end of another of the same length.
        write(&path, "it");
        let other = fs::read(&path).unwrap();
        refused(&[&whole[..whole.len() / 2], &other[other.len() / 2..]].concat(), "a mixed file".into());
    }

    #[test]
    fn an_interrupted_writer_leaves_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        write(&path, "old");
        let left = folder.path().join("file.partial-0123456789abcdef");
        fs::write(&left, "half of it").unwrap();
        // A file of the user with a similar name.
        let others = folder.path().join("file.partial-0123456789abcdeg");
        fs::write(&others, "mine").unwrap();
        assert_eq!(TensorFile::open(&path).unwrap().text("who").unwrap(), "old");

        let mut dropped = NewTensorFile::create(&path, &BTreeMap::new(), &tensors()).unwrap();
        dropped.write(&[0; 24]).unwrap();
        drop(dropped);
        assert_eq!(TensorFile::open(&path).unwrap().text("who").unwrap(), "old");
        let held = TensorFile::open(&path).unwrap();
        write(&path, "new");
        assert_eq!(TensorFile::open(&path).unwrap().text("who").unwrap(), "new");
        assert_eq!(held.text("who").unwrap(), "old");
        assert!(!left.exists() && others.exists(), "{:?}", names(&folder));
        assert_eq!(names(&folder).len(), 2, "{:?}", names(&folder));
    }

    #[test]
    fn concurrent_writers_of_one_file_do_not_collide() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::thread::scope(|scope| {
            for writer in 0..8 {
                let path = &path;
                scope.spawn(move || write(path, &writer.to_string()));
            }
        });
        TensorFile::open(&path).unwrap();
        assert_eq!(names(&folder), ["file"]);
    }

    #[test]
    fn invalid_names_and_lengths_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let create = |names: [&str; 2]| {
            let tensors = names.map(|name| NewTensor { name: name.into(), dtype: Dtype::U8, shape: vec![2] });
            NewTensorFile::create(&path, &BTreeMap::new(), &tensors)
        };
        for names in [["a", "a"], ["__metadata__", "a"], ["a", HASH]] {
            assert!(matches!(create(names), Err(StoreError::Malformed { .. })), "{names:?}");
        }
        let mut short = create(["a", "b"]).unwrap();
        short.write(&[1, 2]).unwrap();
        assert!(short.publish().is_err());
        assert!(create(["a", "b"]).unwrap().write(&[1, 2, 3]).is_err());
        assert!(matches!(TensorFile::open(folder.path()), Err(StoreError::NotAModel { .. })));
        assert!(names(&folder).is_empty());
    }
}
