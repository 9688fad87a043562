//! The heads installed in a model: installing, opening, rolling back and removing them.

#[cfg(test)]
pub(super) mod tests;

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::head::{HEAD, HeadFiles, HeadManifest, INSTALL_AGAIN, damaged, read_manifest};
use super::steps;
use super::table::{HeadGeneration, HeadRow, HeadTable, TABLE, is_head_name};
use crate::checkpoint::Checkpoint;
use crate::error::{Fault, StoreError};
use crate::files::{self, File};
use crate::folder::{Folder, MAX_JSON};
use crate::manifest::ManifestSegment;
use crate::mapping::Mapping;
use crate::parts::SourceKind;
use crate::trunk::trunk_hash;

/// The directory of heads, below that of the model.
const FOLDER: &str = "heads";

// Names of heads do not begin with a dot, so none collides with these.

/// Locked while heads are changed.
const LOCK: &str = ".lock";

/// The next table, before it replaces the current one.
const NEXT_TABLE: &str = ".heads.json";

/// The head being copied.
const INSTALLING: &str = ".installing";

/// Bytes copied at a time.
const COPY_BUFFER_BYTES: usize = 4 << 20;

/// A row of the table of installed heads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadInfo {
    /// The name.
    pub name: String,
    /// The generation in use.
    pub generation: u64,
    /// Its hash; see [`HeadFiles::hash`].
    pub hash: String,
    /// The generation that [`Heads::rollback`] goes back to.
    pub previous: Option<u64>,
    /// The first layer that belongs to heads.
    pub split: usize,
}

/// The heads of a model.
///
/// Every call reads the disk, because other processes may change heads at any time, one after the other. A change is
/// complete when its call returns; if the process ends earlier, it is either complete or not made at all.
///
/// ```no_run
/// use firebox_store::{Heads, Tensors};
///
/// # fn main() -> Result<(), firebox_store::StoreError> {
/// let heads = Heads::open("models/qwen3-0.6b")?;
/// heads.install("runs/code/head", "code")?;
/// let head = heads.head("code")?;
/// let norm = head.weight("model.norm.weight")?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Heads {
    model: Checkpoint,
    folder: Folder,
}

impl Heads {
    /// The heads of the model at a path.
    pub fn open(model: impl AsRef<Path>) -> Result<Self, StoreError> {
        Self::of(Checkpoint::open(model)?)
    }

    /// The heads of an open model.
    pub fn of(model: Checkpoint) -> Result<Self, StoreError> {
        if model.source() == SourceKind::Gguf {
            return Err(StoreError::HeadsNeedImport { model: model.path().to_owned() });
        }
        let folder = Folder::open(model.path())?;
        Ok(Self { model, folder })
    }

    /// The model.
    pub fn model(&self) -> &Checkpoint {
        &self.model
    }

    /// The installed heads, sorted by name.
    pub fn list(&self) -> Result<Vec<HeadInfo>, StoreError> {
        let table = self.table()?;
        Ok(table.heads.iter().map(|row| info(row, &table)).collect())
    }

    /// Opens a head: maps its files and reads their headers, never the weights.
    ///
    /// In a bundle the trunk's hash is checked again, which needs no reading. In a Hugging Face directory it was checked at
    /// installation, and [`verify`](crate::verify()) checks it again.
    pub fn head(&self, name: &str) -> Result<HeadFiles, StoreError> {
        self.retry_if_table_changed(|table| {
            let row = self.row(table, name)?;
            let head = self.open_generation(table, name, &row.active)?;
            if self.model.source() == SourceKind::Bundle {
                self.check_trunk(head.path(), head.manifest(), &trunk_hash(&self.model, head.split())?)?;
            }
            Ok(head)
        })
    }

