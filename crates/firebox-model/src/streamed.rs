//! The weights of a decoder that are read from disk while it runs, but for the parts that are resident.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::{Device, Tensor};
use firebox_store::{
    BufferPool, Checkpoint, LoadedTensors, ReadAt, ReadMethod, ReadObserver, ReadUnit, Stream, StreamConfig,
    StreamReport, Tensors, read_rate, sample_units,
};

use crate::ModelError;
use crate::block::Block;
use crate::config::DecoderConfig;
use crate::expert_cache::ExpertCache;
use crate::experts::CachedExperts;
use crate::layer_inputs::DiskRows;
use crate::matrix::Matrix;
use crate::partition::Partition;
use crate::pieces::{JoinedPieces, Pieces};
use crate::slot::Slot;
use crate::stream_lock::StreamLock;
use crate::weights::{Weights, matrix};

/// How a decoder streams its weights.
#[derive(Debug, Clone, Default)]
pub struct StreamedConfig {
    /// Buffers and reader threads.
    pub stream: StreamConfig,
    /// How files are read. Measured if absent.
    pub method: Option<ReadMethod>,
    /// Bytes of memory beyond this process that the page cache may take.
    pub room: u64,
    /// The source that is read instead of the checkpoint's files.
    pub source: Option<Arc<dyn ReadAt>>,
    /// The pool that buffers are made from and evicted parts are left to.
    pub buffers: Option<BufferPool>,
    /// Bytes a second that the disk reads. Measured if absent.
    pub rate: Option<f64>,
    /// The most pieces that a block is read in, each resident or not; 0 stands for 1. With more pieces fewer bytes are missing where
    /// something has to be, and buffers are smaller, but a device with memory of its own needs the pieces twice.
    pub pieces: usize,
}

/// The weights of a decoder in parts: its blocks, or pieces of them, then its unembedding in blocks of rows that are as large. Each part
/// is either resident or streamed: read whenever a pass needs it. Of the embedding only the rows of the tokens at hand are read.
///
/// Residency affects the time and the memory of a pass, never its results. It may change between any two steps.
#[derive(Debug)]
pub struct StreamedWeights {
    config: DecoderConfig,
    device: Device,
    stream: Stream,
    partition: Partition,
    experts: Option<Arc<ExpertCache>>,
    method: ReadMethod,
    /// Bytes a second that the disk reads.
    rate: f64,
    embedding: DiskRows,
    hook: Slot<Box<dyn StepHook>>,
    lock: StreamLock,
    blocks: Vec<Pieces>,
    unembedding: Vec<Slot<Matrix>>,
}

/// Called between the steps of passes. It may change which parts are resident.
pub trait StepHook: std::fmt::Debug + Send + Sync {
    /// Called after a whole pass with its rows and its duration.
    fn after_pass(&self, weights: &StreamedWeights, rows: usize, time: Duration);

    /// Returns whether a part that was read for a pass stays resident.
    fn retains(&self, weights: &StreamedWeights, part: usize) -> bool {
        let _ = (weights, part);
        false
    }

    /// Called when a part could not be made resident that was to be retained.
    fn retain_failed(&self, weights: &StreamedWeights, part: usize) {
        let _ = (weights, part);
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
            // Built once without reading large tensors, so that errors are reported when the model is opened.
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
        let experts = ExpertCache::open(checkpoint, config, root.device(), disk(method), streaming.stream)?;
        let rest = units.len() - partition.block_parts();
        Ok(Self {
            stream: Stream::with_pool(
                disk(method),
                units.clone(),
                streaming.stream,
                streaming.buffers.clone(),
            )?,
            experts: experts.map(Arc::new),
            blocks: partition.blocks.iter().cloned().map(Pieces::new).collect(),
            partition,
            method,
            rate,
            embedding: DiskRows {
                checkpoint: checkpoint.clone(),
                name: config.embedding_name(),
                disk: disk(ReadMethod::Buffered),
            },
            hook: Slot::new(),
            lock: StreamLock::default(),
            unembedding: (0..rest).map(|_| Slot::new()).collect(),
            config: config.clone(),
            device: root.device().clone(),
        })
    }

