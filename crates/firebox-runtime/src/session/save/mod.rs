//! Session files: a session's tokens, turns, keys, values and states, which another process continues from.

mod key;
mod summary;
mod tensors;
mod turn_record;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use firebox_cache::{
    CacheError, KvType, LayerKv, Layout, MappedKv, Outline, PagePool, RecurrentState, SequenceCache,
    SlotRange, Turn,
};
use firebox_model::Decoder;
use firebox_store::{Dtype, NewTensor, NewTensorFile, StoreError, TensorFile};
use serde::{Deserialize, Serialize};

use super::{OWN_HEAD, Session};
use crate::{Model, RuntimeError};
use key::HEAD;
pub(crate) use key::KvKey;
pub use summary::SessionSummary;
use tensors::{gathered, mapped, parts, sides, state, states, stored_dtype, tokens, words};
use turn_record::TurnRecord;

const FORMAT: &str = "firebox-session";
const VERSION: &str = "1";

const TOKENS: &str = "tokens";
const SEQUENCE: &str = "sequence";
const NOTE: &str = "note";

/// The parts of a session that are not tensors.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    /// First slot, slot after the last, position.
    #[serde(rename = "stretches")]
    slot_ranges: Vec<(usize, usize, usize)>,
    turns: Vec<TurnRecord>,
    #[serde(rename = "lost")]
    uncached_turns: Vec<TurnRecord>,
    position: usize,
    next_turn: u64,
    encoded_length: usize,
    expected_length: usize,
    /// Whether positions are still to be compacted. Absent in the first files.
    #[serde(rename = "open", default)]
    needs_compaction: bool,
}

/// An opened session file. On the CPU, keys and values stay in the file and all sessions that continue it share them; on other
/// devices they share one copy.
#[derive(Debug, Clone)]
pub struct SessionFile {
    decoder: Arc<Decoder>,
    kv_type: KvType,
    mapped: Arc<MappedKv>,
    outline: Outline,
    states: Vec<Option<RecurrentState>>,
    tokens: Vec<u32>,
    uncached_turns: Vec<Turn>,
    encoded_length: usize,
    expected_length: usize,
    needs_compaction: bool,
    note: String,
    /// The head that computed the layers behind the split.
    head: Arc<str>,
}

impl Session {
    /// Writes the session to a file, which replaces an existing one: keys, values and states as they are, turns, and all
    /// tokens, those included that have not been through the layers. `model` is the one that the session was created with.
    ///
    /// Settings such as [`with_turn_capacity`](Self::with_turn_capacity) are not saved. Neither are the states that recurrent
    /// layers had before each turn, so a restored session that goes back to before its end recomputes what is left.
    pub fn save(&self, path: impl AsRef<Path>, model: &Model) -> Result<(), RuntimeError> {
        self.save_with_note(path, model, "")
    }