    /// Copies a head into the model under a name and replaces an existing head of that name. The replaced generation is kept
    /// for a [rollback](Self::rollback), and the one before it is removed. Installing the generation in use again renews its
    /// files and keeps the rollback target.
    ///
    /// Files are hashed during the copy, and the trunk's hash is compared; in a Hugging Face directory this reads the trunk.
    pub fn install(&self, source: impl AsRef<Path>, name: &str) -> Result<HeadInfo, StoreError> {
        check_name(name)?;
        let source = Folder::open(source.as_ref())?;
        let (json, manifest) = read_manifest(&source, "")?;
        // Before taking the lock, because hashing the trunk can take long.
        self.check_trunk(source.path(), &manifest, &trunk_hash(&self.model, manifest.split)?)?;
        let _lock = self.lock()?;
        let mut table = self.table()?;
        self.check_split(&table, manifest.split)?;
        self.clear(&table)?;

        let generation = table.next_generation;
        let next =
            generation.checked_add(1).ok_or_else(|| self.fault("next_generation", "no number is left"))?;
        let place = self.path(name);
        if let Err(error) = self.stage_and_move(&source, &json, &manifest, &place, generation) {
            // Report the failure; the next change removes remains at the latest.
            let _ = self.clear(&table);
            return Err(error);
        }
        let active = HeadGeneration { generation, hash: blake3::hash(&json).to_hex().to_string() };
        let previous = table.row(name).and_then(|row| {
            if row.active.hash == active.hash { row.previous.clone() } else { Some(row.active.clone()) }
        });
        let row = HeadRow { name: name.to_owned(), active, previous };
        table.put(row.clone());
        table.split = Some(manifest.split);
        table.next_generation = next;
        self.commit(&table)?;
        Ok(info(&row, &table))
    }

    /// Copies a head into a staging directory and moves it beside the existing ones. It stays invisible until the table
    /// lists it.
    fn stage_and_move(
        &self,
        source: &Folder,
        json: &[u8],
        manifest: &HeadManifest,
        place: &Path,
        generation: u64,
    ) -> Result<(), StoreError> {
        let staged = self.path(INSTALLING);
        steps::create_dir(&staged)?;
        for segment in &manifest.segments {
            copy_segment(source, segment, &staged)?;
        }
        steps::write_file(&staged.join(HEAD), json)?;
        steps::sync_folder(&staged)?;
        // Opened the way users will open it: a head that cannot be opened is not installed.
        HeadFiles::open(&staged)?;
        steps::create_dir(place)?;
        steps::rename(&staged, &place.join(generation.to_string()))?;
        steps::sync_folder(place)
    }

    /// Puts the previous generation back into use and keeps the current one in its place, so that a second rollback undoes the
    /// first.
    pub fn rollback(&self, name: &str) -> Result<HeadInfo, StoreError> {
        check_name(name)?;
        self.check_there(name)?;
        let _lock = self.lock()?;
        let mut table = self.table()?;
        let mut row = self.row(&table, name)?.clone();
        let Some(previous) = row.previous.take() else {
            return Err(StoreError::NoEarlierHead {
                model: self.model.path().to_owned(),
                name: name.to_owned(),
                generation: row.active.generation,
            });
        };
        // A generation that cannot be opened is not put back into use.
        self.open_generation(&table, name, &previous)?;
        row.previous = Some(std::mem::replace(&mut row.active, previous));
        table.put(row.clone());
        self.commit(&table)?;
        Ok(info(&row, &table))
    }

    /// Removes a head and its previous generation. Open handles stay valid.
    pub fn remove(&self, name: &str) -> Result<(), StoreError> {
        check_name(name)?;
        self.check_there(name)?;
        let _lock = self.lock()?;
        let mut table = self.table()?;
        self.row(&table, name)?;
        table.take(name);
        // Remains of earlier changes are removed after the commit, together with the head.
        self.commit(&table)
    }

    /// Reads all heads, rollback targets included, and checks their hashes and that they belong to this trunk. `on_bytes` gets
    /// the head's name, the bytes read since the last call, and the total.
    pub(crate) fn verify(
        &self,
        on_bytes: &mut dyn FnMut(&str, u64, u64),
    ) -> Result<Vec<HeadInfo>, StoreError> {
        let (table, heads) = self.retry_if_table_changed(|table| {
            let mut heads = Vec::new();
            for row in &table.heads {
                for generation in row.generations() {
                    heads.push((row.name.clone(), self.open_generation(table, &row.name, generation)?));
                }
            }
            Ok((table.clone(), heads))
        })?;
        let Some(split) = table.split else { return Ok(Vec::new()) };
        let trunk = trunk_hash(&self.model, split)?;
        let total = heads.iter().fold(0, |sum: u64, (_, head)| sum.saturating_add(head.bytes()));
        for (name, head) in &heads {
            self.check_trunk(head.path(), head.manifest(), &trunk)?;
            head.verify(&mut |bytes| on_bytes(name, bytes, total))?;
        }
        Ok(table.heads.iter().map(|row| info(row, &table)).collect())
    }

