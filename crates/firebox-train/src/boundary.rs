//! Hidden states at the boundary between trunk and head, computed once.

use std::fs;
use std::io::{self, BufWriter, Read, Seek, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use firebox_store::files::{self, File};
use half::f16;
use half::slice::HalfFloatSliceExt;
use memmap2::Mmap;
use serde::{Deserialize, Serialize};

use crate::error::TrainError;
use crate::files::{UNFINISHED, create_folder, lock, parent, sync_folder};

const STATES: &str = "states";
const INDEX: &str = "index";
/// Where samples begin: a cache line.
const ALIGNMENT: u64 = 64;
/// Offset, tokens, and half of the blake3 of the bytes.
const ENTRY: usize = 32;
const HASH: usize = 16;

/// The number format in which states are stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stored {
    /// In 16 bits. Half the disk, and twice as many tokens in the page cache, which is what decides the speed of
    /// training a head. A state is off by a 2048th of itself at most, less than what bf16 weights do to it. States
    /// beyond 65504, which some models have, are an error.
    #[default]
    F16,
    /// In 32 bits, exactly.
    F32,
}

impl Stored {
    fn bytes(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// Everything that the states depend on. Each key has files of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoundaryKey {
    /// The hash of the trunk.
    pub trunk: String,
    /// The hash of the samples, as [`Examples::fingerprint`](crate::Examples::fingerprint) says it: of the data, and of
    /// the tokenizer and chat template as far as they matter.
    pub samples: String,
    /// The first layer that belongs to the head.
    pub layer: usize,
    /// Numbers of a state.
    pub width: usize,
    /// The number format of the states.
    pub stored: Stored,
}

impl BoundaryKey {
    fn path(&self, folder: &Path, kind: &str, prefix: &str) -> PathBuf {
        let Self { trunk, samples, layer, width, stored } = self;
        let text = format!("{trunk}\n{samples}\n{layer}\n{width}\n{stored:?}\n");
        let name = &blake3::hash(text.as_bytes()).to_hex()[..32];
        folder.join(format!("{prefix}{name}.{kind}"))
    }

    fn sample_bytes(&self, tokens: u64) -> Option<u64> {
        tokens.checked_mul(self.width as u64)?.checked_mul(self.stored.bytes() as u64)
    }
}

/// A cache that is being filled, sample by sample, by one process. One that was left goes on where it was.
#[derive(Debug)]
pub(crate) struct NewBoundaryCache {
    folder: PathBuf,
    key: BoundaryKey,
    states: BufWriter<File>,
    index: BufWriter<File>,
    end: u64,
    done: usize,
}

/// The states of all samples, mapped.
#[derive(Debug)]
pub struct BoundaryCache {
    path: PathBuf,
    key: BoundaryKey,
    map: Option<Mmap>,
    /// Of each sample, where its bytes are.
    samples: Vec<Range<usize>>,
    hashes: Vec<[u8; HASH]>,
    /// A bit of each sample that was found to be what was written.
    checked: Vec<AtomicU64>,
}

struct Entry {
    offset: u64,
    tokens: u64,
    hash: [u8; HASH],
}

impl Entry {
    fn to_bytes(&self) -> [u8; ENTRY] {
        let mut bytes = [0; ENTRY];
        bytes[..8].copy_from_slice(&self.offset.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.tokens.to_le_bytes());
        bytes[16..].copy_from_slice(&self.hash);
        bytes
    }