    /// The number of parts. Those of blocks come first.
    pub fn parts(&self) -> usize {
        self.block_parts() + self.unembedding.len()
    }

    /// The number of parts that belong to blocks.
    pub fn block_parts(&self) -> usize {
        self.partition.block_parts()
    }

    /// The parts of each block.
    pub fn blocks(&self) -> &[Range<usize>] {
        &self.partition.blocks
    }

    /// The parts on disk, without experts.
    pub fn units(&self) -> &[Arc<ReadUnit>] {
        &self.partition.units
    }

    /// Whether a part is resident.
    pub fn is_resident(&self, part: usize) -> bool {
        match self.partition.block_of(part) {
            Some(block) => self.blocks[block].is_resident(part),
            None => self.unembedding[part - self.block_parts()].get().is_some(),
        }
    }

    /// The number of buffers that a pass needs at once: the most missing parts of any block.
    pub fn most_missing(&self) -> usize {
        self.blocks.iter().map(|pieces| pieces.missing().count()).max().unwrap_or(0)
    }

    /// Reads a part and makes it resident.
    pub fn load(&self, part: usize) -> Result<(), ModelError> {
        if self.is_resident(part) {
            return Ok(());
        }
        let read = |unit| self.stream.read(unit);
        let Some(index) = self.partition.block_of(part) else {
            let rows = self.unembedding_rows(&read(&self.partition.units[part])?)?;
            self.put(part, || self.unembedding[part - self.block_parts()].set(Some(rows)));
            return Ok(());
        };
        let pieces = &self.blocks[index];
        if pieces.is_one() {
            let block = self.build_block(index, &read(&self.partition.whole[index])?, None)?;
            self.put(part, || pieces.put_block(block));
        } else {
            let piece = read(&self.partition.units[part])?;
            self.put(part, || pieces.put(part, Arc::new(piece)));
        }
        Ok(())
    }

    fn put(&self, part: usize, put: impl FnOnce()) {
        // In this order: another thread may evict the part as soon as it is resident, and then it must not be skipped.
        self.stream.skip(part, true);
        put();
    }

    /// Evicts a part. Its memory is released as soon as no pass uses it.
    pub fn evict(&self, part: usize) {
        self.stream.skip(part, false);
        match self.partition.block_of(part) {
            Some(block) => self.blocks[block].evict(part),
            None => self.unembedding[part - self.block_parts()].set(None),
        }
    }

    /// Reads the missing parts of a pass's step before all others. Returns whether the step can run now without waiting. Steps are the
    /// blocks, then the unembedding, for which its first missing part stands.
    pub fn prioritize(&self, step: usize) -> bool {
        match self.blocks.get(step) {
            Some(pieces) => pieces.missing().next().is_none() || self.stream.prioritize(pieces.parts()),
            None => {
                let missing = (self.block_parts()..self.parts()).find(|part| !self.is_resident(*part));
                missing.is_none_or(|part| self.stream.prioritize(part..part + 1))
            }
        }
    }

    /// Prioritizes no part any more.
    pub fn clear_priority(&self) {
        self.stream.clear_priority();
    }

    /// Sets how many buffers there may be, those in use included.
    pub fn set_buffers(&self, buffers: usize) {
        self.stream.set_buffers(buffers);
        if let Some(experts) = &self.experts {
            experts.set_buffers(buffers);
        }
    }

    /// How many buffers there may be.
    pub fn buffers(&self) -> usize {
        self.stream.buffers()
    }

    /// How many buffers there are: surplus ones stay until they are released.
    pub fn made_buffers(&self) -> usize {
        let experts = self.experts.as_ref().map_or(0, |experts| experts.made_buffers());
        self.stream.made_buffers().max(experts)
    }

