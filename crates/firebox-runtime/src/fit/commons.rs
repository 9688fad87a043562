use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use burn::tensor::Device;
use firebox_cache::{KvType, PAGE, Pool};
use firebox_model::{Decoder, Streamed, StreamedConfig};
use firebox_store::{Checkpoint, ReadMethod, StreamConfig};

use super::keeper::{Keeper, Looker, Pages, Tenancy};
use super::tenant::{Tenant, Tenants};
use super::turns::{InTurn, Turn};
use super::{FEWEST_BUFFERS, Fit, sentry};
use crate::budget::{Account, Budget, Charge};
use crate::governor::{Governor, GovernorConfig, ResidencyPlan};
use crate::memory::resident_bytes;
use crate::planner::{DeviceProfile, Mode, PROGRAM_BYTES, Shape, plan};
use crate::{Model, RuntimeError, pressure};

/// What the program comes to take when models run, beyond what it takes before: code that runs, and what the allocators of
/// several threads keep. What it takes in truth is looked at all the time.
const PROGRAM: u64 = 40 << 20;

/// What a model takes beside its weights and the table of its tokenizer: its norms, and what they are found by.
const BESIDE: u64 = 256 << 10;

/// Steps are never too dear: see [`Commons`].
const NEVER: Duration = Duration::from_secs(1 << 20);

/// Rows of a prompt that go through the layers together, where nobody says: many share one read of the weights, and what
/// they take all models together need once.
const ROWS: usize = 128;

/// On what terms a model shares memory with others.
#[derive(Debug, Clone, PartialEq)]
pub struct Terms {
    /// Bytes that are its own, whatever others want. What it takes beyond them may be taken back.
    pub reserved: u64,
    /// Whether all of its weights stay in memory from the beginning, so that it always answers at once.
    pub pinned: bool,
    /// Whether as much of it as fits beside others is read when it is opened, and not when it is needed.
    pub filled: bool,
    /// How long its sequences are expected to become, instead of as long as it was trained for.
    pub context: Option<usize>,
    /// What keys and values are kept in.
    pub kept: KvType,
    /// How many rows of a prompt go through its layers together.
    pub rows: usize,
    /// How its files are read.
    pub method: ReadMethod,
}

impl Default for Terms {
    fn default() -> Self {
        Self {
            reserved: 0,
            pinned: false,
            filled: true,
            context: None,
            kept: KvType::default(),
            rows: ROWS,
            method: ReadMethod::Direct,
        }
    }
}

impl Terms {
    /// In memory whatever happens.
    pub fn pinned() -> Self {
        Self { pinned: true, ..Self::default() }
    }

    /// Read when it is needed, and not before.
    pub fn unfilled() -> Self {
        Self { filled: false, ..Self::default() }
    }
}

/// Memory that several models share, and the disk that they are read from.
///
/// Whatever does not fit streams. A part that was read for a pass stays if there is room for it, or if others keep parts
/// and are less urgent: those that nobody asks anything first, then those whose requests matter less, then those whose
/// requests have their first token. Of two that are as urgent the smaller one has the memory, because the same bytes are read
/// more often for it. What a model cannot do without, its buffers, keys and values, is there whatever others keep.
///
/// Models of one commons belong into one [`Host`](crate::engine::Host), which says how urgent they are and runs one at a
/// time.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use firebox_runtime::device;
/// use firebox_runtime::engine::{Engine, HostConfig};
/// use firebox_runtime::fit::{Commons, Terms};
///
/// let (engine, cpu) = (Engine::start(HostConfig::default())?, device("cpu")?);
/// let commons = Commons::new(900 << 20)?;
/// engine.add("router", commons.open("models/router", &cpu, &Terms::pinned())?)?;
/// engine.add("specialist", commons.open("models/specialist", &cpu, &Terms::default())?)?;
/// engine.add_later("fallback", move || commons.open("models/fallback", &cpu, &Terms::unfilled()))?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Commons {
    budget: Budget,
    tenants: Arc<Tenants>,
    /// Intermediate results, which only the model that runs has.
    activations: Arc<Mutex<Charge>>,
}

impl Commons {
    /// So many bytes for the whole process, with what it has already.
    pub fn new(memory: u64) -> Result<Self, RuntimeError> {
        let budget = Budget::new(memory);
        let program = budget.charge(Account::Program, resident_bytes().unwrap_or(0) + PROGRAM)?;
        Self::begin(budget, Some(program))
    }

    /// So many bytes for the models, beside what else the process has.
    pub fn beside(budget: &Budget) -> Result<Self, RuntimeError> {
        Self::begin(budget.clone(), None)
    }

    fn begin(budget: Budget, program: Option<Charge>) -> Result<Self, RuntimeError> {
        Ok(Self {
            activations: Arc::new(Mutex::new(budget.charge(Account::Activations, 0)?)),
            tenants: Arc::new(Tenants::new(&budget, program)),
            budget,
        })
    }

