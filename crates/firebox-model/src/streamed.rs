use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use burn::tensor::{Device, Tensor};
use firebox_store::{
    Checkpoint, LoadedTensors, ReadAt, ReadMethod, ReadObserver, ReadUnit, Scrap, Stream, StreamConfig,
    StreamReport, Tensors, read_rate, sample_units,
};

use crate::ModelError;
use crate::block::Block;
use crate::config::DecoderConfig;
use crate::decoder::indices;
use crate::expert_cache::ExpertCache;
use crate::experts::CachedExperts;
use crate::matrix::Matrix;
use crate::partition::Partition;
use crate::pieces::{Pieces, Together};
use crate::slot::Slot;
use crate::weights::{Weights, matrix};

/// How a decoder reads what it does not keep.
#[derive(Debug, Clone, Default)]
pub struct StreamedConfig {
    /// Buffers and threads.
    pub stream: StreamConfig,
    /// How files are read; measured where it is not said.
    pub method: Option<ReadMethod>,
    /// Bytes of memory beyond what this process takes that the system may keep files in.
    pub room: u64,
    /// What is read instead of the checkpoint's own files.
    pub source: Option<Arc<dyn ReadAt>>,
    /// What the memory of parts is made of, and is left to, that of others included.
    pub scrap: Option<Scrap>,
    /// Bytes a second that the disk is known to read; measured where it is not said.
    pub rate: Option<f64>,
    /// In how many pieces a block is read at most, each of which is kept or not: one, unless it is said. More of them leave less
    /// that is not kept where something has to be, and take smaller buffers, but a device that has memory of its own needs
    /// them twice.
    pub pieces: usize,
}

/// The weights of a decoder, in parts: its blocks, or pieces of them, then its unembedding in blocks of rows that are as large. Each
/// is kept in memory, or read whenever it is needed. Of the embedding only the rows of the tokens at hand are ever read.
///
/// What is kept changes nothing but the time and the memory that a pass takes, and may change between any two steps.
#[derive(Debug)]
pub struct StreamedWeights {
    checkpoint: Checkpoint,
    config: DecoderConfig,
    device: Device,
    stream: Stream,
    partition: Partition,
    cache: Option<Arc<ExpertCache>>,
    method: ReadMethod,
    /// Bytes a second that the disk was found to read.
    rate: f64,
    /// Rows come through the page cache: the same ones are asked for again and again.
    rows: Arc<dyn ReadAt>,
    embedding: String,
    hook: Slot<Box<dyn StepHook>>,
    turns: Turns,
    blocks: Vec<Pieces>,
    unembedding: Vec<Slot<Matrix>>,
}

/// Looks on after every whole pass: what is kept may change there.
pub trait StepHook: std::fmt::Debug + Send + Sync {
    /// A pass of so many rows has ended and has taken so long.
    fn after_pass(&self, streamed: &StreamedWeights, rows: usize, time: Duration);

    /// Whether a part that was read for a pass stays from then on.
    fn retains(&self, streamed: &StreamedWeights, part: usize) -> bool {
        let _ = (streamed, part);
        false
    }

    /// A part that was to stay does not after all.
    fn retain_failed(&self, streamed: &StreamedWeights, part: usize) {
        let _ = (streamed, part);
    }
}

/// Who streams: whole passes one after the other, which would only take each other's buffers, and single steps of passes
/// that others interleave. A thread of the pool that waits within one of them may begin another on top of it, which would wait
/// for a buffer that only the one below can give back; so nobody comes to the pool before it is their turn.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    turn: Mutex<()>,
    waiting: AtomicUsize,
}

