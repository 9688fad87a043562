//! Fits a model into a number of bytes: what does not go in is read from disk while it runs.

mod calibration;
mod disk_queue;
mod eviction;
mod monitor;
mod probe;
mod share;
mod sharing;
mod weights;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Device;
use firebox_cache::{KvType, PAGE_TOKENS, PagePool, allocated_positions};
use firebox_model::{Decoder, StreamedConfig, StreamedWeights};
use firebox_store::{Checkpoint, ReadMethod, SegmentId, StoreError, StreamConfig, read_rate, sample_units};

use crate::governor::{Event, Governor, GovernorConfig, ResidencyPlan};
use crate::memory::{release_to_os, resident_bytes};
use crate::planner::{
    DeviceProfile, FEWEST_BUFFERS, Mode, Placement, Plan, Rates, Shape, decoder_shape, place, plan, predict,
};
use crate::pressure::Pressure;
use crate::telemetry::{Meters, Telemetry};
use crate::thermal::Thermometer;
use crate::{Account, Budget, Charge};
use crate::{Model, RuntimeError, Session, pressure};
use probe::Probe;
use weights::{Pages, ResidencyHook, WeightCache};

pub(crate) use share::Urgency;
pub use sharing::{ShareOptions, SharedBudget};

/// What comes to be resident of the program after it has been measured: code that has not run yet, tables of the
/// sampler, logits.
const SLACK: u64 = 20 << 20;

/// A step with nothing kept may turn out faster than predicted: see [`ResidencyPlan`]. By more than a tenth it hardly does, because the
/// probe has gone such rounds; with more caution, layers whose keeping saves less are let go of only to find that out.
const CAUTION: f64 = 0.9;

/// A model is probed with as many parts in memory as take this share of what is left there, and as are read within so many
/// seconds: a few weights may stay in a processor's caches, where many do not.
const PROBE_SHARE: f64 = 0.5;
const PROBE_READING: f64 = 0.5;

/// Where the system does not say what is left.
const PROBE_BYTES: u64 = 1 << 30;

/// How a model is to be fitted into memory.
#[derive(Debug, Clone, PartialEq)]
pub struct ResidencyOptions {
    /// Bytes that the whole process may take.
    pub memory: u64,
    /// For how much text room is kept in advance.
    pub mode: Mode,
    /// How long sequences are expected to become, instead of as long as the model was trained for.
    pub context: Option<usize>,
    /// What keys and values are kept in.
    pub kept: KvType,
    /// How many layers are kept, instead of as many as fit.
    pub layers: Option<usize>,
    /// Which ones.
    pub placement: Placement,
    /// How many buffers others are read into, instead of as many as help.
    pub buffers: Option<usize>,
    /// How files are read, instead of the fastest way.
    pub method: Option<ReadMethod>,
}

impl ResidencyOptions {
    /// So many bytes, and what is best in them.
    pub fn new(memory: u64) -> Self {
        Self {
            memory,
            mode: Mode::default(),
            context: None,
            kept: KvType::default(),
            layers: None,
            placement: Placement::Auto,
            buffers: None,
            method: None,
        }
    }
}

/// How a model was fitted into memory.
#[derive(Debug)]
pub struct Residency {
    plan: Plan,
    rates: Rates,
    budget: Budget,
    pool: PagePool,
    keeper: Arc<WeightCache>,
    decoder: Arc<Decoder>,
    /// Intermediate results of one row of a pass.
    row_bytes: u64,
    /// What is there whatever happens.
    _standing: Vec<Charge>,
}

impl Residency {
    /// What was planned.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What the plan was made from.
    pub fn rates(&self) -> &Rates {
        &self.rates
    }

    /// What the memory is used for.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// What has happened since this was last asked.
    pub fn events(&self) -> Vec<Event> {
        self.keeper.events()
    }

    /// Has kept parts go at once because somebody knows that memory is short, as a phone tells its programs: a quarter of
    /// them, or all where it is [critical](pressure::Level::Critical). They come back as after any shortage.
    pub fn warn(&self, pressure: Pressure) {
        if let Some(streamed) = self.decoder.streamed() {
            self.keeper.alarmed(streamed, pressure);
        }
    }

    /// Says what tells how hot it is from now on, instead of what the system offers.
    pub fn set_thermometer(&self, thermometer: Thermometer) {
        self.keeper.set_thermometer(thermometer);
    }