    /// What the memory is used for.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Opens a decoder that shares this memory. It can be opened while others run.
    pub fn open(
        &self,
        path: impl AsRef<Path>,
        device: &Device,
        terms: &Terms,
    ) -> Result<Model, RuntimeError> {
        let (checkpoint, turn) = (Checkpoint::open(path)?, Arc::<Turn>::default());
        let source = InTurn::new(&checkpoint, terms.method, &self.tenants.disk, &turn);
        let profile = DeviceProfile::conservative();
        let streaming = StreamedConfig {
            stream: StreamConfig { buffers: 0, ..StreamConfig::default() },
            method: Some(terms.method),
            room: 0,
            source: Some(Arc::new(source)),
            // Who waits for its first answer should not wait for a measurement.
            rate: Some(profile.read_bytes_per_second),
        };
        let mut model = Model::streamed(checkpoint, device, &streaming)?;
        let decoder = model.decoder()?;
        let fit = self.fit(&model, &decoder, &profile, terms, turn)?;
        model.fit = Some(Arc::new(fit));
        model.report();
        Ok(model)
    }

    fn fit(
        &self,
        model: &Model,
        decoder: &Arc<Decoder>,
        profile: &DeviceProfile,
        terms: &Terms,
        turn: Arc<Turn>,
    ) -> Result<Fit, RuntimeError> {
        let Some(streamed) = decoder.streamed() else { unreachable!("it was made to be streamed") };
        let context = terms.context.unwrap_or(decoder.config().max_positions);
        let mut shape = Shape::of(model.checkpoint(), decoder.config(), terms.kept)?;
        if decoder.split().is_some() {
            // What is kept at the split.
            shape.kv_bytes_per_token += (decoder.config().hidden_size * size_of::<f32>()) as u64;
        }
        // The program is everybody's, and was paid for before.
        let logits = (decoder.config().vocab_size * size_of::<f32>()) as u64;
        let tokenizer =
            if model.tokenizer().is_ok() { shape.fixed_bytes.saturating_sub(PROGRAM_BYTES) } else { logits };
        shape.fixed_bytes = tokenizer + BESIDE;
        let rates = profile.rates(&shape)?;
        let mut plan = plan(&shape, &rates, self.budget.total(), Mode::Throughput, context)?;
        plan.chunk = plan.chunk.min(terms.rows.max(1));

        let bytes: u64 = (0..streamed.parts()).map(|part| streamed.kept_bytes(part)).sum();
        let ring = FEWEST_BUFFERS as u64 * streamed.buffer_bytes() as u64;
        let weights = if terms.pinned { bytes } else { ring };
        let least = shape.fixed_bytes + PAGE as u64 * shape.kv_bytes_per_token + weights;
        let least = least.max(terms.reserved);
        let activations = plan.chunk as u64 * shape.activation_bytes_per_row;
        self.check(least, activations)?;
        let budget = self.budget.slice(0)?;
        let keeper = Keeper::among(&budget, streamed.parts())?;
        let tenant = Arc::new(Tenant {
            tenants: Arc::downgrade(&self.tenants),
            is_pinned: terms.pinned,
            bytes,
            least,
            keeper: Arc::downgrade(&keeper),
            decoder: Arc::downgrade(decoder),
            turn,
            state: Mutex::default(),
        });
        keeper.share(Tenancy { tenants: self.tenants.clone(), tenant: tenant.clone() });
        let standing = vec![keeper.claim(streamed, Account::Program, shape.fixed_bytes)?];
        self.afford_activations(&keeper, streamed, activations)?;
        keeper.reserve(streamed, if terms.pinned { least } else { terms.reserved })?;
        self.tenants.add(tenant);
        if terms.pinned || terms.filled {
            keeper.fill(streamed, terms.pinned)?;
        }
        let ledger = Arc::new(Pages { keeper: keeper.clone(), decoder: decoder.clone() });
        let pool = Pool::with_ledger(decoder.layout(terms.kept), ledger);
        // It only lets go: what comes back comes with the passes.
        let residency = ResidencyPlan { keep: Vec::new(), step_time: NEVER, streaming_step_time: NEVER };
        keeper.set_governor(Governor::new(residency, pressure::system(), GovernorConfig::default()));
        streamed.set_watcher(Box::new(Looker(keeper.clone())));
        sentry::keep_watch(&keeper, decoder, pressure::system())?;
        Ok(Fit { plan, rates, budget, pool, keeper, decoder: decoder.clone(), _standing: standing })
    }

    /// Whether another model could run that takes at least so much, whatever the others do.
    fn check(&self, least: u64, activations: u64) -> Result<(), RuntimeError> {
        let held = self.activations.lock().unwrap_or_else(PoisonError::into_inner).bytes();
        let others: u64 = self.tenants.least_urgent_first().iter().map(|tenant| tenant.least).sum();
        let needed = self.tenants.program_bytes() + activations.max(held) + others + least;
        let memory = self.budget.total();
        if needed > memory {
            return Err(RuntimeError::TooLittleMemory { needed, memory, kv_tokens: PAGE });
        }
        Ok(())
    }

    /// Makes room for the intermediate results of the model that has the largest.
    fn afford_activations(
        &self,
        keeper: &Keeper,
        streamed: &Streamed,
        bytes: u64,
    ) -> Result<(), RuntimeError> {
        let mut activations = self.activations.lock().unwrap_or_else(PoisonError::into_inner);
        let more = bytes.saturating_sub(activations.bytes());
        if more > 0 {
            // Others make room first, and then it is theirs no longer.
            drop(keeper.claim(streamed, Account::Activations, more)?);
            activations.resize(bytes)?;
        }
        Ok(())
    }
}