    /// Waits until there are, and may be, fewer buffers than `count`, or until the time is over.
    pub fn wait_for_fewer_buffers(&self, count: usize, timeout: Duration) {
        let until = Instant::now() + timeout;
        self.stream.wait_for_fewer_buffers(count, timeout);
        if let Some(experts) = &self.experts {
            experts.wait_for_fewer_buffers(count, until.saturating_duration_since(Instant::now()));
        }
    }

    /// Bytes of one buffer; with experts, which have buffers of their own, of two.
    pub fn buffer_bytes(&self) -> usize {
        self.stream.buffer_bytes() + self.experts.as_ref().map_or(0, |experts| experts.buffer_bytes())
    }

    /// How files are read, and the measured rate in bytes a second.
    pub fn reading(&self) -> (ReadMethod, f64) {
        (self.method, self.rate)
    }

    /// What has been read so far, experts included.
    pub fn report(&self) -> StreamReport {
        self.stream.report() + self.expert_report()
    }

    /// What has been read of experts.
    pub fn expert_report(&self) -> StreamReport {
        self.experts.as_ref().map(|experts| experts.report()).unwrap_or_default()
    }

    /// Whether there are experts that can be resident.
    pub fn has_experts(&self) -> bool {
        self.experts.is_some()
    }

    /// Sets how many bytes of experts may be resident, beside those of resident blocks. The ones that are chosen most are.
    pub fn set_expert_room(&self, bytes: u64) {
        if let Some(experts) = &self.experts {
            experts.set_room(bytes);
        }
    }

    /// Bytes of resident experts, beside those of resident blocks.
    pub fn expert_bytes(&self) -> u64 {
        self.experts.as_ref().map_or(0, |experts| experts.held())
    }

    /// Sets the hook that is called between steps.
    pub fn set_step_hook(&self, hook: Box<dyn StepHook>) {
        self.hook.set(Some(Arc::new(hook)));
    }

    /// Sets the observers of reads: of parts, and of experts.
    pub fn set_observers(&self, parts: Arc<dyn ReadObserver>, experts: Arc<dyn ReadObserver>) {
        self.stream.set_observer(parts);
        if let Some(cache) = &self.experts {
            cache.set_observer(experts);
        }
    }

    pub(crate) fn pass_ended(&self, rows: usize, time: Duration) {
        if let Some(hook) = self.hook.get() {
            hook.after_pass(self, rows, time);
        }
    }

    /// Reads ahead these parts and no others, until the next whole pass.
    pub fn read_ahead(&self, parts: Range<usize>) {
        self.stream.read_ahead(parts);
    }

    /// Bytes of memory that a part takes while it is resident.
    pub fn part_bytes(&self, part: usize) -> u64 {
        self.partition.part_bytes(part)
    }

    /// Whether an interleaved pass has to wait for others. They wait for it if they come later.
    pub fn is_busy(&self) -> bool {
        !self.lock.is_free()
    }

    /// Lets other passes begin: the interleaved one that was asked for by [`is_busy`](Self::is_busy) is not wanted any more.
    pub fn clear_wanted(&self) {
        self.lock.clear_wanted();
    }

    pub(crate) fn lock(&self) -> &StreamLock {
        &self.lock
    }

    /// Reads ahead what passes through the first layers need, and the unembedding if logits are wanted.
    pub(crate) fn read_ahead_layers(&self, layers: usize, logits: bool) {
        let of_layers = layers.checked_sub(1).map_or(0, |last| self.blocks[last].parts().end);
        self.stream.read_ahead(0..if logits { self.parts() } else { of_layers });
    }

