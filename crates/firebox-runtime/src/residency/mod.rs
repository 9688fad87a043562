//! Runs a model in a given number of bytes: parts that do not fit are read from disk while it runs.
//!
//! [`Model::open_within`](crate::Model::open_within) opens one model within a limit, a [`SharedBudget`] several. In both, a model is
//! divided into parts, and a *weight cache* decides which of them are *resident*; the others are *streamed* through a ring of buffers.
//! Whatever is resident, a model computes the same numbers, and the memory of the process stays within its budget.
//!
//! | file | holds |
//! |---|---|
//! | `open` | measuring, planning and opening a single model |
//! | `sharing` | a budget that several models share |
//! | `weights` | the weight cache, its lock order, and eviction |
//! | `share` | one model's charges in the cache |
//! | `demand` | which model may take memory from which |
//! | `exchange` | which parts of a model should be missing |
//! | `program` | what the program itself is charged |
//! | `hook` | what passes and pages tell the cache |
//! | `monitor` | evicting at once when memory is short |
//! | `disk_queue` | the order in which models read from one disk |
//! | `probe`, `calibration` | measuring how fast a machine reads and computes |
//! | `config` | the constants of all of it |

mod calibration;
mod config;
mod disk_queue;
mod entitlement;
mod exchange;
mod hook;
mod monitor;
mod open;
mod probe;
mod program;
mod share;
mod sharing;
mod weights;

use std::sync::Arc;

use firebox_cache::{KvType, PAGE_TOKENS, PagePool, allocated_positions};
use firebox_model::{Decoder, StreamedDecoder};
use firebox_store::ReadMethod;

use crate::governor::{Event, Governor};
use crate::planner::{FEWEST_BUFFERS, Mode, Placement, Plan, Rates};
use crate::pressure::{self, Pressure};
use crate::telemetry::{Meters, Telemetry};
use crate::thermal::Thermometer;
use crate::{Account, Budget, Charge, RuntimeError};
use config::CONFIG;
use disk_queue::QueuePosition;
use hook::{ChargedPages, ResidencyHook};
use weights::CachedModel;

pub use entitlement::Urgency;
pub use open::{disk_rate, measure};
pub use sharing::{ShareOptions, SharedBudget};

/// How a single model is opened within a limit.
#[derive(Debug, Clone, PartialEq)]
pub struct ResidencyOptions {
    /// Bytes that the whole process may take.
    pub memory: u64,
    /// The length of text that room is planned for.
    pub mode: Mode,
    /// The expected length of sequences, instead of the length that the model was trained for.
    pub context: Option<usize>,
    /// The type of cached keys and values.
    pub kv_dtype: KvType,
    /// The number of resident layers, instead of as many as fit.
    pub layers: Option<usize>,
    /// Which layers are resident.
    pub placement: Placement,
    /// The number of buffers for streaming, instead of as many as help.
    pub buffers: Option<usize>,
    /// How files are read, instead of the fastest method.
    pub method: Option<ReadMethod>,
}

impl ResidencyOptions {
    /// A limit of `memory` bytes, and the fastest plan within it.
    pub fn new(memory: u64) -> Self {
        Self {
            memory,
            mode: Mode::default(),
            context: None,
            kv_dtype: KvType::default(),
            layers: None,
            placement: Placement::Auto,
            buffers: None,
            method: None,
        }
    }
}

/// The residency of an open model: its plan, its budget, and what is resident.
#[derive(Debug)]
pub struct Residency {
    plan: Plan,
    rates: Rates,
    budget: Budget,
    pool: PagePool,
    cached: Arc<CachedModel>,
    decoder: StreamedDecoder,
    /// Bytes of activations per row of a pass.
    row_bytes: u64,
    /// The place in the disk queue of a model that shares its budget.
    queue_position: Option<Arc<QueuePosition>>,
    /// Charges that last as long as the model.
    #[expect(dead_code, reason = "held for its drop")]
    standing: Vec<Charge>,
}

impl Residency {
    /// Begins to govern a charged model: by a hook in the steps of its passes, and by a thread that watches for shortage.
    fn governed(self, governor: Governor) -> Result<Self, RuntimeError> {
        let weights = self.decoder.weights();
        self.cached.set_governor(governor);
        weights.set_step_hook(Box::new(ResidencyHook(self.cached.clone())));
        monitor::start(&self.cached, weights, pressure::system())?;
        Ok(self)
    }

    /// The plan that the model was opened with.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The rates that the plan was made from.
    pub fn rates(&self) -> &Rates {
        &self.rates
    }

    /// Returns the budget that the model is charged to, with its accounts.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Returns the events since the last call.
    pub fn events(&self) -> Vec<Event> {
        self.cached.events()
    }

    /// Evicts parts at once because memory is short, as a phone tells its programs: a quarter of the resident parts, or all of them under
    /// [critical](crate::pressure::Level::Critical) pressure. They are loaded again as after any shortage.
    pub fn warn(&self, pressure: Pressure) {
        self.cached.relieve(self.decoder.weights(), pressure);
    }

    /// Reads the temperature from this thermometer from now on, instead of the system's.
    pub fn set_thermometer(&self, thermometer: Thermometer) {
        self.cached.set_thermometer(thermometer);
    }

    pub(crate) fn report(&self, meters: &Arc<Meters>, telemetry: &Telemetry) {
        telemetry.watch_budget(meters.name(), &self.budget);
        self.cached.set_meters(meters.clone());
    }