    pub(crate) fn report(&self, meters: &Arc<Meters>, telemetry: &Telemetry) {
        telemetry.watch_budget(meters.name(), &self.budget);
        self.keeper.report(meters.clone());
    }

    /// Bytes of the model that are kept in memory at the moment.
    pub fn kept_bytes(&self) -> u64 {
        let Some(streamed) = self.decoder.streamed() else { return 0 };
        let kept = (0..streamed.parts()).filter(|&part| streamed.is_resident(part));
        kept.map(|part| streamed.part_bytes(part)).sum()
    }

    /// Reads as much of a model that shares its memory as there is room for, without anybody giving anything up.
    pub fn fill(&self) -> Result<(), RuntimeError> {
        match (self.decoder.streamed(), self.keeper.tenancy()) {
            (Some(streamed), Some(_)) => self.keeper.fill(streamed, false),
            _ => Ok(()),
        }
    }

    /// How many tokens the pages can hold that a session has or can still be given. What is kept of the weights is let go of for them,
    /// and buffers to read that through come first.
    pub fn tokens_for(&self, session: &Session) -> usize {
        let (pool, buffers) = (session.cache().pool(), self.plan.buffers.max(FEWEST_BUFFERS));
        let buffer = self.decoder.streamed().map_or(0, StreamedWeights::buffer_bytes);
        let unread = (buffers * buffer) as u64;
        let unread = unread.saturating_sub(self.budget.held(Account::Scratch));
        let room = (self.budget.left() + self.kept_bytes()).saturating_sub(unread);
        // Pages are of one size, and one that fits in part is no page.
        let page = (PAGE_TOKENS * pool.layout().bytes_per_position()) as u64;
        let further = room.checked_div(page).and_then(|pages| usize::try_from(pages).ok());
        further.map_or(usize::MAX, |further| pool.pages().saturating_add(further).saturating_mul(PAGE_TOKENS))
    }

    /// How many rows of texts that nobody remembers may go through the layers together without anybody giving up anything.
    pub(crate) fn rows_at_once(&self) -> usize {
        let rows = self.budget.left() / (self.row_bytes + self.unremembered_bytes()).max(1);
        self.plan.chunk.saturating_add(usize::try_from(rows).unwrap_or(usize::MAX))
    }

    /// Pays for a pass of such texts of these lengths: for rows beyond those that passes were planned to have, and for keys and
    /// values, which are in none of the pool's pages. Kept parts go for it, those first that are needed least.
    pub(crate) fn pay_for_pass(&self, lengths: impl Iterator<Item = usize>) -> Result<Charge, RuntimeError> {
        let Some(streamed) = self.decoder.streamed() else { unreachable!("it was made to be streamed") };
        let of_text = |(rows, held), length| (rows + length, held + allocated_positions(length));
        let (rows, held) = lengths.fold((0, 0), of_text);
        let beyond = rows.saturating_sub(self.plan.chunk) as u64;
        let bytes = beyond * self.row_bytes + held as u64 * self.unremembered_bytes();
        self.keeper.claim(streamed, Account::Activations, bytes)
    }

    /// Exact keys and values of one token in all layers.
    fn unremembered_bytes(&self) -> u64 {
        self.decoder.layout(KvType::F32).bytes_per_position() as u64
    }

    pub(crate) fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// Says how much the model is wanted from now on, where it shares its memory with others.
    pub(crate) fn set_urgency(&self, urgency: Option<Urgency>) {
        if let Some(streamed) = self.decoder.streamed() {
            self.keeper.set_urgency(streamed, urgency);
        }
    }

    /// Looks whether the program has come to take more of the memory that models share, within a pass too: passes of several
    /// models may begin before any of them ends.
    pub(crate) fn look_at_program(&self) {
        if let Some(streamed) = self.decoder.streamed() {
            self.keeper.look_at_program(streamed);
        }
    }

    /// Says when it is its turn to read, where it shares the disk with others: small numbers come first.
    pub(crate) fn set_turn(&self, number: u32) {
        if let Some(tenancy) = self.keeper.tenancy() {
            tenancy.tenant.turn.set(number);
            tenancy.tenants.disk.reorder();
        }
    }
}

impl Model {
    /// Tokens that there are pages for: what was planned, where it was fitted into a budget, and else any number.
    pub fn planned_tokens(&self) -> usize {
        self.residency().map_or(usize::MAX, |residency| residency.plan().kv_tokens)
    }