    /// Visits what the table lists. If the table is replaced meanwhile, listed files may be gone, so a failure means nothing
    /// then and the visit is repeated.
    fn retry_if_table_changed<T>(
        &self,
        visit: impl Fn(&HeadTable) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut table = self.table()?;
        loop {
            let result = visit(&table);
            if result.is_ok() {
                return result;
            }
            let now = self.table()?;
            if now == table {
                return result;
            }
            table = now;
        }
    }

    fn table(&self) -> Result<HeadTable, StoreError> {
        let name = format!("{FOLDER}/{TABLE}");
        let Some(json) = self.folder.read(&name, MAX_JSON)? else { return Ok(HeadTable::new()) };
        HeadTable::parse(&json).map_err(|fault| fault.in_file(&self.path(TABLE)))
    }

    /// Replaces the table, which commits a change, and removes files that it no longer lists.
    fn commit(&self, table: &HeadTable) -> Result<(), StoreError> {
        let (next, path) = (self.path(NEXT_TABLE), self.path(TABLE));
        let mut json =
            serde_json::to_vec_pretty(table).map_err(|error| StoreError::io(&path, "write", error.into()))?;
        json.push(b'\n');
        steps::remove(&next)?;
        steps::write_file(&next, &json)?;
        // A table that is not durable could lose all heads.
        if files::read(&next).map_err(|error| StoreError::io(&next, "read", error))? != json {
            return Err(Fault::new(
                "table",
                "the disk has not kept what was written to it; try again, or move the model",
            )
            .in_file(&next));
        }
        steps::rename(&next, &path)?;
        steps::sync_folder(&self.path(""))?;
        // The change is committed. Remains are harmless until the next change removes them.
        let _ = self.clear(table);
        Ok(())
    }

    /// Removes files that no table lists: replaced generations, and remains of interrupted processes. Other files in the folder
    /// are kept.
    fn clear(&self, table: &HeadTable) -> Result<(), StoreError> {
        steps::remove(&self.path(NEXT_TABLE))?;
        steps::remove(&self.path(INSTALLING))?;
        for name in directories(&self.path(""))? {
            if !is_head_name(&name) {
                continue;
            }
            let place = self.path(&name);
            let row = table.row(&name);
            for number in directories(&place)? {
                // A generation has exactly one spelling; other names are not ours.
                let generation = number.parse().ok().filter(|known: &u64| known.to_string() == number);
                let Some(generation) = generation else { continue };
                let listed =
                    row.is_some_and(|row| row.generations().any(|known| known.generation == generation));
                if !listed {
                    steps::remove(&place.join(number))?;
                }
            }
            if row.is_none() {
                steps::remove_if_empty(&place)?;
            }
        }
        Ok(())
    }

    /// Waits for the lock on changes. The system releases it when the process ends, in whatever way.
    fn lock(&self) -> Result<File, StoreError> {
        steps::create_dir(&self.path(""))?;
        let path = self.path(LOCK);
        if let Some(metadata) = fs::symlink_metadata(&path).ok().filter(|metadata| !metadata.is_file()) {
            return Err(StoreError::io(
                &path,
                format!("lock (it is {:?})", metadata.file_type()),
                ErrorKind::InvalidInput.into(),
            ));
        }
        let file = File::open_with(&path, fs::File::options().write(true).create(true).truncate(false))
            .map_err(|error| StoreError::io(&path, "create", error))?;
        file.system().lock().map_err(|error| StoreError::io(&path, "lock", error))?;
        Ok(file)
    }

    fn open_generation(
        &self,
        table: &HeadTable,
        name: &str,
        generation: &HeadGeneration,
    ) -> Result<HeadFiles, StoreError> {
        let number = generation.generation;
        let head = HeadFiles::open_within(&self.folder, &format!("{FOLDER}/{name}/{number}/"), number)?;
        if head.hash() != generation.hash {
            return Err(StoreError::HashMismatch {
                file: head.path().join(HEAD),
                segment: HEAD.into(),
                expected: generation.hash.clone(),
                found: head.hash().to_owned(),
                remedy: INSTALL_AGAIN,
            });
        }
        if Some(head.split()) != table.split {
            return Err(self.fault("split", &format!("head {name} begins at layer {}", head.split())));
        }
        Ok(head)
    }