    /// The entries of a file, as far as they follow each other; with the end of what they tell of.
    fn all(bytes: &[u8], key: &BoundaryKey) -> (Vec<Self>, u64) {
        let mut end = 0u64;
        let mut entries = Vec::new();
        for chunk in bytes.chunks_exact(ENTRY) {
            let number = |at: usize| chunk[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
            let entry = Self {
                offset: number(0),
                tokens: number(8),
                hash: chunk[16..].first_chunk().copied().unwrap_or_default(),
            };
            let next = key.sample_bytes(entry.tokens).and_then(|bytes| entry.offset.checked_add(bytes));
            let follows = end.checked_next_multiple_of(ALIGNMENT) == Some(entry.offset);
            let Some(next) = next.filter(|_| follows) else { break };
            end = next;
            entries.push(entry);
        }
        (entries, end)
    }
}

impl NewBoundaryCache {
    /// Begins a cache, or takes up one that was left. What is there already is checked.
    pub(crate) fn open(folder: impl Into<PathBuf>, key: BoundaryKey) -> Result<Self, TrainError> {
        let folder = folder.into();
        create_folder(&folder)?;
        let open = |kind| {
            let path = key.path(&folder, kind, UNFINISHED);
            let mut options = fs::File::options();
            options.create(true).truncate(false).read(true).write(true);
            let file =
                File::open_with(&path, &options).map_err(|error| TrainError::io(&path, "open", error))?;
            // The states of another process would be cut off, and its next ones written elsewhere than its index says.
            // Both files, since one of them is renamed before the other.
            lock(&file, &path, "another process is filling it; wait until it has ended, or stop it")?;
            Ok::<_, TrainError>((path, file))
        };
        let (states_path, mut states) = open(STATES)?;
        let (index_path, mut index) = open(INDEX)?;
        let mut bytes = Vec::new();
        index.read_to_end(&mut bytes).map_err(|error| TrainError::io(&index_path, "read", error))?;
        let (entries, _) = Entry::all(&bytes, &key);
        let failed = |error| TrainError::io(&states_path, "read", error);
        let (mut end, mut done) = (0, 0);
        let mut data = Vec::new();
        // After a loss of power the index may tell of states that never reached the disk.
        for entry in &entries {
            let length = key.sample_bytes(entry.tokens).unwrap_or(0);
            data.clear();
            states.seek(io::SeekFrom::Start(entry.offset)).map_err(failed)?;
            (&mut states).take(length).read_to_end(&mut data).map_err(failed)?;
            if data.len() as u64 != length || digest(&data) != entry.hash {
                break;
            }
            (end, done) = (entry.offset + length, done + 1);
        }
        for (path, file, length) in
            [(&states_path, &mut states, end), (&index_path, &mut index, (done * ENTRY) as u64)]
        {
            let cut = file.set_len(length).and_then(|()| file.seek(io::SeekFrom::Start(length)));
            cut.map_err(|error| TrainError::io(path, "cut", error))?;
        }
        let (states, index) = (BufWriter::new(states), BufWriter::new(index));
        Ok(Self { folder, key, states, index, end, done })
    }

    /// Returns the number of samples that are computed already.
    pub(crate) fn done(&self) -> usize {
        self.done
    }

    /// Adds the states of the next sample, row after row.
    pub(crate) fn push(&mut self, states: &[f32]) -> Result<(), TrainError> {
        let path = self.key.path(&self.folder, STATES, UNFINISHED);
        let width = self.key.width.max(1);
        if !states.len().is_multiple_of(width) {
            return Err(TrainError::malformed(
                &path,
                format!("{} numbers are no whole states of {width}", states.len()),
            ));
        }
        let converted: Vec<f16>;
        let bytes: &[u8] = match self.key.stored {
            Stored::F32 => bytemuck::cast_slice(states),
            Stored::F16 => {
                converted = states.iter().map(|&state| f16::from_f32(state)).collect();
                bytemuck::cast_slice(&converted)
            }
        };
        let large = states.iter().find(|state| !match self.key.stored {
            Stored::F32 => state.is_finite(),
            Stored::F16 => f16::from_f32(**state).is_finite(),
        });
        if let Some(&value) = large {
            return Err(TrainError::StateTooLarge { sample: self.done, value });
        }
        let offset = self.end.next_multiple_of(ALIGNMENT);
        let padding = [0; ALIGNMENT as usize];
        let entry = Entry { offset, tokens: (states.len() / width) as u64, hash: digest(bytes) };
        let written = (|| {
            self.states.write_all(&padding[..(offset - self.end) as usize])?;
            self.states.write_all(bytes)?;
            // States first: what the index tells of has been written.
            self.states.flush()?;
            self.index.write_all(&entry.to_bytes())?;
            self.index.flush()
        })();
        written.map_err(|error| TrainError::io(&path, "write", error))?;
        self.end = offset + bytes.len() as u64;
        self.done += 1;
        Ok(())
    }

    /// Makes the cache durable and gives it its name.
    pub(crate) fn finish(self) -> Result<BoundaryCache, TrainError> {
        let (folder, key) = (self.folder.clone(), self.key.clone());
        drop(self.put_in_place()?);
        let path = key.path(&folder, INDEX, "");
        BoundaryCache::open(folder, key)?
            .ok_or_else(|| TrainError::malformed(&path, "it was removed while it was made; try again"))
    }