    pub(crate) fn block(&self, index: usize) -> Result<Arc<Block>, ModelError> {
        let pieces = &self.blocks[index];
        if let Some(block) = pieces.block() {
            return Ok(block);
        }
        if let Some(cache) = &self.experts {
            // A resident block has all of its experts; this one has none.
            let experts = CachedExperts { cache: cache.clone(), layer: index };
            return self.build_block(
                index,
                &self.released_stream().take(pieces.parts().start)?,
                Some(experts),
            );
        }
        let mut there: Vec<_> = pieces.parts().map(|part| pieces.piece(part)).collect();
        let missing: Vec<usize> =
            pieces.parts().zip(&there).filter(|(_, piece)| piece.is_none()).map(|(part, _)| part).collect();
        let read = self.released_stream().take_all(&missing)?;
        let read: Vec<ReadPart<'_>> =
            missing.iter().zip(read).map(|(part, loaded)| self.read_part(*part, loaded)).collect();
        for part in &read {
            there[part.part - pieces.parts().start] = Some(part.loaded.clone());
        }
        let there: Vec<_> = there.into_iter().flatten().collect();
        let block = self.build_block(index, &JoinedPieces(&there), None)?;
        for read in read {
            let part = read.part;
            read.retain(|loaded| match pieces.is_one() {
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
        self.embedding.gather(tokens, self.config.hidden_size, &self.device)
    }

    /// The rows of another matrix.
    pub(crate) fn rows(&self, name: String) -> DiskRows {
        DiskRows { name, ..self.embedding.clone() }
    }

    pub(crate) fn unembed(&self, hidden: &Tensor<2>) -> Result<Tensor<2>, ModelError> {
        let resident: Option<Vec<_>> = self.unembedding.iter().map(Slot::get).collect();
        let mut logits = match resident {
            // Threads synchronize once for all blocks, not once for each.
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
                let read = self.read_part(part, self.released_stream().take(part)?);
                let rows = self.unembedding_rows(&read.loaded)?;
                read.retain(|_| self.unembedding[block].set(Some(rows.clone())));
                rows
            }
        };
        Ok(rows.multiply(hidden.clone()))
    }

    /// Returns the stream once uploads have left its buffers: an accelerator holds them until it is handed what was asked of it,
    /// and with all buffers held nothing could be read.
    fn released_stream(&self) -> &Stream {
        // What follows reports a lost device.
        let _ = self.device.flush();
        &self.stream
    }

    /// A part that was read for a pass, and whether it is to be retained.
    fn read_part(&self, part: usize, loaded: LoadedTensors) -> ReadPart<'_> {
        let hook = self.hook.get().filter(|hook| hook.retains(self, part));
        ReadPart { weights: self, part, loaded: Arc::new(loaded), hook }
    }

    fn build_block(
        &self,
        index: usize,
        tensors: &dyn Tensors,
        experts: Option<CachedExperts>,
    ) -> Result<Arc<Block>, ModelError> {
        let taken = RefCell::default();
        let weights = Weights::new(tensors, &self.device, &taken);
        let weights = self.config.block_weights(index, &weights);
        Block::load(&self.config.blocks[index], &weights, experts).map(Arc::new)
    }

    fn unembedding_rows(&self, loaded: &LoadedTensors) -> Result<Arc<Matrix>, ModelError> {
        let names: Vec<_> = loaded.names().collect();
        let weight = loaded.weight(names.first().copied().unwrap_or_default())?;
        let rows = weight.shape[0];
        matrix(weight, [rows, self.config.hidden_size], &self.device).map(Arc::new)
    }
}

/// A part that was read for a pass. If it was to be retained and is dropped before, the hook is told.
struct ReadPart<'a> {
    weights: &'a StreamedWeights,
    part: usize,
    loaded: Arc<LoadedTensors>,
    /// The hook that retains the part.
    hook: Option<Arc<Box<dyn StepHook>>>,
}

impl ReadPart<'_> {
    /// Makes the part resident with `put`, if it is to be retained.
    fn retain(mut self, put: impl FnOnce(Arc<LoadedTensors>)) {
        if self.hook.take().is_some() {
            self.weights.stream.detach(&self.loaded);
            self.weights.put(self.part, || put(self.loaded.clone()));
        }
    }
}

impl Drop for ReadPart<'_> {
    fn drop(&mut self) {
        if let Some(hook) = self.hook.take() {
            hook.retain_failed(self.weights, self.part);
        }
    }
}
