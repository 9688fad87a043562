//! Memory that several models share, and how a model is opened into it.

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use burn::tensor::Device;
use firebox_cache::{KvType, PAGE_TOKENS};
use firebox_model::{Architecture, StreamedConfig, StreamedDecoder};
use firebox_store::{Checkpoint, ReadMethod, StreamConfig};

use super::config::CONFIG;
use super::disk_queue::{QueuePosition, QueuedFiles};
use super::entitlement::Entitlement;
use super::share::ModelShare;
use super::weights::WeightCache;
use super::{Residency, charged_pages, kv_bytes_at_split};
use crate::governor::{Governor, GovernorConfig, ResidencyPlan};
use crate::memory::resident_bytes;
use crate::planner::{
    DeviceProfile, FEWEST_BUFFERS, Mode, PROGRAM_BYTES, Plan, Rates, Shape, decoder_shape, plan,
};
use crate::{Account, Budget, Charge, MemoryError, Model, RuntimeError, pressure};

/// A step time that no step exceeds: the governor of a model that shares its budget never finds steps too slow.
const UNBOUNDED: Duration = Duration::from_secs(1 << 20);

/// How a model shares memory with others.
#[derive(Debug, Clone, PartialEq)]
pub struct ShareOptions {
    /// Bytes that other models cannot take, or as many of them as the model can use. What it holds beyond them may be taken back.
    pub reserved: u64,
    /// Reserves the minimum with which the model can always answer: room for some text, and streaming buffers.
    /// Otherwise other models may take that too while no request uses the model.
    pub guaranteed: bool,
    /// Loads all weights when the model is opened and never evicts them, so that it always answers at once.
    pub pinned: bool,
    /// Loads as much as fits beside other models when the model is opened, instead of when it is needed.
    pub preload: bool,
    /// The expected length of sequences, instead of the length that the model was trained for.
    pub context: Option<usize>,
    /// The type of cached keys and values.
    pub kv_dtype: KvType,
    /// Rows of a prompt that go through the layers together.
    pub rows: usize,
    /// How files are read.
    pub method: ReadMethod,
}

impl Default for ShareOptions {
    fn default() -> Self {
        Self {
            reserved: 0,
            guaranteed: false,
            pinned: false,
            preload: true,
            context: None,
            kv_dtype: KvType::default(),
            rows: CONFIG.prefill_rows,
            method: ReadMethod::Direct,
        }
    }
}

impl ShareOptions {
    /// Options of a model that is always resident.
    pub fn pinned() -> Self {
        Self { pinned: true, ..Self::default() }
    }

    /// Options of a model that is loaded on demand.
    pub fn on_demand() -> Self {
        Self { preload: false, ..Self::default() }
    }
}

/// Memory that several models share, and the disk that they are read from.
///
/// What does not fit is streamed. A part that was read for a pass stays resident if there is room for it, or if less urgent models hold
/// parts: idle models give up theirs first, then those whose requests have a lower priority. Of two equally urgent models the smaller one
/// gets the memory, because the same bytes are read more often for it, but a model that waits for its first token keeps what it has. In
/// the first pass of a model that cannot be resident as a whole nothing stays, because a request waits for it. Parts are evicted for what
/// a model cannot do without: its buffers, keys and values.
///
/// An encoder cannot be streamed: it is resident from the time it is opened.
///
/// The models of one budget belong into one engine, the `EngineCore` of `firebox-engine`, which sets their urgency and runs one at a time.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use firebox_runtime::device;
/// use firebox_runtime::residency::{SharedBudget, ShareOptions};
///
/// let (shared, cpu) = (SharedBudget::new(900 << 20)?, device("cpu")?);
/// let router = shared.open("models/router", &cpu, &ShareOptions::pinned())?;
/// let specialist = shared.open("models/specialist", &cpu, &ShareOptions::default())?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct SharedBudget {
    budget: Budget,
    cache: Arc<WeightCache>,
    /// Charges of open encoders. Locked while a model is opened, so that two openers do not count on the same bytes.
    encoders: Arc<Mutex<Vec<Weak<Charge>>>>,
}

impl SharedBudget {
    /// A budget of `memory` bytes for the whole process, including what it holds already.
    pub fn new(memory: u64) -> Result<Self, RuntimeError> {
        Self::beside_program(memory, 0)
    }