    /// Renames the finished files to their final names and returns them, locked: no other process may use one of them before
    /// both have their names.
    fn put_in_place(self) -> Result<[File; 2], TrainError> {
        let Self { folder, key, states, index, .. } = self;
        let durable = |kind: &str, writer: BufWriter<File>| {
            let file = writer.into_inner().map_err(|error| error.into_error());
            let synced = file.and_then(|file| file.sync_all().map(|()| file));
            synced.map_err(|error| TrainError::io(&key.path(&folder, kind, UNFINISHED), "write", error))
        };
        let locked = [durable(STATES, states)?, durable(INDEX, index)?];
        // The index comes last, and with it the cache is there.
        for kind in [STATES, INDEX] {
            let path = key.path(&folder, kind, "");
            files::rename(&key.path(&folder, kind, UNFINISHED), &path)
                .map_err(|error| TrainError::io(&path, "rename the finished file to", error))?;
        }
        sync_folder(parent(&key.path(&folder, INDEX, "")))?;
        Ok(locked)
    }
}

impl BoundaryCache {
    /// The cache of a key, if it is there and finished.
    pub fn open(folder: impl AsRef<Path>, key: BoundaryKey) -> Result<Option<Self>, TrainError> {
        let folder = folder.as_ref();
        let (path, index) = (key.path(folder, STATES, ""), key.path(folder, INDEX, ""));
        let bytes = match files::read(&index) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(TrainError::io(&index, "read", error)),
        };
        let (entries, end) = Entry::all(&bytes, &key);
        let file = File::open(&path).map_err(|error| TrainError::io(&path, "open", error))?;
        let length = file.system().metadata().map_err(|error| TrainError::io(&path, "look up", error))?.len();
        if entries.len() * ENTRY != bytes.len() || end != length || usize::try_from(end).is_err() {
            return Err(TrainError::malformed(
                &path,
                "it is not what its index tells of; remove both and compute them again",
            ));
        }
        // SAFETY: the mapping is read-only, and a finished file is never written to by this crate: what is unfinished has
        // another name. A process that shortens it while it is mapped is outside of what the type system can hold, as for
        // every user of mmap.
        let map = (length > 0).then(|| unsafe { Mmap::map(file.system()) }).transpose();
        let map = map.map_err(|error| TrainError::io(&path, "map", error))?;
        let range = |entry: &Entry| {
            let begin = entry.offset as usize;
            begin..begin + key.sample_bytes(entry.tokens).unwrap_or(0) as usize
        };
        let samples = entries.iter().map(range).collect();
        let hashes = entries.iter().map(|entry| entry.hash).collect();
        let checked = (0..entries.len().div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Ok(Some(Self { path, key, map, samples, hashes, checked }))
    }

    /// The cache of a key, computed as far as it is not there: `tokens` gives the tokens of a sample, `states` the states
    /// of tokens, row after row.
    pub fn fill(
        folder: impl Into<PathBuf>,
        key: BoundaryKey,
        samples: usize,
        mut tokens: impl FnMut(usize) -> Result<Vec<u32>, TrainError>,
        mut states: impl FnMut(&[u32]) -> Result<Vec<f32>, TrainError>,
    ) -> Result<Self, TrainError> {
        let folder = folder.into();
        if let Some(cache) = Self::open(&folder, key.clone())?
            && cache.len() == samples
        {
            return Ok(cache);
        }
        let mut new = NewBoundaryCache::open(&folder, key)?;
        while new.done() < samples {
            let tokens = tokens(new.done())?;
            let states = states(&tokens)?;
            if states.len() != tokens.len() * new.key.width {
                let path = new.key.path(&folder, STATES, UNFINISHED);
                let reason = format!("{} tokens have {} numbers for states", tokens.len(), states.len());
                return Err(TrainError::malformed(&path, reason));
            }
            new.push(&states)?;
        }
        new.finish()
    }

    /// Returns the number of samples.
    #[expect(clippy::len_without_is_empty, reason = "no caller needs it")]
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    /// Returns the key that the cache was made for.
    pub fn key(&self) -> &BoundaryKey {
        &self.key
    }

