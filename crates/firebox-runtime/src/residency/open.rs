//! Opens a single model within a limit: measures the machine, plans, loads the planned parts and starts the governor.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Device;
use firebox_cache::PAGE_TOKENS;
use firebox_model::{StreamedConfig, StreamedDecoder};
use firebox_store::{Checkpoint, ReadMethod, SegmentId, StoreError, StreamConfig, read_rate, sample_units};

use super::config::CONFIG;
use super::probe::{self, Probe};
use super::share::ModelShare;
use super::weights::WeightCache;
use super::{Residency, ResidencyOptions, charged_pages, kv_bytes_at_split};
use crate::governor::{Governor, GovernorConfig, ResidencyPlan};
use crate::memory::{release_to_os, resident_bytes};
use crate::planner::{
    DeviceProfile, FEWEST_BUFFERS, Placement, Plan, Rates, Shape, decoder_shape, place, plan, predict,
};
use crate::{Account, Budget, Model, RuntimeError, pressure};

impl Model {
    /// Opens a decoder so that the whole process stays within a limit. As many layers as fit are resident, and the rest is read from
    /// disk while the model runs. Parts are evicted when memory gets short, and loaded again when there is room.
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
        options: &ResidencyOptions,
    ) -> Result<Self, RuntimeError> {
        let checkpoint = Checkpoint::open(path)?;
        let streaming = streaming(options.method, options.memory);
        let (mut model, decoder) = Self::with_streamed_decoder(checkpoint, device, &streaming)?;
        model.residency = Some(Arc::new(open(&model, decoder, options)?));
        model.report();
        Ok(model)
    }
}

/// Measures how fast this machine runs a model, without running it: see [`planner::plan`](crate::planner::plan).
pub fn measure(checkpoint: &Checkpoint, device: &Device, shape: &Shape) -> Result<Rates, RuntimeError> {
    let decoder = StreamedDecoder::open(checkpoint, device, &streaming(None, 0))?;
    probe_rates(&decoder, shape, u64::MAX, shape.parts.len())
}

/// Returns the bytes a second that the disk reads of a model, past the page cache.
pub fn disk_rate(checkpoint: &Checkpoint) -> Result<f64, StoreError> {
    let layers = checkpoint
        .segments()
        .into_iter()
        .filter(|segment| !matches!(segment.id, SegmentId::Embed | SegmentId::Rows));
    let units = layers.map(|segment| {
        let names = segment.tensors.iter().map(String::as_str);
        checkpoint.read_unit(names).map(Arc::new)
    });
    let units = units.collect::<Result<Vec<_>, _>>()?;
    read_rate(&*checkpoint.disk(ReadMethod::Direct), sample_units(&units))
}

/// Returns the streaming configuration to begin with when `taken` bytes of the available memory will be used otherwise.
fn streaming(method: Option<ReadMethod>, taken: u64) -> StreamedConfig {
    StreamedConfig {
        stream: StreamConfig { buffers: FEWEST_BUFFERS, ..StreamConfig::default() },
        method,
        room: available().unwrap_or(0).saturating_sub(taken),
        ..StreamedConfig::default()
    }
}

/// Bytes that can be taken before memory is short, where the system reports it.
fn available() -> Option<u64> {
    pressure::read_all(&mut pressure::system()).and_then(|pressure| pressure.available)
}

/// Probes a model with limits on the bytes and the number of resident parts, and as far as the system has memory.
fn probe_rates(
    decoder: &StreamedDecoder,
    shape: &Shape,
    bytes: u64,
    max_parts: usize,
) -> Result<Rates, RuntimeError> {
    let weights = decoder.weights();
    let largest = shape.parts.iter().map(|part| part.kept_bytes).max().unwrap_or(0).max(1);
    let readable = (weights.reading().1 * CONFIG.probe_read_seconds) as u64;
    let bytes = bytes.min(available().unwrap_or(CONFIG.probe_bytes));
    let room = (bytes as f64 * CONFIG.probe_memory_share) as u64;
    let max_parts = max_parts.min(weights.parts()) as u64;
    let at_once = (readable.min(room) / largest).clamp(1, max_parts) as usize;
    Probe { decoder, weights, shape, at_once }.rates()
}

/// Bytes that the process takes with nothing resident: as measured, or else as assumed.
fn fixed_bytes(assumed: u64) -> u64 {
    release_to_os();
    resident_bytes().map_or(assumed, |resident| resident + CONFIG.program_slack)
}