    /// A budget for the whole process, which is expected to take `more` bytes beyond its models and what it holds already.
    pub fn beside_program(memory: u64, more: u64) -> Result<Self, RuntimeError> {
        let budget = Budget::new(memory);
        let least = resident_bytes().unwrap_or(0).saturating_add(more);
        let program = budget.charge(Account::Program, least.saturating_add(CONFIG.shared_program_slack))?;
        Self::with_program(budget, Some(program), least)
    }

    /// A budget for the models alone. The rest of the process is not charged.
    pub fn beside(budget: &Budget) -> Result<Self, RuntimeError> {
        Self::with_program(budget.clone(), None, 0)
    }

    fn with_program(budget: Budget, program: Option<Charge>, least: u64) -> Result<Self, RuntimeError> {
        Ok(Self { cache: WeightCache::new(&budget, program, least)?, encoders: Arc::default(), budget })
    }

    /// Returns the budget, with its accounts.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Opens a model that shares this memory. Other models may run meanwhile.
    pub fn open(
        &self,
        path: impl AsRef<Path>,
        device: &Device,
        options: &ShareOptions,
    ) -> Result<Model, RuntimeError> {
        let (checkpoint, position) = (Checkpoint::open(path)?, Arc::<QueuePosition>::default());
        let Architecture::Decoder(config) = Architecture::from_json(checkpoint.config())? else {
            return self.open_encoder(checkpoint, device);
        };
        let shape = decoder_shape(&checkpoint, &config, options.kv_dtype)?;
        let tokenizer = match checkpoint.text().tokenizer {
            Some(_) => shape.fixed_bytes.saturating_sub(PROGRAM_BYTES),
            None => 0,
        };
        let building = self.cache.charge(Account::Program, CONFIG.tokenizer_build_factor * tokenizer)?;
        let source = QueuedFiles::new(&checkpoint, options.method, &self.cache.disk, &position);
        let profile = DeviceProfile::conservative();
        let streaming = StreamedConfig {
            // While one reader reads, the other allocates memory for the next part: both take about as long.
            stream: StreamConfig { buffers: 0, readers: 2 },
            method: Some(options.method),
            room: 0,
            source: Some(Arc::new(source)),
            buffers: Some(self.cache.buffers.clone()),
            // The first answer should not wait for a measurement.
            rate: Some(profile.read_bytes_per_second),
            // Missing parts are read for every token, and buffers take the place of resident parts.
            pieces: if *device == Device::flex() { CONFIG.pieces } else { 1 },
        };
        let (mut model, decoder) = Model::with_streamed_decoder(checkpoint, device, &streaming)?;
        let residency = self.admit(&model, decoder, shape, options, position, building)?;
        model.residency = Some(Arc::new(residency));
        model.report();
        Ok(model)
    }

