use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use firebox_cache::{KvType, PAGE_TOKENS, PagePool};
use firebox_model::{Architecture, Decoder, StreamedConfig};
use firebox_store::{Checkpoint, ReadMethod, StreamConfig};

use super::disk_queue::{QueuePosition, QueuedFiles};
use super::eviction::{READING_CHECK, Reclaimed, SLOWEST_READ, ask, insist};
use super::share::{ModelShare, ModelShares, lock};
use super::weights::{Pages, ResidencyHook, Tenancy, WeightCache};
use super::{Residency, monitor};
use crate::governor::{Governor, GovernorConfig, ResidencyPlan};
use crate::memory::resident_bytes;
use crate::planner::{
    DeviceProfile, FEWEST_BUFFERS, Mode, PROGRAM_BYTES, Plan, Rates, Shape, decoder_shape, plan,
};
use crate::{Account, Budget, Charge, MemoryError};
use crate::{Model, RuntimeError, pressure};

/// What the program comes to take when models run, beyond what it takes before: code that runs, and what the allocators of
/// several threads keep. What it takes in truth is looked at all the time, and charged instead.
const PROGRAM: u64 = 40 << 20;

/// What a model takes beside its weights and the table of its tokenizer: its norms, and what they are found by.
const BESIDE: u64 = 256 << 10;

/// While a tokenizer is made, it takes so many times what it takes then: what it is read from is there as well.
const MAKING: u64 = 3;

/// Steps are never too dear: see [`SharedBudget`].
const NEVER: Duration = Duration::from_secs(1 << 20);

/// Rows of a prompt that go through the layers together, where nobody says: many share one read of the weights, and what
/// they take all models together need once.
const ROWS: usize = 128;

/// Pieces that a block is read in, each of which stays or not: about as large as its largest matrices.
const PIECES: usize = 4;

/// On what terms a model shares memory with others.
#[derive(Debug, Clone, PartialEq)]
pub struct ShareOptions {
    /// Bytes that are its own, whatever others want, or as many of them as it can use. What it takes beyond them may be taken
    /// back.
    pub reserved: u64,
    /// Whether what it cannot do without is its own at any time, so that it always answers: room for some text, and the buffers
    /// that it streams through. Otherwise others may have that too as long as nobody asks it anything.
    pub guaranteed: bool,
    /// Whether all of its weights stay in memory from the beginning, so that it always answers at once.
    pub pinned: bool,
    /// Whether as much of it as fits beside others is read when it is opened, and not when it is needed.
    pub preload: bool,
    /// How long its sequences are expected to become, instead of as long as it was trained for.
    pub context: Option<usize>,
    /// What keys and values are kept in.
    pub kept: KvType,
    /// How many rows of a prompt go through its layers together.
    pub rows: usize,
    /// How its files are read.
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
            kept: KvType::default(),
            rows: ROWS,
            method: ReadMethod::Direct,
        }
    }
}

impl ShareOptions {
    /// In memory whatever happens.
    pub fn pinned() -> Self {
        Self { pinned: true, ..Self::default() }
    }

    /// Read when it is needed, and not before.
    pub fn on_demand() -> Self {
        Self { preload: false, ..Self::default() }
    }
}