    /// Writes the session to a file with a note, a conversation's messages for example.
    pub fn save_with_note(
        &self,
        path: impl AsRef<Path>,
        model: &Model,
        note: &str,
    ) -> Result<(), RuntimeError> {
        if !Arc::ptr_eq(&model.decoder()?, &self.decoder) {
            let reason = "the session was begun with another model than the one it is to be saved for".into();
            return Err(CacheError::Mismatch { reason }.into());
        }
        if self.needs_recompute() && !self.cache.is_empty() {
            // The turns of a file are all cached or all uncached.
            let mut uncached = self.clone();
            uncached.drop_cache();
            return uncached.save_with_note(path, model, note);
        }
        let path = path.as_ref();
        let outline = self.cache.outline();
        let layout = self.cache.pool().layout();
        let cached_head = self.cached_head.as_deref().unwrap_or_default();
        let KvKey(key) = KvKey::new(model, &self.decoder, layout.kv_dtype, cached_head)?;
        let record = Record {
            slot_ranges: outline
                .slot_ranges
                .iter()
                .map(|stretch| (stretch.slots.start, stretch.slots.end, stretch.position))
                .collect(),
            turns: outline.turns.iter().map(TurnRecord::from).collect(),
            uncached_turns: self.uncached_turns.iter().map(TurnRecord::from).collect(),
            position: outline.position,
            next_turn: outline.next_turn,
            encoded_length: self.encoded_length,
            expected_length: self.expected_length,
            needs_compaction: self.retention.needs_compaction,
        };
        let record =
            serde_json::to_string(&record).map_err(|error| StoreError::io(path, "write", error.into()))?;
        let mut metadata: BTreeMap<String, String> =
            key.into_iter().map(|(field, value)| (field.to_owned(), value)).collect();
        for (field, value) in
            [("format", FORMAT), ("version", VERSION), (SEQUENCE, record.as_str()), (NOTE, note)]
        {
            metadata.insert(field.into(), value.into());
        }
        let mut tensors =
            vec![NewTensor { name: TOKENS.into(), dtype: Dtype::U32, shape: vec![self.tokens.len()] }];
        for (index, layer) in layout.layers.iter().enumerate() {
            for side in sides(layer, layout.kv_dtype).iter().filter(|_| !outline.slot_ranges.is_empty()) {
                for part in parts(side.kv_type, side.width) {
                    let shape = match part.width {
                        Some(width) => vec![side.heads, outline.slots(), width],
                        None => vec![side.heads, outline.slots()],
                    };
                    let name = format!("layers.{index}.{}{}", side.name, part.suffix);
                    tensors.push(NewTensor { name, dtype: part.dtype, shape });
                }
            }
            for (name, data) in state(&self.cache, index)? {
                let dtype = stored_dtype(data.dtype())?;
                tensors.push(NewTensor { name, dtype, shape: data.shape().to_vec() });
            }
        }
        let mut file = NewTensorFile::create(path, &metadata, &tensors)?;
        file.write(&words(&self.tokens))?;
        for (index, layer) in layout.layers.iter().enumerate() {
            // Pages of a layer that no head has computed may hold what other sequences left in them.
            let is_trunk = self.decoder.split().is_none_or(|split| index < split);
            let is_filled = is_trunk || index >= self.decoder.layers() || self.cached_head.is_some();
            let runs = self.cache.stored(index).unwrap_or_default();
            for (at, side) in sides(layer, layout.kv_dtype).iter().enumerate() {
                let stored = runs.iter().map(|run| match run {
                    LayerKv::Attention { keys, .. } if at == 0 => keys.clone(),
                    LayerKv::Attention { values, .. } => values.clone(),
                    LayerKv::Latents(held) | LayerKv::HiddenStates(held) => held.clone(),
                });
                for mut bytes in gathered(stored.collect(), &outline, side.heads)? {
                    if !is_filled {
                        bytes.fill(0);
                    }
                    file.write(&bytes)?;
                }
            }
            for (_, data) in state(&self.cache, index)? {
                file.write(data.as_bytes())?;
            }
        }
        Ok(file.publish()?)
    }

    /// Continues a [saved](Self::save) session of the same model, whose keys and values have the same type. They stay in the
    /// file, which is only read; new tokens take pages.
    pub fn restore(path: impl AsRef<Path>, model: &Model, kv_type: KvType) -> Result<Self, RuntimeError> {
        model.restored(&SessionFile::open(path, model, kv_type)?)
    }
}

impl SessionFile {
    /// Maps a file. Refuses one that is not whole, or that was saved by another model or with another type of keys and values.
    pub fn open(path: impl AsRef<Path>, model: &Model, kv_type: KvType) -> Result<Self, RuntimeError> {
        let decoder = model.decoder()?;
        let layout = decoder.layout(kv_type);
        let file = opened(path.as_ref())?;
        // Any head can be replayed from the states at the split.
        KvKey::new(model, &decoder, layout.kv_dtype, OWN_HEAD)?.check(&file, decoder.split().is_some())?;
        let record = record(&file)?;
        let turns = |records: Vec<TurnRecord>| records.into_iter().map(Turn::from).collect();
        let slot_ranges = record.slot_ranges.into_iter();
        let outline = Outline {
            slot_ranges: slot_ranges
                .map(|(start, end, position)| SlotRange { slots: start..end, position })
                .collect(),
            turns: turns(record.turns),
            position: record.position,
            next_turn: record.next_turn,
        };
        let saved = Self {
            mapped: Arc::new(mapped(&file, &layout, &outline)?),
            states: states(&file, &decoder)?,
            outline,
            tokens: tokens(&file, decoder.config().vocab_size)?,
            uncached_turns: turns(record.uncached_turns),
            encoded_length: record.encoded_length,
            expected_length: record.expected_length,
            needs_compaction: record.needs_compaction,
            kv_type: layout.kv_dtype,
            note: file.text(NOTE)?.to_owned(),
            head: file.text(HEAD)?.into(),
            decoder,
        };
        saved.check(&file)?;
        Ok(saved)
    }

