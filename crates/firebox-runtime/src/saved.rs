//! Sessions that outlive their process.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use burn::tensor::{AllocationProperty, Bytes, DType, Device, Int, Tensor, TensorData};
use firebox_cache::{
    CacheError, KvType, LayerKv, LayerLayout, Layout, MappedKv, Outline, PagePool, RecurrentState,
    SequenceCache, SlotRange, Turn,
};
use firebox_kernels::attention::KvTensor;
use firebox_kernels::host_device;
use firebox_model::{Decoder, MixerMemory};
use firebox_store::{Dtype, NewTensor, NewTensorFile, StoreError, TensorFile};
use serde::{Deserialize, Serialize};

use crate::session::OWN_HEAD;
use crate::turn_record::TurnRecord;
use crate::{Model, RuntimeError, Session};

const FORMAT: &str = "firebox-session";
const VERSION: &str = "1";

const TOKENS: &str = "tokens";
const SEQUENCE: &str = "sequence";
const NOTE: &str = "note";

/// What keys and values depend on beside the tokens: they mean nothing to who differs in any of it.
#[derive(Debug)]
pub(crate) struct KvKey([(&'static str, String); 4]);

/// The field of the head that layers behind the split were those of.
const HEAD: &str = "head generation";

impl KvKey {
    pub fn new(model: &Model, decoder: &Decoder, kept: KvType, head: &str) -> Result<Self, RuntimeError> {
        let kept = match kept {
            KvType::F32 => "f32",
            KvType::F16 => "f16",
            KvType::Int8 => "int8",
        };
        let mut trunk = model.checkpoint().fingerprint(decoder.layers())?;
        for change in decoder.changes() {
            trunk = format!("{trunk}, with {change}");
        }
        Ok(Self([
            // What is kept for heads is kept where they begin.
            ("trunk", decoder.split().map_or(trunk.clone(), |split| format!("{trunk}, heads from {split}"))),
            (HEAD, head.into()),
            // Adapters are heads.
            ("adapter", "none".into()),
            ("kv format", kept.into()),
        ]))
    }

    /// A name for what some tokens come to: nothing else has the same.
    pub fn of_tokens(&self, tokens: &[u32]) -> String {
        let mut hasher = blake3::Hasher::new();
        hasher.update(format!("{FORMAT} {VERSION}").as_bytes());
        for (field, value) in &self.0 {
            hasher.update(format!("\n{field} {value}").as_bytes());
        }
        hasher.update(b"\n");
        hasher.update(&words(tokens));
        hasher.finalize().to_hex().to_string()
    }

    fn check(&self, file: &TensorFile, any_head: bool) -> Result<(), RuntimeError> {
        for (field, expected) in self.0.iter().filter(|(field, _)| !(any_head && *field == HEAD)) {
            let found = file.text(field)?;
            if found != expected {
                return Err(RuntimeError::Foreign {
                    path: file.path().to_owned(),
                    field,
                    found: found.to_owned(),
                    expected: expected.clone(),
                });
            }
        }
        Ok(())
    }
}

/// All that is no tensor.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    /// First slot, slot after the last, position.
    slot_ranges: Vec<(usize, usize, usize)>,
    turns: Vec<TurnRecord>,
    lost: Vec<TurnRecord>,
    position: usize,
    next_turn: u64,
    encoded_length: usize,
    expected_length: usize,
    /// Whether positions are still to be closed up. Files that do not say so were written before it was asked.
    #[serde(default)]
    open: bool,
}

/// A session in a file, opened. Keys and values lie in the file, and all sessions that are begun from it share them;
/// on accelerators, which read no files, they share one copy.
#[derive(Debug, Clone)]
pub struct Saved {
    decoder: Arc<Decoder>,
    kept: KvType,
    mapped: Arc<MappedKv>,
    outline: Outline,
    states: Vec<Option<RecurrentState>>,
    tokens: Vec<u32>,
    lost: Vec<Turn>,
    encoded_length: usize,
    expected_length: usize,
    open: bool,
    note: String,
    /// The head that layers behind the split were those of.
    head: Arc<str>,
}

impl Session {
    /// Writes all that is remembered to a file, which replaces the one that may be there: keys, values and states as
    /// they are, turns, and the tokens, those included that have not been through the layers yet. `model` is the one
    /// that the session was begun with.
    ///
    /// What it is told about how to work, such as [`with_turn_capacity`](Self::with_turn_capacity), is not part of it,
    /// and neither is how recurrent layers were before each turn: a restored session that goes back into what it was
    /// restored with computes what is left again.
    pub fn save(&self, path: impl AsRef<Path>, model: &Model) -> Result<(), RuntimeError> {
        self.save_with_note(path, model, "")
    }

    /// The same, with a text for who opens the file: what was said, for example.
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
        if self.has_lost() && !self.cache.is_empty() {
            // A file has turns with their keys or without.
            let mut lost = self.clone();
            lost.lose();
            return lost.save_with_note(path, model, note);
        }
        let path = path.as_ref();
        let outline = self.cache.outline();
        let layout = self.cache.pool().layout();
        let filled_by = self.filled_by.as_deref().unwrap_or_default();
        let KvKey(key) = KvKey::new(model, &self.decoder, layout.kv_dtype, filled_by)?;
        let record = Record {
            slot_ranges: outline
                .slot_ranges
                .iter()
                .map(|stretch| (stretch.slots.start, stretch.slots.end, stretch.position))
                .collect(),
            turns: outline.turns.iter().map(TurnRecord::from).collect(),
            lost: self.lost.iter().map(TurnRecord::from).collect(),
            position: outline.position,
            next_turn: outline.next_turn,
            encoded_length: self.encoded_length,
            expected_length: self.expected_length,
            open: self.memory.open,
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
                for part in parts(side.kept, side.width) {
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
            // Where no head has filled a layer, its pages may hold what other sequences left in them.
            let is_trunk = self.decoder.split().is_none_or(|split| index < split);
            let is_filled = is_trunk || index >= self.decoder.layers() || self.filled_by.is_some();
            let runs = self.cache.stored(index).unwrap_or_default();
            for (at, side) in sides(layer, layout.kv_dtype).iter().enumerate() {
                let stored = runs.iter().map(|run| match run {
                    LayerKv::Attention { keys, .. } if at == 0 => keys.clone(),
                    LayerKv::Attention { values, .. } => values.clone(),
                    LayerKv::HiddenStates(states) => states.clone(),
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

    /// A session that goes on where another one was [saved](Self::save): with the same model, keys and values kept the
    /// same way. What it remembers stays in the file and is only read; what is added takes pages.
    pub fn restore(path: impl AsRef<Path>, model: &Model, kept: KvType) -> Result<Self, RuntimeError> {
        model.restored(&Saved::open(path, model, kept)?)
    }
}

impl Saved {
    /// Maps a file, and refuses it where it is not whole or was saved by another model or with other numbers.
    pub fn open(path: impl AsRef<Path>, model: &Model, kept: KvType) -> Result<Self, RuntimeError> {
        let decoder = model.decoder()?;
        let layout = decoder.layout(kept);
        let file = opened(path.as_ref())?;
        // What was kept at the split is what any head begins with.
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
            lost: turns(record.lost),
            encoded_length: record.encoded_length,
            expected_length: record.expected_length,
            open: record.open,
            kept: layout.kv_dtype,
            note: file.text(NOTE)?.to_owned(),
            head: file.text(HEAD)?.into(),
            decoder,
        };
        saved.check(&file)?;
        Ok(saved)
    }

    /// Every token that was remembered, or had been accepted.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The turns that were remembered.
    pub fn turns(&self) -> &[Turn] {
        &self.outline.turns
    }

    /// What whoever saved it had to say.
    pub fn note(&self) -> &str {
        &self.note
    }

    /// A session that goes on from there, with pages of its own.
    pub fn session(&self) -> Result<Session, RuntimeError> {
        self.session_in(&PagePool::new(self.layout()))
    }

    /// The same, with pages from a pool that several sequences of the model share.
    pub fn session_in(&self, pool: &PagePool) -> Result<Session, RuntimeError> {
        let cache = SequenceCache::from_outline(pool, &self.outline, &self.mapped, self.states.clone())?;
        let mut session = Session::in_pool(self.decoder.clone(), pool);
        session.cache = cache;
        session.tokens.clone_from(&self.tokens);
        session.lost.clone_from(&self.lost);
        session.encoded_length = self.encoded_length;
        session.expected_length = self.expected_length;
        session.memory.open = self.open;
        session.filled_by = Some(self.head.clone());
        Ok(session)
    }

    pub(crate) fn decoder(&self) -> &Arc<Decoder> {
        &self.decoder
    }

    /// That of the pages that go on from it.
    pub(crate) fn layout(&self) -> Layout {
        self.decoder.layout(self.kept)
    }

    /// Whether a session can be begun from it.
    fn check(&self, file: &TensorFile) -> Result<(), RuntimeError> {
        let fault = |reason: String| Err(file.fault(SEQUENCE, reason).into());
        if let Err(error) = self.session() {
            return fault(error.to_string());
        }
        let (held, all) = (self.outline.tokens(), self.tokens.len());
        if held > all {
            return fault(format!("keys of {held} tokens, and only {all} tokens"));
        }
        if held > 0 && !self.lost.is_empty() {
            return fault("turns are to be found again that were not lost".into());
        }
        let longest = u32::MAX as usize;
        // Lost turns may have more tokens than there are: the sequence went back since.
        if self.lost.iter().any(|turn| turn.tokens > longest || turn.id.0 == u64::MAX) {
            return fault("no turn becomes so long, or has such an id".into());
        }
        if self.encoded_length > longest || self.expected_length > longest {
            return fault("no sequence becomes so long".into());
        }
        Ok(())
    }
}

/// A file of a session, mapped and found to be one.
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

/// What a layer remembers of positions, one of several.
struct Side {
    name: &'static str,
    kept: KvType,
    heads: usize,
    width: usize,
}

fn sides(layer: &LayerLayout, kept: KvType) -> Vec<Side> {
    match *layer {
        LayerLayout::Attention { kv_heads: heads, head_dim: width } => {
            ["keys", "values"].map(|name| Side { name, kept, heads, width }).into()
        }
        LayerLayout::HiddenStates { width } => {
            vec![Side { name: "states", kept: KvType::F32, heads: 1, width }]
        }
        LayerLayout::Recurrent => Vec::new(),
    }
}

/// A tensor of keys or values.
struct Part {
    suffix: &'static str,
    dtype: Dtype,
    /// Elements of one head at one position; absent where it is a single one.
    width: Option<usize>,
}

fn parts(kept: KvType, head_dim: usize) -> Vec<Part> {
    match kept {
        KvType::F32 => vec![Part { suffix: "", dtype: Dtype::F32, width: Some(head_dim) }],
        KvType::F16 => vec![Part { suffix: "", dtype: Dtype::F16, width: Some(head_dim) }],
        KvType::Int8 => vec![
            Part { suffix: ".words", dtype: Dtype::I32, width: Some(head_dim.div_ceil(size_of::<i32>())) },
            Part { suffix: ".scales", dtype: Dtype::F32, width: None },
        ],
    }
}

/// The bytes of one side of a layer, in as many tensors as it is kept in. Slots that nobody sees are zero: what was
/// forgotten is not written.
fn gathered(side: Vec<KvTensor>, outline: &Outline, kv_heads: usize) -> Result<Vec<Vec<u8>>, RuntimeError> {
    let mut tensors: Vec<Vec<u8>> = Vec::new();
    for (stored, SlotRange { slots, .. }) in side.into_iter().zip(&outline.slot_ranges) {
        let parts = match stored.part(0..slots.len()) {
            KvTensor::Float(numbers) => vec![read(numbers.try_into_data())?],
            KvTensor::Bytes { words, scales } => {
                vec![read(words.try_into_data())?, read(scales.try_into_data())?]
            }
        };
        for (index, part) in parts.iter().enumerate() {
            let bytes = part.as_bytes();
            let row = bytes.len() / (kv_heads * slots.len());
            if tensors.len() == index {
                tensors.push(vec![0; kv_heads * outline.slots() * row]);
            }
            for (head, bytes) in bytes.chunks_exact(slots.len() * row).enumerate() {
                let at = (head * outline.slots() + slots.start) * row;
                tensors[index][at..at + bytes.len()].copy_from_slice(bytes);
            }
        }
    }
    Ok(tensors)
}

/// What a recurrent layer carries, by the names of a file.
fn state(cache: &SequenceCache, layer: usize) -> Result<Vec<(String, TensorData)>, RuntimeError> {
    let mut tensors = Vec::new();
    if let Some(Some(state)) = cache.states().get(layer) {
        if let Some(memory) = &state.memory {
            tensors.push((format!("layers.{layer}.memory"), read(memory.clone().try_into_data())?));
        }
        if let Some(convolution) = &state.convolution {
            tensors.push((format!("layers.{layer}.convolution"), read(convolution.clone().try_into_data())?));
        }
    }
    Ok(tensors)
}

fn read<E: ToString>(data: Result<TensorData, E>) -> Result<TensorData, RuntimeError> {
    data.map_err(|error| RuntimeError::Readback { reason: error.to_string() })
}

fn stored_dtype(dtype: DType) -> Result<Dtype, RuntimeError> {
    match dtype {
        DType::F64 => Ok(Dtype::F64),
        DType::F32 => Ok(Dtype::F32),
        _ => Err(RuntimeError::Readback { reason: format!("a recurrent state came back in {dtype:?}") }),
    }
}

fn words(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

fn tokens(file: &TensorFile, vocab: usize) -> Result<Vec<u32>, RuntimeError> {
    let bytes = file.tensor(TOKENS, Dtype::U32)?.data;
    let tokens: Vec<u32> = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    match tokens.iter().find(|token| **token as usize >= vocab) {
        Some(token) => Err(file.fault(TOKENS, format!("{token}, in a vocabulary of {vocab}")).into()),
        None => Ok(tokens),
    }
}

/// Keys and values: on the CPU where they lie in the file, elsewhere copied to the device.
fn mapped(file: &TensorFile, layout: &Layout, outline: &Outline) -> Result<MappedKv, RuntimeError> {
    let slots = outline.slots();
    let stored = |layer: usize, side: &Side| -> Result<KvTensor, StoreError> {
        let name = |suffix: &str| format!("layers.{layer}.{}{suffix}", side.name);
        let floats = |dtype, kind| -> Result<KvTensor, StoreError> {
            let shape = [side.heads, slots, side.width];
            let bytes = file.shaped(&name(""), dtype, &shape)?;
            Ok(KvTensor::Float(Tensor::from_data(data(bytes, shape, kind), (&layout.device, kind))))
        };
        match side.kept {
            KvType::F32 => floats(Dtype::F32, DType::F32),
            KvType::F16 => floats(Dtype::F16, DType::F16),
            KvType::Int8 => {
                let shape = [side.heads, slots, side.width.div_ceil(size_of::<i32>())];
                let words = data(file.shaped(&name(".words"), Dtype::I32, &shape)?, shape, DType::I32);
                let shape = [side.heads, slots];
                let scales = data(file.shaped(&name(".scales"), Dtype::F32, &shape)?, shape, DType::F32);
                Ok(KvTensor::Bytes {
                    words: Tensor::<3, Int>::from_data(words, (&layout.device, DType::I32)),
                    scales: Tensor::from_data(scales, (&layout.device, DType::F32)),
                })
            }
        }
    };
    let layers = layout.layers.iter().enumerate().map(|(index, layer)| {
        Ok(match &sides(layer, layout.kv_dtype)[..] {
            _ if slots == 0 => None,
            [keys, values] => {
                Some(LayerKv::Attention { keys: stored(index, keys)?, values: stored(index, values)? })
            }
            [states] => Some(LayerKv::HiddenStates(stored(index, states)?)),
            _ => None,
        })
    });
    let layers: Result<_, StoreError> = layers.collect();
    Ok(MappedKv { layers: layers? })
}

/// Recurrent states, which are with the CPU whatever the device is.
fn states(file: &TensorFile, decoder: &Decoder) -> Result<Vec<Option<RecurrentState>>, RuntimeError> {
    let device = host_device(decoder.device());
    let memories = decoder.memories().iter().enumerate();
    let states = memories.map(|(index, memory)| match *memory {
        MixerMemory::State { memory, convolution } => {
            let name = |part: &str| format!("layers.{index}.{part}");
            Ok(Some(RecurrentState {
                memory: state_tensor(file, &name("memory"), memory, &device)?,
                convolution: state_tensor(file, &name("convolution"), convolution, &device)?,
            }))
        }
        MixerMemory::KeysAndValues { .. } => Ok(None),
    });
    // What is kept at the split comes behind the blocks.
    states.chain(decoder.split().map(|_| Ok(None))).collect()
}

fn state_tensor<const D: usize>(
    file: &TensorFile,
    name: &str,
    shape: Option<[usize; D]>,
    device: &Device,
) -> Result<Option<Tensor<D>>, RuntimeError> {
    let Some(shape) = shape else { return Ok(None) };
    let kind = match file.dtype(name) {
        None => return Ok(None),
        Some(Dtype::F64) => DType::F64,
        Some(_) => DType::F32,
    };
    let bytes = file.shaped(name, stored_dtype(kind)?, &shape)?;
    Ok(Some(Tensor::from_data(data(bytes, shape, kind), (device, kind))))
}

fn data<const D: usize>(bytes: bytes::Bytes, shape: [usize; D], dtype: DType) -> TensorData {
    TensorData::from_bytes(Bytes::from_shared(bytes, AllocationProperty::File), shape, dtype)
}

mod summary;

pub use summary::SavedSummary;

#[cfg(test)]
pub(crate) mod tests;