/// Memory that several models share, and the disk that they are read from.
///
/// Whatever does not fit streams. A part that was read for a pass stays if there is room for it, or if others keep parts
/// and are less urgent: those that nobody asks anything first, then those whose requests matter less. Of two that are as urgent
/// the smaller one has the memory, because the same bytes are read more often for it; but who waits for a first token keeps
/// what there is to use. Of the first pass of a model that cannot stay as a whole nothing stays, because somebody waits for it. What
/// a model cannot do without, its buffers, keys and values, is there whatever others keep.
///
/// An encoder has no parts that could be read while it runs: all of it stays, from when it is opened.
///
/// Models of one shared belong into one [`Host`](crate::engine::Host), which says how urgent they are and runs one at a
/// time.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use firebox_runtime::device;
/// use firebox_runtime::engine::{Engine, HostConfig};
/// use firebox_runtime::residency::{SharedBudget, ShareOptions};
///
/// let (engine, cpu) = (Engine::start(HostConfig::default())?, device("cpu")?);
/// let shared = SharedBudget::new(900 << 20)?;
/// engine.add("router", shared.open("models/router", &cpu, &ShareOptions::pinned())?)?;
/// engine.add("specialist", shared.open("models/specialist", &cpu, &ShareOptions::default())?)?;
/// engine.add_later("fallback", move || shared.open("models/fallback", &cpu, &ShareOptions::on_demand()))?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct SharedBudget {
    budget: Budget,
    tenants: Arc<ModelShares>,
    /// Intermediate results, which only the model that runs has.
    activations: Arc<Mutex<Charge>>,
    /// Encoders. Whoever opens a model holds this, so that two at once do not count on the same bytes.
    whole: Arc<Mutex<Vec<Weak<Charge>>>>,
}

impl SharedBudget {
    /// So many bytes for the whole process, with what it has already.
    pub fn new(memory: u64) -> Result<Self, RuntimeError> {
        Self::beside_program(memory, 0)
    }

    /// The same in a program that comes to take so many bytes more for other things than its models.
    pub fn beside_program(memory: u64, more: u64) -> Result<Self, RuntimeError> {
        let budget = Budget::new(memory);
        let least = resident_bytes().unwrap_or(0).saturating_add(more);
        let program = budget.charge(Account::Program, least.saturating_add(PROGRAM))?;
        Self::begin(budget, Some(program), least)
    }

    /// So many bytes for the models, beside what else the process has.
    pub fn beside(budget: &Budget) -> Result<Self, RuntimeError> {
        Self::begin(budget.clone(), None, 0)
    }

    fn begin(budget: Budget, program: Option<Charge>, least: u64) -> Result<Self, RuntimeError> {
        Ok(Self {
            activations: Arc::new(Mutex::new(budget.charge(Account::Activations, 0)?)),
            whole: Arc::default(),
            tenants: Arc::new(ModelShares::new(&budget, program, least)),
            budget,
        })
    }

    /// What the memory is used for.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Opens a model that shares this memory. It can be opened while others run.
    pub fn open(
        &self,
        path: impl AsRef<Path>,
        device: &Device,
        options: &ShareOptions,
    ) -> Result<Model, RuntimeError> {
        let (checkpoint, turn) = (Checkpoint::open(path)?, Arc::<QueuePosition>::default());
        let Architecture::Decoder(config) = Architecture::from_json(checkpoint.config())? else {
            return self.open_whole(checkpoint, device);
        };
        let shape = decoder_shape(&checkpoint, &config, options.kept)?;
        let tokenizer = match checkpoint.text().tokenizer {
            Some(_) => shape.fixed_bytes.saturating_sub(PROGRAM_BYTES),
            None => 0,
        };
        let making = self.insist(Account::Program, MAKING * tokenizer)?;
        let source = QueuedFiles::new(&checkpoint, options.method, &self.tenants.disk, &turn);
        let profile = DeviceProfile::conservative();
        let streaming = StreamedConfig {
            // While one of them reads, the other one gets memory for what is read next: both take about as long.
            stream: StreamConfig { buffers: 0, readers: 2 },
            method: Some(options.method),
            room: 0,
            source: Some(Arc::new(source)),
            scrap: Some(self.tenants.scrap.clone()),
            // Who waits for its first answer should not wait for a measurement.
            rate: Some(profile.read_bytes_per_second),
            // What is not kept is read for every token, and what is being read takes the place of what could be kept.
            pieces: if *device == Device::flex() { PIECES } else { 1 },
        };
        let mut model = Model::streamed(checkpoint, device, &streaming)?;
        let decoder = model.decoder()?;
        let fit = self.fit(&model, &decoder, shape, options, turn, making)?;
        model.residency = Some(Arc::new(fit));
        model.report();
        Ok(model)
    }