    /// Returns all its tokens, cached or accepted.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns its cached turns.
    pub fn turns(&self) -> &[Turn] {
        &self.outline.turns
    }

    /// Returns the note it was saved with.
    pub fn note(&self) -> &str {
        &self.note
    }

    /// Creates a session that continues it, with a pool of its own.
    pub fn session(&self) -> Result<Session, RuntimeError> {
        self.session_in(&PagePool::new(self.layout()))
    }

    /// Creates a session that continues it, with pages from a pool that several sessions of the model share.
    pub fn session_in(&self, pool: &PagePool) -> Result<Session, RuntimeError> {
        let cache = SequenceCache::from_outline(pool, &self.outline, &self.mapped, self.states.clone())?;
        let mut session = Session::in_pool(self.decoder.clone(), pool);
        session.cache = cache;
        session.tokens.clone_from(&self.tokens);
        session.uncached_turns.clone_from(&self.uncached_turns);
        session.encoded_length = self.encoded_length;
        session.expected_length = self.expected_length;
        session.retention.needs_compaction = self.needs_compaction;
        session.cached_head = Some(self.head.clone());
        Ok(session)
    }

    pub(crate) fn decoder(&self) -> &Arc<Decoder> {
        &self.decoder
    }

    /// Returns the layout of the pages that continue it.
    pub(crate) fn layout(&self) -> Layout {
        self.decoder.layout(self.kv_type)
    }

    /// Refuses contents that no session could have.
    fn check(&self, file: &TensorFile) -> Result<(), RuntimeError> {
        let fault = |reason: String| Err(file.fault(SEQUENCE, reason).into());
        if let Err(error) = self.session() {
            return fault(error.to_string());
        }
        let (held, all) = (self.outline.tokens(), self.tokens.len());
        if held > all {
            return fault(format!("keys of {held} tokens, but only {all} tokens"));
        }
        if held > 0 && !self.uncached_turns.is_empty() {
            return fault("some turns have keys and values, and some have none".into());
        }
        let longest = u32::MAX as usize;
        // Uncached turns may have more tokens than there are: the sequence may have been rewound since.
        if self.uncached_turns.iter().any(|turn| turn.tokens > longest || turn.id.0 == u64::MAX) {
            return fault("the length or the id of a turn is out of range".into());
        }
        if self.encoded_length > longest || self.expected_length > longest {
            return fault("the length of the sequence is out of range".into());
        }
        Ok(())
    }
}

/// Maps a file, and refuses one that is not a session of a known version.
fn opened(path: &Path) -> Result<TensorFile, RuntimeError> {
    let file = TensorFile::open(path)?;
    let format = file.text("format")?;
    if format != FORMAT {
        return Err(file.fault("format", format!("{format:?} is not {FORMAT:?}")).into());
    }
    let version = file.text("version")?;
    if version != VERSION {
        let reason = format!("{version:?}; this Firebox knows {VERSION:?}");
        return Err(StoreError::Unsupported {
            file: file.path().to_owned(),
            field: "version".into(),
            reason,
        }
        .into());
    }
    Ok(file)
}

fn record(file: &TensorFile) -> Result<Record, RuntimeError> {
    Ok(serde_json::from_str(file.text(SEQUENCE)?).map_err(|error| file.fault(SEQUENCE, error.to_string()))?)
}

#[cfg(test)]
pub(crate) mod tests;