fn open(
    model: &Model,
    decoder: StreamedDecoder,
    options: &ResidencyOptions,
) -> Result<Residency, RuntimeError> {
    let weights = decoder.weights();
    let context = options.context.unwrap_or(decoder.config().max_positions);
    let mut shape = decoder_shape(model.checkpoint(), decoder.config(), options.kv_dtype)?;
    shape.kv_bytes_per_token += kv_bytes_at_split(&decoder);
    weights.set_buffers(0);
    shape.fixed_bytes = fixed_bytes(shape.fixed_bytes);
    // Fails if there is too little memory, before any is taken. The rates do not matter for that.
    let guess = DeviceProfile::conservative().rates(&shape)?;
    plan(&shape, &guess, options.memory, options.mode, context)?;
    weights.set_buffers(FEWEST_BUFFERS);
    let taken = shape.fixed_bytes + shape.ring_bytes(FEWEST_BUFFERS);
    // Few layers are asked for to save memory, so the probe takes no more either.
    let few = options.layers.filter(|count| *count < weights.block_parts());
    let max_parts = few.map_or(weights.parts(), |count| count.max(probe::STREAMED_LAYERS));
    let rates = probe_rates(&decoder, &shape, options.memory.saturating_sub(taken), max_parts)?;
    weights.set_buffers(0);
    shape.fixed_bytes = fixed_bytes(shape.fixed_bytes);
    let mut plan = plan(&shape, &rates, options.memory, options.mode, context)?;
    apply_options(&mut plan, &shape, &rates, options)?;

    let budget = Budget::new(options.memory);
    let mut standing = vec![
        budget.charge(Account::Program, shape.fixed_bytes)?,
        budget.charge(Account::Activations, plan.chunk as u64 * shape.activation_bytes_per_row)?,
    ];
    let cache = WeightCache::new(&budget, None, 0)?;
    let cached = cache.add(ModelShare::new(&budget, weights, plan.buffers)?);
    let pool = charged_pages(&decoder, options.kv_dtype, &cached);
    pool.reserve(1, plan.kv_tokens.next_multiple_of(PAGE_TOKENS));
    let parts = planned_parts(&plan, weights.block_parts(), weights.parts());
    cached.load_planned(weights, &parts, options.layers.is_some(), available)?;
    if weights.has_experts() {
        // The other half is for sequences that become longer than planned.
        let room = budget.left() / 2;
        standing.push(budget.charge(Account::Weights, room)?);
        weights.set_expert_room(room);
    }
    let governor = governor(&plan, &shape, &rates, parts)?;
    let row_bytes = shape.activation_bytes_per_row;
    let charged =
        Residency { plan, rates, budget, pool, cached, decoder, row_bytes, queue_position: None, standing };
    charged.governed(governor)
}

/// Changes the best plan to what the options ask for.
fn apply_options(
    plan: &mut Plan,
    shape: &Shape,
    rates: &Rates,
    options: &ResidencyOptions,
) -> Result<(), RuntimeError> {
    if options.layers.is_none() && options.buffers.is_none() && options.placement == Placement::Auto {
        return Ok(());
    }
    let count = options.layers.unwrap_or(plan.kept_layers.len()).min(shape.layers());
    let count =
        if let Placement::Exactly(layers) = &options.placement { count.min(layers.len()) } else { count };
    plan.keep_unembedding &= options.layers.is_none() || count == shape.layers();
    let keeps_all = count == shape.layers() && plan.keep_unembedding;
    plan.buffers = if keeps_all { 0 } else { options.buffers.unwrap_or(plan.buffers.max(FEWEST_BUFFERS)) };
    plan.explanation = place(&options.placement, shape, rates, count, plan.keep_unembedding, plan.buffers)?;
    plan.explanation.prediction.peak_bytes += shape.reserve(plan.kv_tokens, plan.chunk);
    plan.kept_layers = plan.explanation.layers.clone();
    plan.prediction = plan.explanation.prediction;
    Ok(())
}

/// The parts that a plan makes resident, in the order in which they are loaded.
fn planned_parts(plan: &Plan, layers: usize, parts: usize) -> Vec<usize> {
    let unembedding = if plan.keep_unembedding { layers..parts } else { 0..0 };
    plan.kept_layers.iter().copied().chain(unembedding).collect()
}

fn governor(plan: &Plan, shape: &Shape, rates: &Rates, keep: Vec<usize>) -> Result<Governor, RuntimeError> {
    let streaming = predict(shape, rates, &vec![false; shape.parts.len()], plan.buffers.max(FEWEST_BUFFERS))?;
    let plan = ResidencyPlan {
        keep,
        step_time: Duration::from_secs_f64(plan.prediction.seconds_per_token),
        streaming_step_time: Duration::from_secs_f64(streaming.seconds_per_token * CONFIG.streaming_caution),
    };
    Ok(Governor::new(plan, pressure::system(), GovernorConfig::default()))
}