    fn fit(
        &self,
        model: &Model,
        decoder: &Arc<Decoder>,
        mut shape: Shape,
        options: &ShareOptions,
        turn: Arc<QueuePosition>,
        mut making: Charge,
    ) -> Result<Residency, RuntimeError> {
        let Some(streamed) = decoder.streamed() else { unreachable!("it was made to be streamed") };
        let whole = lock(&self.whole);
        let path = model.checkpoint().path();
        let context = options.context.unwrap_or(decoder.config().max_positions);
        if decoder.split().is_some() {
            // What is kept at the split.
            shape.kv_bytes_per_token += (decoder.config().hidden_size * size_of::<f32>()) as u64;
        }
        // The program is everybody's, and was paid for before.
        let logits = (decoder.config().vocab_size * size_of::<f32>()) as u64;
        let tokenizer =
            if model.tokenizer().is_ok() { shape.fixed_bytes.saturating_sub(PROGRAM_BYTES) } else { logits };
        shape.fixed_bytes = tokenizer + BESIDE;
        making.resize(making.bytes() / MAKING)?;
        // Allocators keep for themselves what was there only while something was made.
        self.look()?;
        let rates = DeviceProfile::conservative().rates(&shape)?;
        let others = self.others(&whole);
        let mut plan = self.plan(path, &shape, &rates, context, others)?;
        plan.chunk = plan.chunk.min(options.rows.max(1));

        let bytes: u64 = (0..streamed.parts()).map(|part| streamed.part_bytes(part)).sum();
        let pieces = streamed.blocks().iter().map(Range::len).max().unwrap_or(1);
        let ring = (FEWEST_BUFFERS * pieces * streamed.buffer_bytes()) as u64;
        let weights = if options.pinned { bytes } else { ring };
        let standing = shape.fixed_bytes + weights;
        let kv_bytes = (context as u64).saturating_mul(shape.kv_bytes_per_token);
        let usable = (shape.fixed_bytes + bytes + ring).saturating_add(kv_bytes);
        let least =
            (standing + PAGE_TOKENS as u64 * shape.kv_bytes_per_token).max(options.reserved.min(usable));
        let activations = plan.chunk as u64 * shape.activation_bytes_per_row;
        let taken = others + self.activations_with(activations);
        self.check(path, taken + least)?;
        // Pages come where others keep parts, and where nobody has to have anything.
        let pages = (self.budget.total() - taken - standing) / shape.kv_bytes_per_token.max(1);
        plan.kv_tokens =
            (usize::try_from(pages).unwrap_or(usize::MAX) / PAGE_TOKENS * PAGE_TOKENS).min(context);
        let budget = self.slice()?;
        let keeper = WeightCache::among(&budget, streamed.parts(), streamed.blocks())?;
        let tenant = Arc::new(ModelShare {
            tenants: Arc::downgrade(&self.tenants),
            is_pinned: options.pinned,
            bytes,
            least,
            keeper: Arc::downgrade(&keeper),
            decoder: Arc::downgrade(decoder),
            turn,
            state: Mutex::default(),
            spares: Mutex::default(),
        });
        keeper.share(Tenancy { tenants: self.tenants.clone(), tenant: tenant.clone() });
        drop(making);
        let standing = vec![keeper.claim(streamed, Account::Program, shape.fixed_bytes)?];
        let is_own = options.pinned || options.guaranteed || options.reserved > 0;
        keeper.reserve(streamed, if is_own { least } else { 0 })?;
        // Last of what may be refused: what it takes is of all models, and stays where this one is not opened.
        self.afford_activations(activations)?;
        self.tenants.add(tenant);
        drop(whole);
        if options.pinned || options.preload {
            keeper.fill(streamed, options.pinned)?;
        }
        let ledger = Arc::new(Pages { keeper: keeper.clone(), decoder: decoder.clone() });
        let pool = PagePool::with_ledger(decoder.layout(options.kept), ledger);
        // It only lets go: what comes back comes with the passes.
        let residency = ResidencyPlan { keep: Vec::new(), step_time: NEVER, streaming_step_time: NEVER };
        keeper.set_governor(Governor::new(residency, pressure::system(), GovernorConfig::default()));
        streamed.set_step_hook(Box::new(ResidencyHook(keeper.clone())));
        monitor::keep_watch(&keeper, decoder, pressure::system())?;
        let row_bytes = shape.activation_bytes_per_row;
        Ok(Residency {
            plan,
            rates,
            budget,
            pool,
            keeper,
            decoder: decoder.clone(),
            row_bytes,
            _standing: standing,
        })
    }