    /// Charges a model that was opened, adds it to the cache and loads its parts.
    fn admit(
        &self,
        model: &Model,
        decoder: StreamedDecoder,
        mut shape: Shape,
        options: &ShareOptions,
        position: Arc<QueuePosition>,
        mut building: Charge,
    ) -> Result<Residency, RuntimeError> {
        let weights = decoder.weights();
        let encoders = self.lock_opening();
        let path = model.checkpoint().path();
        let context = options.context.unwrap_or(decoder.config().max_positions);
        shape.kv_bytes_per_token += kv_bytes_at_split(&decoder);
        // The program itself was charged once for all models.
        let logits = (decoder.config().vocab_size * size_of::<f32>()) as u64;
        let tokenizer =
            if model.tokenizer().is_ok() { shape.fixed_bytes.saturating_sub(PROGRAM_BYTES) } else { logits };
        shape.fixed_bytes = tokenizer + CONFIG.model_overhead;
        building.resize(building.bytes() / CONFIG.tokenizer_build_factor)?;
        // Allocators hold back memory that was needed only while the tokenizer was built.
        self.cache.charge_program_now()?;
        let rates = DeviceProfile::conservative().rates(&shape)?;
        let others = self.required_by_others(&encoders);
        let mut plan = self.plan(path, &shape, &rates, context, others)?;
        plan.chunk = plan.chunk.min(options.rows.max(1));

        let bytes: u64 = (0..weights.parts()).map(|part| weights.part_bytes(part)).sum();
        let pieces = weights.blocks().iter().map(Range::len).max().unwrap_or(1);
        let ring = (FEWEST_BUFFERS * pieces * weights.buffer_bytes()) as u64;
        let standing = shape.fixed_bytes + if options.pinned { bytes } else { ring };
        let kv_bytes = (context as u64).saturating_mul(shape.kv_bytes_per_token);
        let usable = (shape.fixed_bytes + bytes + ring).saturating_add(kv_bytes);
        let least =
            (standing + PAGE_TOKENS as u64 * shape.kv_bytes_per_token).max(options.reserved.min(usable));
        let activations = plan.chunk as u64 * shape.activation_bytes_per_row;
        let taken = others + self.cache.activations_with(activations);
        self.check_total(path, taken + least)?;
        // Pages may take the place of resident parts, but not of what models require.
        let pages = (self.budget.total() - taken - standing) / shape.kv_bytes_per_token.max(1);
        plan.kv_tokens =
            (usize::try_from(pages).unwrap_or(usize::MAX) / PAGE_TOKENS * PAGE_TOKENS).min(context);
        let budget = self.slice()?;
        let entitlement = Entitlement::new(options.pinned, bytes, least);
        let cached = self.cache.add(ModelShare::entitled(&budget, weights, entitlement)?);
        drop(building);
        let standing = vec![cached.charge(Account::Program, shape.fixed_bytes, CONFIG.open_wait)?];
        let is_reserved = options.pinned || options.guaranteed || options.reserved > 0;
        cached.reserve(if is_reserved { least } else { 0 })?;
        // The last charge that may be refused: it is for all models, and stays if this one is not opened.
        self.cache.charge_activations(activations)?;
        cached.set_open();
        drop(encoders);
        if options.pinned || options.preload {
            cached.preload(weights, options.pinned)?;
        }
        let pool = charged_pages(&decoder, options.kv_dtype, &cached);
        // The governor only evicts: parts are loaded by the passes that read them.
        let plan_of_none =
            ResidencyPlan { keep: Vec::new(), step_time: UNBOUNDED, streaming_step_time: UNBOUNDED };
        let governor = Governor::new(plan_of_none, pressure::system(), GovernorConfig::default());
        let row_bytes = shape.activation_bytes_per_row;
        let queue_position = Some(position);
        let charged =
            Residency { plan, rates, budget, pool, cached, decoder, row_bytes, queue_position, standing };
        charged.governed(governor)
    }

    fn open_encoder(&self, checkpoint: Checkpoint, device: &Device) -> Result<Model, RuntimeError> {
        let mut encoders = self.lock_opening();
        let weights: u64 = checkpoint.segments().iter().map(|segment| segment.bytes).sum();
        let bytes = weights + CONFIG.model_overhead;
        let others = self.required_by_others(&encoders);
        self.check_total(checkpoint.path(), others + self.cache.activations_with(0) + bytes)?;
        let charge = Arc::new(self.slice()?.insist(Account::Weights, bytes)?);
        let mut model = Model::from_checkpoint(checkpoint, device)?;
        self.cache.charge_program_now()?;
        encoders.retain(|charge| charge.strong_count() > 0);
        encoders.push(Arc::downgrade(&charge));
        model.paid = Some(charge);
        Ok(model)
    }

    /// A slice of the budget for one model. Parts of all models are evicted for charges that the model requires.
    fn slice(&self) -> Result<Budget, RuntimeError> {
        let (budget, cache) = (self.budget.slice(0)?, Arc::downgrade(&self.cache));
        budget.ask_when_short(move || cache.upgrade().is_some_and(|cache| cache.release_some()));
        Ok(budget)
    }

    /// Returns the bytes that the program and all open models take at least.
    fn required_by_others(&self, encoders: &[Weak<Charge>]) -> u64 {
        let encoders: u64 = encoders.iter().filter_map(Weak::upgrade).map(|charge| charge.bytes()).sum();
        self.cache.required_bytes() + encoders
    }

    /// Checks that all models could run that take at least `needed` bytes together.
    fn check_total(&self, path: &Path, needed: u64) -> Result<(), RuntimeError> {
        let memory = self.budget.total();
        if needed > memory {
            return Err(RuntimeError::TooLittleShared { model: path.to_owned(), needed, memory });
        }
        Ok(())
    }

    fn plan(
        &self,
        path: &Path,
        shape: &Shape,
        rates: &Rates,
        context: usize,
        others: u64,
    ) -> Result<Plan, RuntimeError> {
        let memory = self.budget.total();
        plan(shape, rates, memory, Mode::Throughput, context).map_err(|error| match error {
            MemoryError::TooLittleMemory { needed, memory, .. } => {
                RuntimeError::TooLittleShared { model: path.to_owned(), needed: others + needed, memory }
            }
            error => error.into(),
        })
    }

    fn lock_opening(&self) -> MutexGuard<'_, Vec<Weak<Charge>>> {
        // A failed opener leaves the list as it was.
        self.encoders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