    /// The states of a sample as they are stored, row after row, in little endian. When they are read first, it is seen
    /// whether they are what was written.
    ///
    /// # Panics
    ///
    /// If there is no sample of that number.
    pub fn bytes(&self, sample: usize) -> Result<&[u8], TrainError> {
        let (checked, bit) = (&self.checked[sample / 64], 1u64 << (sample % 64));
        if checked.load(Ordering::Relaxed) & bit == 0 {
            self.check(sample)?;
            checked.fetch_or(bit, Ordering::Relaxed);
        }
        Ok(self.mapped(sample))
    }

    /// The states of a sample, row after row, checked like their [bytes](Self::bytes).
    ///
    /// # Panics
    ///
    /// If there is no sample of that number.
    pub fn states(&self, sample: usize) -> Result<Vec<f32>, TrainError> {
        let bytes = self.bytes(sample)?;
        Ok(match self.key.stored {
            // Samples begin on multiples of 64 bytes of a mapping.
            Stored::F32 => bytemuck::cast_slice::<u8, f32>(bytes).to_vec(),
            Stored::F16 => bytemuck::cast_slice::<u8, f16>(bytes).to_f32_vec(),
        })
    }

    /// Reads everything, to see whether it is what was written.
    pub fn verify(&self) -> Result<(), TrainError> {
        (0..self.len()).try_for_each(|sample| self.check(sample))
    }

    fn check(&self, sample: usize) -> Result<(), TrainError> {
        if digest(self.mapped(sample)) != self.hashes[sample] {
            let reason = format!("the states of sample {sample} are damaged; remove the file");
            return Err(TrainError::malformed(&self.path, reason));
        }
        Ok(())
    }

