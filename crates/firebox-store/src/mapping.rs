//! A file mapped into memory, and read by position where its pages should not stay.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use bytes::Bytes;
use memmap2::Mmap;
#[cfg(unix)]
use memmap2::{Advice, UncheckedAdvice};

use crate::error::StoreError;
use crate::files::File;
use crate::folder::regular;
use crate::read_at::ReadMethod;

/// A read-only mapping of a whole file.
#[derive(Debug)]
pub(crate) struct Mapping {
    path: PathBuf,
    file: File,
    stamp: Stamp,
    /// The same file, opened to pass the page cache by; absent where the file system does not allow that.
    direct: OnceLock<Option<File>>,
    map: Arc<Mmap>,
    bytes: Bytes,
}

/// What tells that a file is no longer what it was when it was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Stamp {
    len: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    fn of(file: &File) -> std::io::Result<Self> {
        let metadata = file.system().metadata()?;
        Ok(Self { len: metadata.len(), modified: metadata.modified().ok() })
    }
}

/// Lets `Bytes` own a share of a mapping.
struct Shared(Arc<Mmap>);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// A buffer whose first byte is aligned for every element type.
struct Aligned {
    words: Vec<u128>,
    len: usize,
}

impl AsRef<[u8]> for Aligned {
    fn as_ref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }
}

impl Mapping {
    pub(crate) fn open(path: &Path) -> Result<Self, StoreError> {
        regular(path)?;
        let file = File::open(path).map_err(|error| StoreError::io(path, "open", error))?;
        let stamp = Stamp::of(&file).map_err(|error| StoreError::io(path, "look up", error))?;
        if stamp.len == 0 {
            return Err(StoreError::Malformed {
                file: path.to_owned(),
                field: "file".into(),
                reason: "empty; download it again".into(),
            });
        }
        // Another process that shortens or rewrites the file while it is mapped changes what is read or ends the process with
        // SIGBUS, as for every user of mmap. Parsers check against the length once and keep no reference that outlives it.
        // SAFETY: the mapping is read-only, and nothing in this process writes to the file: importing writes beside it and
        // renames, and never edits in place.
        let map = unsafe { Mmap::map(file.system()) }.map_err(|error| StoreError::io(path, "map", error))?;
        let map = Arc::new(map);
        let bytes = Bytes::from_owner(Shared(map.clone()));
        Ok(Self { path: path.to_owned(), file, stamp, direct: OnceLock::new(), map, bytes })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The bytes of a tensor, aligned as asked: a slice of the mapping where that is aligned, else a copy. Says
    /// which. The range must lie within the file, as every checked header's ranges do.
    pub(crate) fn slice(&self, start: usize, len: usize, align: usize) -> (Bytes, bool) {
        let slice = self.bytes.slice(start..start + len);
        if (slice.as_ptr() as usize).is_multiple_of(align) {
            return (slice, true);
        }
        (aligned_copy(&slice), false)
    }

    /// Fills a buffer from the file without touching the mapping, so that an import's pages are not charged to it.
    pub(crate) fn read_at(&self, buffer: &mut [u8], start: usize) -> Result<(), StoreError> {
        self.file.read_exact_at(buffer, start as u64).map_err(|error| {
            StoreError::io(&self.path, format!("read {} bytes at {start}", buffer.len()), error)
        })
    }

    /// Reads into a buffer as far as the system likes, and returns how far that was. Neither the mapping nor, if so
    /// wished and possible, the page cache is touched.
    pub(crate) fn read_some(
        &self,
        buffer: &mut [u8],
        start: u64,
        method: ReadMethod,
    ) -> Result<usize, StoreError> {
        let fail = |error| StoreError::io(&self.path, format!("read at {start}"), error);
        let direct = match method {
            ReadMethod::Direct => {
                self.direct.get_or_init(|| opened_directly(&self.path, &self.file)).as_ref()
            }
            ReadMethod::Buffered => None,
        };
        let count = match direct.map(|file| file.read_at(buffer, start)) {
            // Some file systems open a file so and then do not read it so.
            None | Some(Err(_)) => self.file.read_at(buffer, start).map_err(fail)?,
            Some(Ok(count)) => count,
        };
        if Stamp::of(&self.file).map_err(fail)? != self.stamp {
            return Err(StoreError::Changed { file: self.path.clone() });
        }
        Ok(count)
    }

    /// Asks the kernel to read a range ahead. A wish: where the system has no such call, nothing happens.
    pub(crate) fn prefetch(&self, start: usize, len: usize) -> Result<(), StoreError> {
        #[cfg(unix)]
        self.map
            .advise_range(Advice::WillNeed, start, len)
            .map_err(|error| StoreError::io(&self.path, "prefetch", error))?;
        #[cfg(not(unix))]
        let _ = (&self.map, start, len);
        Ok(())
    }

    /// Tells the kernel that a range is not needed for now. A wish, like `prefetch`.
    pub(crate) fn release(&self, start: usize, len: usize) -> Result<(), StoreError> {
        // SAFETY: on a shared read-only file mapping MADV_DONTNEED drops pages that the next access reads again from
        // the file; no byte changes under a live slice.
        #[cfg(unix)]
        unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, len) }
            .map_err(|error| StoreError::io(&self.path, "release", error))?;
        #[cfg(not(unix))]
        let _ = (&self.map, start, len);
        Ok(())
    }
}