    /// Opens an encoder.
    fn open_whole(&self, checkpoint: Checkpoint, device: &Device) -> Result<Model, RuntimeError> {
        let mut whole = lock(&self.whole);
        let bytes = checkpoint.segments().iter().map(|segment| segment.bytes).sum::<u64>() + BESIDE;
        let others = self.others(&whole);
        self.check(checkpoint.path(), others + self.activations_with(0) + bytes)?;
        let charge = Arc::new(self.slice()?.insist(Account::Weights, bytes)?);
        let mut model = Model::from_checkpoint(checkpoint, device)?;
        self.look()?;
        whole.retain(|charge| charge.strong_count() > 0);
        whole.push(Arc::downgrade(&charge));
        model.paid = Some(charge);
        Ok(model)
    }

    /// What one of the models takes. Others let go of what they keep for what it insists on.
    fn slice(&self) -> Result<Budget, RuntimeError> {
        let (budget, tenants) = (self.budget.slice(0)?, Arc::downgrade(&self.tenants));
        budget.ask_when_short(move || tenants.upgrade().is_some_and(|tenants| give_way(&tenants)));
        Ok(budget)
    }

    /// Charges what cannot be done without. Others let go of what they keep for it.
    fn insist(&self, account: Account, bytes: u64) -> Result<Charge, RuntimeError> {
        Ok(insist(&mut (), |()| self.budget.charge(account, bytes), |()| gave(&self.tenants))?)
    }

    /// Charges what the program has come to take.
    fn look(&self) -> Result<(), RuntimeError> {
        let Some(takes) = self.tenants.program_takes_now() else { return Ok(()) };
        Ok(insist(&mut (), |()| self.tenants.charge_program(takes), |()| gave(&self.tenants))?)
    }

    /// What the program and the models take at least that are there, whatever is kept.
    fn others(&self, whole: &[Weak<Charge>]) -> u64 {
        let tenants: u64 = self.tenants.least_urgent_first().iter().map(|tenant| tenant.least).sum();
        let whole: u64 = whole.iter().filter_map(Weak::upgrade).map(|charge| charge.bytes()).sum();
        self.tenants.program_bytes() + tenants + whole
    }

    /// What intermediate results take with those of one model more.
    fn activations_with(&self, bytes: u64) -> u64 {
        lock(&self.activations).bytes().max(bytes)
    }

    /// Whether all models could run that take at least so much together.
    fn check(&self, path: &Path, needed: u64) -> Result<(), RuntimeError> {
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

    /// Makes room for the intermediate results of the model that has the largest.
    fn afford_activations(&self, bytes: u64) -> Result<(), RuntimeError> {
        let mut activations = lock(&self.activations);
        if bytes <= activations.bytes() {
            return Ok(());
        }
        Ok(insist(&mut *activations, |activations| activations.resize(bytes), |_| gave(&self.tenants))?)
    }
}

/// Has who needs it least give something up, to the system.
fn gave(tenants: &ModelShares) -> Reclaimed {
    let gave = ask(&tenants.least_urgent_first(), None);
    tenants.scrap.clear();
    gave
}

/// The same, and waits for who is about to. Whether anybody has.
fn give_way(tenants: &ModelShares) -> bool {
    let began = Instant::now();
    loop {
        match gave(tenants) {
            Reclaimed::Some => return true,
            Reclaimed::Busy | Reclaimed::Reading if began.elapsed() < SLOWEST_READ => {
                thread::sleep(READING_CHECK)
            }
            Reclaimed::Busy | Reclaimed::Reading | Reclaimed::Nothing => return false,
        }
    }
}