    /// Checked before anything is created, so that removing an unknown head leaves no directory behind.
    fn check_there(&self, name: &str) -> Result<(), StoreError> {
        self.row(&self.table()?, name).map(drop)
    }

    fn row<'a>(&self, table: &'a HeadTable, name: &str) -> Result<&'a HeadRow, StoreError> {
        check_name(name)?;
        table.row(name).ok_or_else(|| StoreError::UnknownHead {
            model: self.model.path().to_owned(),
            name: name.to_owned(),
            installed: table.names(),
        })
    }

    fn check_trunk(&self, head: &Path, manifest: &HeadManifest, found: &str) -> Result<(), StoreError> {
        if manifest.trunk == found {
            return Ok(());
        }
        Err(StoreError::WrongTrunk {
            head: head.to_owned(),
            model: self.model.path().to_owned(),
            split: manifest.split,
            expected: manifest.trunk.clone(),
            found: found.to_owned(),
        })
    }

    /// Checks that a head that begins at this layer fits the installed ones. The head to be replaced counts too, because a
    /// rollback needs the same trunk.
    fn check_split(&self, table: &HeadTable, split: usize) -> Result<(), StoreError> {
        let Some(installed) = table.split.filter(|installed| *installed != split) else { return Ok(()) };
        let (model, others) = (self.model.path().to_owned(), table.names());
        Err(StoreError::WrongSplit { model, split, installed, others })
    }

    fn fault(&self, field: &str, reason: &str) -> StoreError {
        Fault::new(field, reason).in_file(&self.path(TABLE))
    }

    fn path(&self, name: &str) -> PathBuf {
        let folder = self.folder.path().join(FOLDER);
        if name.is_empty() { folder } else { folder.join(name) }
    }
}

/// The names of a model's heads, whatever its format.
pub(crate) fn installed_names(model: &Checkpoint) -> Result<Vec<String>, StoreError> {
    if model.source() == SourceKind::Gguf {
        return Ok(Vec::new());
    }
    Ok(Heads::of(model.clone())?.table()?.names())
}

fn info(row: &HeadRow, table: &HeadTable) -> HeadInfo {
    HeadInfo {
        name: row.name.clone(),
        generation: row.active.generation,
        hash: row.active.hash.clone(),
        previous: row.previous.as_ref().map(|previous| previous.generation),
        // A table with rows has a split.
        split: table.split.unwrap_or_default(),
    }
}

fn check_name(name: &str) -> Result<(), StoreError> {
    if is_head_name(name) { Ok(()) } else { Err(StoreError::HeadName { name: name.to_owned() }) }
}

/// The names of the subdirectories of a directory, without links.
fn directories(path: &Path) -> Result<Vec<String>, StoreError> {
    let fail = |error| StoreError::io(path, "list", error);
    let mut names = Vec::new();
    for entry in files::list(path).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        if entry.file_type().map_err(fail)?.is_dir()
            && let Ok(name) = entry.file_name().into_string()
        {
            names.push(name);
        }
    }
    Ok(names)
}

/// Copies a segment and checks that it matches the manifest.
fn copy_segment(source: &Folder, segment: &ManifestSegment, to: &Path) -> Result<(), StoreError> {
    let field = format!("segment {}: file", segment.id);
    let mapping = Mapping::open(&source.resolve(&source.path().join(HEAD), &field, &segment.file)?)?;
    let path = to.join(&segment.file);
    let mut file = steps::create(&path)?;
    let (mut hasher, mut at, length) = (blake3::Hasher::new(), 0, mapping.bytes().len());
    let mut buffer = vec![0; length.min(COPY_BUFFER_BYTES)];
    while at < length {
        let len = buffer.len().min(length - at);
        mapping.read_at(&mut buffer[..len], at)?;
        hasher.update(&buffer[..len]);
        steps::write(&path, &mut file, &buffer[..len])?;
        at += len;
    }
    let found = hasher.finalize().to_hex().to_string();
    if found != segment.hash {
        return Err(damaged(mapping.path(), segment, found));
    }
    steps::sync(&path, &file)
}