impl Mapping {
    /// Does something that touches few pages. Some systems read megabytes around a page that is touched, all of a small file
    /// that way; here they are asked not to.
    pub(crate) fn sparsely<R>(&self, touch: impl FnOnce() -> R) -> R {
        // Wishes, whose failing changes nothing but the time that it takes.
        #[cfg(unix)]
        drop(self.map.advise(Advice::Random));
        let touched = touch();
        #[cfg(unix)]
        drop(self.map.advise(Advice::Normal));
        touched
    }

    /// Wishes for large pages where a range of the file is read from now on: they come faster from the disk, and are faster to
    /// compute with. A wish, like `prefetch`.
    pub(crate) fn enlarge_pages(&self, start: usize, len: usize) {
        #[cfg(target_os = "linux")]
        drop(self.map.advise_range(Advice::HugePage, start, len));
        #[cfg(not(target_os = "linux"))]
        let _ = (&self.map, start, len);
    }

    /// Reads a range of the file into memory and waits for it.
    pub(crate) fn populate_range(&self, start: usize, len: usize) -> Result<(), StoreError> {
        // Systems that do not know the first wish are asked to begin at least.
        #[cfg(target_os = "linux")]
        if self.map.advise_range(Advice::PopulateRead, start, len).is_ok() {
            return Ok(());
        }
        self.prefetch(start, len)
    }

    /// Drops the whole file from memory, from the page cache as well where no other process has it mapped: what is
    /// read next comes from the disk. A wish, like `prefetch`.
    pub(crate) fn evict(&self) -> Result<(), StoreError> {
        self.release(0, self.bytes.len())?;
        #[cfg(target_os = "linux")]
        rustix::fs::fadvise(self.file.system(), 0, None, rustix::fs::Advice::DontNeed)
            .map_err(|error| StoreError::io(&self.path, "release", error.into()))?;
        Ok(())
    }

    /// Returns how many bytes of the file are in memory, including those that other processes have read. `None` if the system
    /// does not say.
    pub(crate) fn resident(&self) -> Option<u64> {
        self.resident_range(0, self.map.len())
    }

    /// Returns how many bytes of a range of the file are in memory. `None` if the system does not say.
    #[cfg(target_os = "linux")]
    pub(crate) fn resident_range(&self, start: usize, len: usize) -> Option<u64> {
        // SAFETY: sysconf takes a number and touches no memory.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok()?;
        let end = start.checked_add(len).filter(|end| *end <= self.map.len())?;
        let first = start / page * page;
        let mut pages = vec![0u8; (end - first).div_ceil(page)];
        // SAFETY: the mapping lives as long as `self` and begins on a page, as does `first`, and the range ends within it;
        // `pages` has a byte for each of its pages, which is all that is written to.
        let failed = unsafe {
            let from = self.map.as_ptr().add(first).cast_mut().cast();
            libc::mincore(from, end - first, pages.as_mut_ptr())
        } != 0;
        if failed {
            return None;
        }
        let resident = |(at, state): (usize, &u8)| {
            let (from, to) = ((first + at * page).max(start), (first + (at + 1) * page).min(end));
            (state & 1 == 1).then(|| (to - from) as u64)
        };
        Some(pages.iter().enumerate().filter_map(resident).sum())
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn resident_range(&self, _: usize, _: usize) -> Option<u64> {
        None
    }

    /// The hash of the file's bytes, which are read by position.
    pub(crate) fn hash(&self, on_bytes: &mut dyn FnMut(u64)) -> Result<String, StoreError> {
        Ok(self.hash_before(self.bytes.len(), on_bytes)?.to_hex().to_string())
    }

    /// The same of its first `length` bytes. Where the disk does not give them that is an error; touching the mapping would
    /// end the process.
    pub(crate) fn hash_before(
        &self,
        length: usize,
        on_bytes: &mut dyn FnMut(u64),
    ) -> Result<blake3::Hash, StoreError> {
        let mut buffer = vec![0; length.min(4 << 20)];
        let mut hasher = blake3::Hasher::new();
        let mut at = 0;
        while at < length {
            let len = buffer.len().min(length - at);
            self.read_at(&mut buffer[..len], at)?;
            hasher.update(&buffer[..len]);
            on_bytes(len as u64);
            at += len;
        }
        Ok(hasher.finalize())
    }
}

/// The same file once more, unless another one has taken its name since.
#[cfg(target_os = "linux")]
fn opened_directly(path: &Path, file: &File) -> Option<File> {
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

    let flags = rustix::fs::OFlags::DIRECT.bits();
    let mut options = std::fs::File::options();
    options.read(true).custom_flags(flags as i32);
    let direct = File::open_with(path, &options).ok()?;
    let (same, other) = (file.system().metadata().ok()?, direct.system().metadata().ok()?);
    ((same.dev(), same.ino()) == (other.dev(), other.ino())).then_some(direct)
}

#[cfg(not(target_os = "linux"))]
fn opened_directly(_: &Path, _: &File) -> Option<File> {
    None
}

pub(crate) fn aligned_copy(bytes: &[u8]) -> Bytes {
    let mut words = vec![0u128; bytes.len().div_ceil(size_of::<u128>())];
    bytemuck::cast_slice_mut::<u128, u8>(&mut words)[..bytes.len()].copy_from_slice(bytes);
    Bytes::from_owner(Aligned { words, len: bytes.len() })
}