    /// Opens a decoder so that the whole process takes no more memory than it is given. Layers are kept as far as they
    /// fit, and the rest is read from disk while it runs; what is kept changes as memory gets short and plentiful.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use firebox_runtime::{Model, device, residency::ResidencyOptions};
    ///
    /// let model = Model::open_within("models/large", &device("cpu")?, &ResidencyOptions::new(3 << 30))?;
    /// # Ok(()) }
    /// ```
    pub fn open_within(
        path: impl AsRef<Path>,
        device: &Device,
        config: &ResidencyOptions,
    ) -> Result<Self, RuntimeError> {
        let checkpoint = Checkpoint::open(path)?;
        let mut model = Self::streamed(checkpoint, device, &streaming(config.method, config.memory))?;
        let decoder = model.decoder()?;
        model.residency = Some(Arc::new(fit(&model, &decoder, config)?));
        model.report();
        Ok(model)
    }

    /// How it was fitted into memory, if it was.
    pub fn residency(&self) -> Option<&Residency> {
        self.residency.as_deref()
    }
}

/// Measures how fast this machine runs a model, without running it: see [`planner::plan`](crate::planner::plan).
pub fn measure(checkpoint: &Checkpoint, device: &Device, shape: &Shape) -> Result<Rates, RuntimeError> {
    let decoder = Decoder::stream(checkpoint, device, &streaming(None, 0))?;
    probed(&decoder, shape, u64::MAX, shape.parts.len())
}

/// Bytes a second that the disk gives of a model, past the page cache.
pub fn disk_rate(checkpoint: &Checkpoint) -> Result<f64, StoreError> {
    let layers = checkpoint.segments().into_iter().filter(|segment| segment.id != SegmentId::Embed);
    let units = layers.map(|segment| {
        let names = segment.tensors.iter().map(String::as_str);
        checkpoint.read_unit(names).map(Arc::new)
    });
    let units = units.collect::<Result<Vec<_>, _>>()?;
    read_rate(&*checkpoint.disk(ReadMethod::Direct), sample_units(&units))
}

/// Reading that a decoder begins with.
fn streaming(method: Option<ReadMethod>, taken: u64) -> StreamedConfig {
    StreamedConfig {
        stream: StreamConfig { buffers: FEWEST_BUFFERS, ..StreamConfig::default() },
        method,
        room: available().unwrap_or(0).saturating_sub(taken),
        ..StreamedConfig::default()
    }
}

/// Bytes that can be taken before memory is short, where the system says.
fn available() -> Option<u64> {
    pressure::read_all(&mut pressure::system()).and_then(|pressure| pressure.available)
}

/// Probes a model in so many bytes of memory beside the ring, if the system has them, and with so many parts in it at most.
fn probed(decoder: &Decoder, shape: &Shape, left: u64, most: usize) -> Result<Rates, RuntimeError> {
    let Some(streamed) = decoder.streamed() else { unreachable!("it was made to be streamed") };
    let largest = shape.parts.iter().map(|part| part.kept_bytes).max().unwrap_or(0).max(1);
    let soon = (streamed.reading().1 * PROBE_READING) as u64;
    let left = left.min(available().unwrap_or(PROBE_BYTES));
    let room = (left as f64 * PROBE_SHARE) as u64;
    let at_once = (soon.min(room) / largest).clamp(1, most.min(streamed.parts()) as u64) as usize;
    Probe { decoder, streamed, shape, at_once }.rates()
}

/// What is there whatever is kept, now that nothing is: as the system says, or else as was assumed.
fn fixed_bytes(assumed: u64) -> u64 {
    release_to_os();
    resident_bytes().map_or(assumed, |resident| resident + SLACK)
}