    /// Returns the bytes of the model's resident parts.
    pub fn resident_bytes(&self) -> u64 {
        let weights = self.decoder.weights();
        let resident = (0..weights.parts()).filter(|&part| weights.is_resident(part));
        resident.map(|part| weights.part_bytes(part)).sum()
    }

    /// Loads as many parts of a model that shares its memory as there is room for, without evicting any.
    pub fn preload(&self) -> Result<(), RuntimeError> {
        if self.cached.is_shared() { self.cached.preload(self.decoder.weights(), false) } else { Ok(()) }
    }

    /// Returns how many tokens fit into the pages that a pool has or can still get. Parts are evicted for pages, but the buffers to
    /// stream them through come first.
    pub fn tokens_for(&self, pool: &PagePool) -> usize {
        let buffers = self.plan.buffers.max(FEWEST_BUFFERS);
        let ring = (buffers * self.decoder.weights().buffer_bytes()) as u64;
        let uncharged = ring.saturating_sub(self.budget.held(Account::Scratch));
        let room = (self.budget.left() + self.resident_bytes()).saturating_sub(uncharged);
        // Pages have one size, and a page that fits in part is none.
        let page = (PAGE_TOKENS * pool.layout().bytes_per_position()) as u64;
        let further = room.checked_div(page).and_then(|pages| usize::try_from(pages).ok());
        further.map_or(usize::MAX, |further| pool.pages().saturating_add(further).saturating_mul(PAGE_TOKENS))
    }

    /// Returns how many rows of texts one pass without a cache can have without evicting anything.
    pub(crate) fn rows_at_once(&self) -> usize {
        let rows = self.budget.left() / (self.row_bytes + self.uncached_row_bytes()).max(1);
        self.plan.chunk.saturating_add(usize::try_from(rows).unwrap_or(usize::MAX))
    }

    /// Charges a pass of texts of these lengths without a cache: rows beyond those that passes were planned for, and their keys and
    /// values, which are in none of the pool's pages. Parts are evicted for it.
    pub(crate) fn pay_for_pass(&self, lengths: impl Iterator<Item = usize>) -> Result<Charge, RuntimeError> {
        let of_text = |(rows, held), length| (rows + length, held + allocated_positions(length));
        let (rows, held) = lengths.fold((0, 0), of_text);
        let beyond = rows.saturating_sub(self.plan.chunk) as u64;
        let bytes = beyond * self.row_bytes + held as u64 * self.uncached_row_bytes();
        Ok(self.cached.charge(Account::Activations, bytes, CONFIG.pass_wait)?)
    }

    /// Charges a pass over one text of this length beside the engine, whose own passes may have all rows that were planned
    /// for. Parts are evicted for it.
    pub(crate) fn pay_for_text(&self, tokens: usize) -> Result<Charge, RuntimeError> {
        let pages = allocated_positions(tokens) as u64 * self.uncached_row_bytes();
        self.pay_for(tokens as u64 * self.row_bytes + pages)
    }

    /// Charges the logits after `rows` tokens, and a copy of them. Returns how many of the rows there is memory for, at least
    /// one, and their charge. Parts are evicted for one row, and for no more; half of what is left stays for pages.
    pub(crate) fn pay_for_logits(&self, rows: usize) -> Result<(usize, Charge), RuntimeError> {
        let row = (2 * self.decoder.config().vocab_size * size_of::<f32>()) as u64;
        let fit = usize::try_from(self.budget.left() / (2 * row.max(1))).unwrap_or(usize::MAX);
        let rows = rows.min(fit).max(1);
        Ok((rows, self.pay_for(rows as u64 * row)?))
    }

    /// Charges what a request holds beside its pages, until the charge is dropped. Parts are evicted for it.
    pub(crate) fn pay_for(&self, bytes: u64) -> Result<Charge, RuntimeError> {
        Ok(self.cached.charge(Account::Activations, bytes, CONFIG.pass_wait)?)
    }

    /// Returns the bytes of exact keys and values of one token in all layers.
    fn uncached_row_bytes(&self) -> u64 {
        self.decoder.layout(KvType::F32).bytes_per_position() as u64
    }

    /// Returns the pool of pages that the model's sessions share.
    pub fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// Sets the demand for the model, if it shares its memory with others.
    pub fn set_urgency(&self, urgency: Option<Urgency>) {
        self.cached.set_urgency(self.decoder.weights(), urgency);
    }

    /// Charges the program's growth within a pass if models share a budget: passes of several models may begin before
    /// any of them ends.
    pub fn charge_program_growth(&self) {
        self.cached.charge_program_growth();
    }

    /// Sets the model's place in the disk queue, if it shares the disk with others. Small numbers come first.
    pub fn set_queue_position(&self, number: u32) {
        if let Some(position) = &self.queue_position {
            position.set(number);
            self.cached.cache.disk.reorder();
        }
    }
}

/// Bytes of the hidden states that a sequence keeps of each token, where the decoder has heads.
fn kv_bytes_at_split(decoder: &Decoder) -> u64 {
    let width = if decoder.split().is_some() { decoder.config().hidden_size } else { 0 };
    (width * size_of::<f32>()) as u64
}

/// Returns a pool of pages that a model's share is charged for.
fn charged_pages(decoder: &Decoder, kept: KvType, cached: &Arc<CachedModel>) -> PagePool {
    PagePool::with_ledger(decoder.layout(kept), Arc::new(ChargedPages(cached.clone())))
}