    fn mapped(&self, sample: usize) -> &[u8] {
        let range = self.samples[sample].clone();
        self.map.as_deref().map_or(&[], |map| &map[range])
    }
}

fn digest(bytes: &[u8]) -> [u8; HASH] {
    blake3::hash(bytes).as_bytes().first_chunk().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(stored: Stored) -> BoundaryKey {
        BoundaryKey { trunk: "t".into(), samples: "s".into(), layer: 2, width: 3, stored }
    }

    fn tokens(sample: usize) -> Result<Vec<u32>, TrainError> {
        Ok((0..sample as u32 % 5).collect())
    }

    fn states(tokens: &[u32]) -> Vec<f32> {
        tokens.iter().flat_map(|&token| [token as f32, token as f32 / 3.0, -1.0]).collect()
    }

    #[test]
    fn states_come_back() {
        let folder = tempfile::tempdir().unwrap();
        for stored in [Stored::F16, Stored::F32] {
            let mut computed = 0;
            let mut fill = || {
                BoundaryCache::fill(folder.path(), key(stored), 20, tokens, |tokens| {
                    computed += 1;
                    Ok(states(tokens))
                })
            };
            let cache = fill().unwrap();
            cache.verify().unwrap();
            for sample in 0..20 {
                let expected = states(&tokens(sample).unwrap());
                let found = cache.states(sample).unwrap();
                match stored {
                    Stored::F32 => assert_eq!(found, expected),
                    Stored::F16 => {
                        assert_eq!(found.len(), expected.len());
                        let close = |(one, other): (&f32, &f32)| (one - other).abs() <= other.abs() / 2048.0;
                        assert!(found.iter().zip(&expected).all(close), "{found:?} {expected:?}");
                    }
                }
            }
            fill().unwrap();
            assert_eq!(computed, 20);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4);
    }

    #[test]
    fn an_unfinished_cache_goes_on_from_what_is_whole() {
        let whole = tempfile::tempdir().unwrap();
        let fill = |folder: &Path, computed: &mut usize| {
            let cache = BoundaryCache::fill(folder, key(Stored::F32), 12, tokens, |tokens| {
                *computed += 1;
                Ok(states(tokens))
            });
            cache.unwrap()
        };
        let expected = fill(whole.path(), &mut 0);
        for (states_left, index_left, recomputed) in
            [(1.0, 1.0, 4), (1.0, 0.99, 5), (0.5, 1.0, 8), (0.0, 1.0, 11), (1.0, 0.0, 12)]
        {
            let folder = tempfile::tempdir().unwrap();
            let mut new = NewBoundaryCache::open(folder.path(), key(Stored::F32)).unwrap();
            (0..8).for_each(|sample| new.push(&states(&tokens(sample).unwrap())).unwrap());
            drop(new);
            for (kind, left) in [(STATES, states_left), (INDEX, index_left)] {
                let file = fs::File::options()
                    .write(true)
                    .open(key(Stored::F32).path(folder.path(), kind, UNFINISHED))
                    .unwrap();
                let length = file.metadata().unwrap().len() as f64 * left;
                file.set_len(length as u64).unwrap();
            }
            let mut computed = 0;
            let cache = fill(folder.path(), &mut computed);
            assert_eq!(computed, recomputed, "{states_left} {index_left}");
            assert!((0..12).all(|sample| cache.bytes(sample).unwrap() == expected.bytes(sample).unwrap()));
        }
    }

    #[test]
    fn other_keys_are_other_caches_and_damage_is_found() {
        let folder = tempfile::tempdir().unwrap();
        BoundaryCache::fill(folder.path(), key(Stored::F32), 9, tokens, |tokens| Ok(states(tokens))).unwrap();
        let others = [
            BoundaryKey { trunk: "u".into(), ..key(Stored::F32) },
            BoundaryKey { samples: "u".into(), ..key(Stored::F32) },
            BoundaryKey { layer: 1, ..key(Stored::F32) },
            key(Stored::F16),
        ];
        for other in others {
            assert!(BoundaryCache::open(folder.path(), other).unwrap().is_none());
        }
        let path = key(Stored::F32).path(folder.path(), STATES, "");
        let mut bytes = fs::read(&path).unwrap();
        bytes[64 + 5] ^= 1;
        fs::write(&path, &bytes).unwrap();
        let cache = BoundaryCache::open(folder.path(), key(Stored::F32)).unwrap().unwrap();
        assert!(cache.verify().is_err());
        assert_eq!(cache.states(1).unwrap(), states(&tokens(1).unwrap()));
        let read = cache.states(2);
        assert!(matches!(read, Err(TrainError::Malformed { .. })), "{read:?}");
        drop(cache);
        fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert!(BoundaryCache::open(folder.path(), key(Stored::F32)).is_err());
    }

    #[test]
    fn an_index_that_promises_more_than_there_can_be_is_damaged() {
        let folder = tempfile::tempdir().unwrap();
        let key = key(Stored::F32);
        BoundaryCache::fill(folder.path(), key.clone(), 1, tokens, |tokens| Ok(states(tokens))).unwrap();
        let most = Entry { offset: 0, tokens: u64::MAX / 12, hash: [0; HASH] }.to_bytes();
        fs::write(key.path(folder.path(), INDEX, ""), [most, most].concat()).unwrap();
        let opened = BoundaryCache::open(folder.path(), key);
        assert!(matches!(opened, Err(TrainError::Malformed { .. })), "{opened:?}");
    }

    #[test]
    fn two_do_not_fill_one_cache() {
        let folder = tempfile::tempdir().unwrap();
        let mut first = NewBoundaryCache::open(folder.path(), key(Stored::F16)).unwrap();
        let second = NewBoundaryCache::open(folder.path(), key(Stored::F16));
        assert!(matches!(second, Err(TrainError::Malformed { .. })), "{second:?}");
        first.push(&[1.0, 2.0, 3.0]).unwrap();
        assert_eq!(first.finish().unwrap().states(0).unwrap(), [1.0, 2.0, 3.0]);
    }

    #[test]
    fn what_is_finished_is_locked_until_it_has_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let new = NewBoundaryCache::open(folder.path(), key(Stored::F16)).unwrap();
        let _locked = new.put_in_place().unwrap();
        for kind in [STATES, INDEX] {
            let path = key(Stored::F16).path(folder.path(), kind, "");
            let taken = lock(&File::open(&path).unwrap(), &path, "busy");
            assert!(matches!(taken, Err(TrainError::Malformed { .. })), "{taken:?}");
        }
    }

    #[test]
    fn states_that_do_not_fit_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let mut new = NewBoundaryCache::open(folder.path(), key(Stored::F16)).unwrap();
        for value in [70_000.0, f32::NAN] {
            let refused = new.push(&[0.0, value, 0.0]);
            assert!(matches!(refused, Err(TrainError::StateTooLarge { sample: 0, .. })), "{refused:?}");
        }
        assert!(new.push(&[0.0; 4]).is_err());
        new.push(&[65_504.0, 0.0, 0.0]).unwrap();
        assert_eq!(new.finish().unwrap().states(0).unwrap()[0], 65_504.0);
    }
}