impl Turns {
    /// Waits for it.
    pub fn wait(&self) -> MutexGuard<'_, ()> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        turn
    }

    /// Takes it where nobody has it or waits for it.
    pub fn attempt(&self) -> Option<MutexGuard<'_, ()>> {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            return None;
        }
        match self.turn.try_lock() {
            Ok(turn) => Some(turn),
            Err(TryLockError::Poisoned(turn)) => Some(turn.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl StreamedWeights {
    pub(crate) fn open(
        checkpoint: &Checkpoint,
        config: &DecoderConfig,
        root: &Weights<'_>,
        streaming: &StreamedConfig,
    ) -> Result<Self, ModelError> {
        let on_cpu = root.on(Device::flex());
        for index in 0..config.blocks.len() {
            // Built once without looking at what is large: a fault is told when the model is opened.
            config.load_block(index, &on_cpu)?;
        }
        let shape = [config.vocab_size, config.hidden_size];
        root.check(&config.embedding_name(), &shape)?;
        root.check(&config.unembedding_name(), &shape)?;
        let partition = Partition::in_pieces(checkpoint, config, streaming.pieces.max(1))?;
        let units = &partition.units;
        let (method, rate) = match (&streaming.source, streaming.method) {
            (None, None) => checkpoint.fastest_method(units, streaming.room)?,
            (source, method) => {
                let method = method.unwrap_or(ReadMethod::Direct);
                let disk = source.clone().unwrap_or_else(|| checkpoint.disk(method));
                let measured = || read_rate(&*disk, sample_units(units));
                (method, streaming.rate.map_or_else(measured, Ok)?)
            }
        };
        let disk = |method| streaming.source.clone().unwrap_or_else(|| checkpoint.disk(method));
        let cache = ExpertCache::open(checkpoint, config, root.device(), disk(method), streaming.stream)?;
        let rest = units.len() - partition.block_parts();
        Ok(Self {
            stream: Stream::of_scrap(disk(method), units.clone(), streaming.stream, streaming.scrap.clone())?,
            cache: cache.map(Arc::new),
            blocks: partition.blocks.iter().cloned().map(Pieces::new).collect(),
            partition,
            method,
            rate,
            rows: disk(ReadMethod::Buffered),
            embedding: config.embedding_name(),
            hook: Slot::new(),
            turns: Turns::default(),
            unembedding: (0..rest).map(|_| Slot::new()).collect(),
            checkpoint: checkpoint.clone(),
            config: config.clone(),
            device: root.device().clone(),
        })
    }

    /// How many parts there are. Those of blocks come first.
    pub fn parts(&self) -> usize {
        self.block_parts() + self.unembedding.len()
    }

    /// How many of them are of blocks.
    pub fn block_parts(&self) -> usize {
        self.partition.block_parts()
    }

    /// Which parts each block is read in.
    pub fn blocks(&self) -> &[Range<usize>] {
        &self.partition.blocks
    }

    /// What the parts are on disk, but for experts.
    pub fn units(&self) -> &[Arc<ReadUnit>] {
        &self.partition.units
    }

    /// Whether a part is kept in memory.
    pub fn is_resident(&self, part: usize) -> bool {
        match self.partition.block_of(part) {
            Some(block) => self.blocks[block].is_resident(part),
            None => self.unembedding[part - self.block_parts()].get().is_some(),
        }
    }

    /// How many buffers are needed at once: the parts of one block that are not kept, of the block with most of them.
    pub fn most_missing(&self) -> usize {
        self.blocks.iter().map(|pieces| pieces.missing().count()).max().unwrap_or(0)
    }

    /// Reads a part and keeps it.
    pub fn load(&self, part: usize) -> Result<(), ModelError> {
        if self.is_resident(part) {
            return Ok(());
        }
        let read = |unit| self.stream.read(unit);
        let Some(index) = self.partition.block_of(part) else {
            let rows = self.multiplier(&read(&self.partition.units[part])?)?;
            self.put(part, || self.unembedding[part - self.block_parts()].set(Some(rows)));
            return Ok(());
        };
        let pieces = &self.blocks[index];
        if pieces.is_one() {
            let block = self.built(index, &read(&self.partition.whole[index])?, None)?;
            self.put(part, || pieces.put_block(block));
        } else {
            let piece = read(&self.partition.units[part])?;
            self.put(part, || pieces.put(part, Arc::new(piece)));
        }
        Ok(())
    }

    fn put(&self, part: usize, put: impl FnOnce()) {
        // In that order: whoever sees that it is kept may let go of it at once, and then it is not to be skipped.
        self.stream.skip(part, true);
        put();
    }

    /// Keeps a part no longer. Its memory goes as soon as no pass is using it.
    pub fn evict(&self, part: usize) {
        self.stream.skip(part, false);
        match self.partition.block_of(part) {
            Some(block) => self.blocks[block].evict(part),
            None => self.unembedding[part - self.block_parts()].set(None),
        }
    }

    /// Has what a step of a pass needs read before other parts, unless it is kept, and says whether the pass can have it now
    /// without waiting. Steps are the blocks, then the unembedding, all of which its first missing part stands for.
    pub fn aim(&self, step: usize) -> bool {
        match self.blocks.get(step) {
            Some(pieces) => pieces.missing().next().is_none() || self.stream.aim(pieces.parts()),
            None => {
                let missing = (self.block_parts()..self.parts()).find(|part| !self.is_resident(*part));
                missing.is_none_or(|part| self.stream.aim(part..part + 1))
            }
        }
    }

    /// Nobody is going to need a part soon.
    pub fn rest(&self) {
        self.stream.rest();
    }

    /// How many buffers there may be from now on, the one in use included.
    pub fn set_buffers(&self, buffers: usize) {
        self.stream.set_buffers(buffers);
        if let Some(cache) = &self.cache {
            cache.set_buffers(buffers);
        }
    }

    /// How many buffers there may be.
    pub fn buffers(&self) -> usize {
        self.stream.buffers()
    }

    /// How many there are: those in use included, which may be more than there may be until they are given back.
    pub fn made_buffers(&self) -> usize {
        let experts = self.cache.as_ref().map_or(0, |cache| cache.made_buffers());
        self.stream.made_buffers().max(experts)
    }

    /// Bytes of one buffer; where there are experts, of two, since they have buffers of their own.
    pub fn buffer_bytes(&self) -> usize {
        self.stream.buffer_bytes() + self.cache.as_ref().map_or(0, |cache| cache.buffer_bytes())
    }

    /// How files are read, and how many bytes a second that was when it was measured.
    pub fn reading(&self) -> (ReadMethod, f64) {
        (self.method, self.rate)
    }

    /// What has been read so far, experts included.
    pub fn report(&self) -> StreamReport {
        self.stream.report() + self.expert_report()
    }

    /// What has been read of experts.
    pub fn expert_report(&self) -> StreamReport {
        self.cache.as_ref().map(|cache| cache.report()).unwrap_or_default()
    }

    /// Whether there are experts that can stay.
    pub fn has_experts(&self) -> bool {
        self.cache.is_some()
    }

    /// How many bytes of experts may stay in memory, beside those of the blocks that are kept. Those that are chosen
    /// most do.
    pub fn set_expert_room(&self, bytes: u64) {
        if let Some(cache) = &self.cache {
            cache.set_room(bytes);
        }
    }

    /// Bytes of experts that stay in memory at the moment, beside those of the blocks that are kept.
    pub fn expert_bytes(&self) -> u64 {
        self.cache.as_ref().map_or(0, |cache| cache.held())
    }

    /// Who looks on from now on.
    pub fn set_step_hook(&self, hook: Box<dyn StepHook>) {
        self.hook.set(Some(Arc::new(hook)));
    }

    /// Who looks on from now on while parts are read, and while experts are.
    pub fn set_observers(&self, parts: Arc<dyn ReadObserver>, experts: Arc<dyn ReadObserver>) {
        self.stream.set_observer(parts);
        if let Some(cache) = &self.cache {
            cache.set_observer(experts);
        }
    }

    pub(crate) fn passed(&self, rows: usize, time: Duration) {
        if let Some(hook) = self.hook.get() {
            hook.after_pass(self, rows, time);
        }
    }

    /// Reads ahead some parts and no others, until the next whole pass.
    pub fn read_ahead(&self, parts: Range<usize>) {
        self.stream.read_ahead(parts);
    }

    /// Bytes of memory that keeping a part takes.
    pub fn part_bytes(&self, part: usize) -> u64 {
        self.partition.part_bytes(part)
    }

    /// Whether somebody streams at the moment, or waits for it.
    pub fn is_taken(&self) -> bool {
        self.turns.attempt().is_none()
    }

    pub(crate) fn turns(&self) -> &Turns {
        &self.turns
    }

    pub(crate) fn expect(&self, layers: usize, logits: bool) {
        let of_layers = layers.checked_sub(1).map_or(0, |last| self.blocks[last].parts().end);
        self.stream.read_ahead(0..if logits { self.parts() } else { of_layers });
    }

    pub(crate) fn block(&self, index: usize) -> Result<Arc<Block>, ModelError> {
        let pieces = &self.blocks[index];
        if let Some(block) = pieces.block() {
            return Ok(block);
        }
        if let Some(cache) = &self.cache {
            // What is kept has all of its experts, and this has none.
            let experts = CachedExperts { cache: cache.clone(), layer: index };
            return self.built(index, &self.stream.take(pieces.parts().start)?, Some(experts));
        }
        let mut there: Vec<_> = pieces.parts().map(|part| pieces.piece(part)).collect();
        let missing: Vec<usize> =
            pieces.parts().zip(&there).filter(|(_, piece)| piece.is_none()).map(|(part, _)| part).collect();
        let read = self.stream.take_all(&missing)?;
        let read: Vec<Passing<'_>> =
            missing.iter().zip(read).map(|(part, loaded)| self.passing(*part, loaded)).collect();
        for passing in &read {
            there[passing.part - pieces.parts().start] = Some(passing.loaded.clone());
        }
        let there: Vec<_> = there.into_iter().flatten().collect();
        let block = self.built(index, &Together(&there), None)?;
        for passing in read {
            let part = passing.part;
            passing.stays(|loaded| match pieces.is_one() {
                true => pieces.put_block(block.clone()),
                false => pieces.put(part, loaded),
            });
        }
        if !pieces.is_one() && pieces.missing().next().is_none() {
            pieces.put_block(block.clone());
        }
        Ok(block)
    }

    pub(crate) fn embed(&self, tokens: &[u32]) -> Result<Tensor<2>, ModelError> {
        let rows: Vec<usize> = tokens.iter().map(|&token| token as usize).collect();
        let weight = self.checkpoint.gather(&self.embedding, &rows, &*self.rows)?;
        let rows = matrix(weight, [tokens.len(), self.config.hidden_size], &self.device)?;
        let all: Vec<u32> = (0..tokens.len() as u32).collect();
        Ok(rows.gather(indices(&all, &self.device)))
    }

    pub(crate) fn unembed(&self, hidden: &Tensor<2>) -> Result<Tensor<2>, ModelError> {
        let kept: Option<Vec<_>> = self.unembedding.iter().map(Slot::get).collect();
        let mut logits = match kept {
            // Threads meet once for all blocks that are there, not once for each.
            Some(blocks) => {
                let blocks: Vec<&Matrix> = blocks.iter().map(|rows| &**rows).collect();
                Matrix::multiply_each(hidden.clone(), &blocks)
            }
            None => {
                let blocks = 0..self.unembedding.len();
                blocks.map(|block| self.unembed_rows(block, hidden)).collect::<Result<_, _>>()?
            }
        };
        Ok(if logits.len() == 1 { logits.remove(0) } else { Tensor::cat(logits, 1) })
    }

    /// The logits of the tokens of one block of the unembedding, from normalised hidden states.
    pub fn unembed_rows(&self, block: usize, hidden: &Tensor<2>) -> Result<Tensor<2>, ModelError> {
        let rows = match self.unembedding[block].get() {
            Some(rows) => rows,
            None => {
                let part = self.block_parts() + block;
                let passing = self.passing(part, self.stream.take(part)?);
                let rows = self.multiplier(&passing.loaded)?;
                passing.stays(|_| self.unembedding[block].set(Some(rows.clone())));
                rows
            }
        };
        Ok(rows.multiply(hidden.clone()))
    }

    /// What was read for a pass, and stays if the hook says so.
    fn passing(&self, part: usize, loaded: LoadedTensors) -> Passing<'_> {
        let hook = self.hook.get().filter(|hook| hook.retains(self, part));
        Passing { streamed: self, part, loaded: Arc::new(loaded), hook }
    }

    fn built(
        &self,
        index: usize,
        tensors: &dyn Tensors,
        experts: Option<CachedExperts>,
    ) -> Result<Arc<Block>, ModelError> {
        let taken = RefCell::default();
        let weights = Weights::new(tensors, &self.device, &taken).without_experts(experts);
        self.config.load_block(index, &weights).map(Arc::new)
    }

    fn multiplier(&self, loaded: &LoadedTensors) -> Result<Arc<Matrix>, ModelError> {
        let names: Vec<_> = loaded.names().collect();
        let weight = loaded.weight(names.first().copied().unwrap_or_default())?;
        let rows = weight.shape[0];
        matrix(weight, [rows, self.config.hidden_size], &self.device).map(Arc::new)
    }
}

/// A part that was read for a pass. If the hook wants it to stay, and it does not, the hook is told.
struct Passing<'a> {
    streamed: &'a StreamedWeights,
    part: usize,
    loaded: Arc<LoadedTensors>,
    /// Who wants it to stay.
    hook: Option<Arc<Box<dyn StepHook>>>,
}

impl Passing<'_> {
    /// Puts it where it stays, if it is to.
    fn stays(mut self, put: impl FnOnce(Arc<LoadedTensors>)) {
        if self.hook.take().is_some() {
            self.streamed.stream.detach(&self.loaded);
            self.streamed.put(self.part, || put(self.loaded.clone()));
        }
    }
}

impl Drop for Passing<'_> {
    fn drop(&mut self) {
        if let Some(hook) = self.hook.take() {
            hook.retain_failed(self.streamed, self.part);
        }
    }
}