fn fit(model: &Model, decoder: &Arc<Decoder>, config: &ResidencyOptions) -> Result<Residency, RuntimeError> {
    let Some(streamed) = decoder.streamed() else { unreachable!("it was made to be streamed") };
    let context = config.context.unwrap_or(decoder.config().max_positions);
    let mut shape = decoder_shape(model.checkpoint(), decoder.config(), config.kept)?;
    if decoder.split().is_some() {
        // What is kept at the split.
        shape.kv_bytes_per_token += (decoder.config().hidden_size * size_of::<f32>()) as u64;
    }
    streamed.set_buffers(0);
    shape.fixed_bytes = fixed_bytes(shape.fixed_bytes);
    // Says whether there is enough memory at all before any is taken; how fast it is does not matter for that.
    let guess = DeviceProfile::conservative().rates(&shape)?;
    plan(&shape, &guess, config.memory, config.mode, context)?;
    streamed.set_buffers(FEWEST_BUFFERS);
    let taken = shape.fixed_bytes + shape.ring_bytes(FEWEST_BUFFERS);
    // Who asks for few layers means to spare memory, while they are probed too.
    let few = config.layers.filter(|count| *count < streamed.block_parts());
    let most = few.map_or(streamed.parts(), |count| count.max(probe::READ));
    let rates = probed(decoder, &shape, config.memory.saturating_sub(taken), most)?;
    streamed.set_buffers(0);
    shape.fixed_bytes = fixed_bytes(shape.fixed_bytes);
    let mut plan = plan(&shape, &rates, config.memory, config.mode, context)?;
    adjust(&mut plan, &shape, &rates, config)?;

    let budget = Budget::new(config.memory);
    let mut standing = vec![
        budget.charge(Account::Program, shape.fixed_bytes)?,
        budget.charge(Account::Activations, plan.chunk as u64 * shape.activation_bytes_per_row)?,
    ];
    let keeper = WeightCache::new(&budget, streamed.parts(), plan.buffers)?;
    let ledger = Arc::new(Pages { keeper: keeper.clone(), decoder: decoder.clone() });
    let pool = PagePool::with_ledger(decoder.layout(config.kept), ledger);
    pool.reserve(1, plan.kv_tokens.next_multiple_of(PAGE_TOKENS));
    let parts = kept_parts(&plan, streamed.block_parts(), streamed.parts());
    keeper.keep_all(streamed, &parts, config.layers.is_some(), available)?;
    if streamed.has_experts() {
        // The rest is for sequences that become longer than was planned.
        let room = budget.left() / 2;
        standing.push(budget.charge(Account::Weights, room)?);
        streamed.set_expert_room(room);
    }
    keeper.set_governor(governor(&plan, &shape, &rates, parts)?);
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

/// Does as one is told instead of what is best.
fn adjust(
    plan: &mut Plan,
    shape: &Shape,
    rates: &Rates,
    config: &ResidencyOptions,
) -> Result<(), RuntimeError> {
    if config.layers.is_none() && config.buffers.is_none() && config.placement == Placement::Auto {
        return Ok(());
    }
    let count = config.layers.unwrap_or(plan.kept_layers.len()).min(shape.layers());
    let count =
        if let Placement::Exactly(layers) = &config.placement { count.min(layers.len()) } else { count };
    plan.keep_unembedding &= config.layers.is_none() || count == shape.layers();
    let keeps_all = count == shape.layers() && plan.keep_unembedding;
    plan.buffers = if keeps_all { 0 } else { config.buffers.unwrap_or(plan.buffers.max(FEWEST_BUFFERS)) };
    plan.explanation = place(&config.placement, shape, rates, count, plan.keep_unembedding, plan.buffers)?;
    plan.explanation.prediction.peak_bytes += shape.reserve(plan.kv_tokens, plan.chunk);
    plan.kept_layers = plan.explanation.layers.clone();
    plan.prediction = plan.explanation.prediction;
    Ok(())
}

/// The parts that a plan keeps, in the order in which they are to be kept.
fn kept_parts(plan: &Plan, layers: usize, parts: usize) -> Vec<usize> {
    let unembedding = if plan.keep_unembedding { layers..parts } else { 0..0 };
    plan.kept_layers.iter().copied().chain(unembedding).collect()
}

fn governor(plan: &Plan, shape: &Shape, rates: &Rates, keep: Vec<usize>) -> Result<Governor, RuntimeError> {
    let streaming = predict(shape, rates, &vec![false; shape.parts.len()], plan.buffers.max(FEWEST_BUFFERS))?;
    let plan = ResidencyPlan {
        keep,
        step_time: Duration::from_secs_f64(plan.prediction.seconds_per_token),
        streaming_step_time: Duration::from_secs_f64(streaming.seconds_per_token * CAUTION),
    };
    Ok(Governor::new(plan, pressure::system(), GovernorConfig::default()))
}
