//! Plans within a number of bytes.

use serde::Serialize;

use super::placement::most_bytes;
use super::{Explanation, Placement, Prediction, Rates, Shape, place};
use crate::MemoryError;

/// One buffer is read into while the part in the other computes.
pub const FEWEST_BUFFERS: usize = 2;

/// Tokens of a page of keys and values. A context takes whole pages.
pub const KV_PAGE_TOKENS: usize = 128;

/// The deepest ring: it evens out all that resident layers between streamed ones can.
const MAX_BUFFERS: usize = 8;

/// The bounds of the prompt rows of one pass: above the upper one products gain nothing; below the lower one too few rows
/// share a read of the weights.
const MAX_CHUNK_ROWS: usize = 512;
const MIN_CHUNK_ROWS: usize = 16;

/// Intermediate results of a prompt may take one part in so many of the memory for resident layers.
const ACTIVATION_DIVISOR: u64 = 8;

/// The share of the time that a deeper ring, or a streamed unembedding, has to save: predictions are no more precise.
const MIN_GAIN: f64 = 0.01;

/// The use of memory beyond what a model needs at least.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// As many layers as possible, and 512 tokens of context.
    Throughput,
    /// 1024 tokens of context.
    #[default]
    Balanced,
    /// The whole context.
    Context,
}

impl Mode {
    /// Returns for how many tokens memory is reserved if the context is expected to reach `context`.
    pub fn kv_tokens(self, context: usize) -> usize {
        match self {
            Self::Throughput => context.min(512),
            Self::Balanced => context.min(1024),
            Self::Context => context,
        }
    }
}

/// The resident and the streamed parts of a model, and the predicted speed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// The layers to keep, in the order in which they are loaded.
    pub kept_layers: Vec<usize>,
    /// Whether the unembedding is resident.
    pub keep_unembedding: bool,
    /// The number of buffers through which the other parts are streamed; 0 if all parts are resident.
    pub buffers: usize,
    /// The number of prompt rows that go through the layers together.
    pub chunk: usize,
    /// The number of tokens for which memory is reserved.
    pub kv_tokens: usize,
    /// The reason for the choice of layers.
    pub explanation: Explanation,
    /// The predicted speed and memory, including keys, values and activations.
    pub prediction: Prediction,
    /// The predictions for every number of resident layers, from none to all, with the same unembedding.
    pub table: Vec<Prediction>,
}

/// Plans how a model runs in `memory_bytes`: first reserves what it needs at least, then keeps as many layers as fit.
pub fn plan(
    shape: &Shape,
    rates: &Rates,
    memory_bytes: u64,
    mode: Mode,
    context: usize,
) -> Result<Plan, MemoryError> {
    rates.check(shape)?;
    // Keys and values take whole pages.
    let kv_tokens = mode.kv_tokens(context).checked_next_multiple_of(KV_PAGE_TOKENS).unwrap_or(usize::MAX);
    let planner = Planner::new(shape, rates, memory_bytes, kv_tokens)?;
    let choice = planner.choose()?;
    let layers = shape.layers();
    let table = (0..=layers).map(|count| planner.row(count, &choice)).collect::<Result<_, _>>()?;
    Ok(Plan {
        kept_layers: choice.explanation.layers.clone(),
        keep_unembedding: choice.keep_unembedding,
        buffers: choice.buffers,
        chunk: planner.chunk,
        kv_tokens: planner.kv_tokens,
        prediction: choice.explanation.prediction,
        explanation: choice.explanation,
        table,
    })
}

struct Planner<'a> {
    shape: &'a Shape,
    rates: &'a Rates,
    kv_tokens: usize,
    chunk: usize,
    /// Bytes of keys, values and activations.
    reserve: u64,
    /// Bytes left for weights and buffers.
    left: u64,
}

struct Choice {
    keep_unembedding: bool,
    buffers: usize,
    explanation: Explanation,
}

impl Choice {
    fn beats(&self, other: &Self) -> bool {
        self.explanation.prediction.is_faster(&other.explanation.prediction, MIN_GAIN)
    }
}

impl<'a> Planner<'a> {
    fn new(shape: &'a Shape, rates: &'a Rates, memory: u64, kv_tokens: usize) -> Result<Self, MemoryError> {
        let kv_bytes = (kv_tokens as u64).saturating_mul(shape.kv_bytes_per_token);
        // A model of very few layers is smaller than the ring it would be streamed through.
        let weights = shape.ring_bytes(FEWEST_BUFFERS).min(all_bytes(shape));
        let least = shape.fixed_bytes.saturating_add(kv_bytes).saturating_add(weights);
        // A chunk of a prompt is no longer than the reserved context.
        let chunk = chunk(shape, memory.saturating_sub(least)).min(kv_tokens.max(MIN_CHUNK_ROWS));
        let needed = least.saturating_add(chunk as u64 * shape.activation_bytes_per_row);
        if needed > memory {
            return Err(MemoryError::TooLittleMemory { needed, memory, kv_tokens });
        }
        let reserve = shape.reserve(kv_tokens, chunk);
        Ok(Self { shape, rates, kv_tokens, chunk, reserve, left: memory - shape.fixed_bytes - reserve })
    }

    /// Chooses the fastest plan by prediction, preferring a resident unembedding and a shallow ring.
    fn choose(&self) -> Result<Choice, MemoryError> {
        let layers = self.shape.layers();
        if all_bytes(self.shape) <= self.left {
            return self.choice(layers, true, 0);
        }
        let mut best: Option<Choice> = None;
        for buffers in FEWEST_BUFFERS..=MAX_BUFFERS {
            for keep_unembedding in [true, false] {
                let Some(count) = self.most_layers(keep_unembedding, buffers) else { continue };
                let choice = self.choice(count, keep_unembedding, buffers)?;
                if best.as_ref().is_none_or(|best| choice.beats(best)) {
                    best = Some(choice);
                }
            }
        }
        match best {
            Some(best) => Ok(best),
            None => unreachable!("the smallest ring fits, or there would be no planner"),
        }
    }

    fn choice(&self, count: usize, keep_unembedding: bool, buffers: usize) -> Result<Choice, MemoryError> {
        let mut explanation =
            place(&Placement::Auto, self.shape, self.rates, count, keep_unembedding, buffers)?;
        explanation.prediction.peak_bytes += self.reserve;
        Ok(Choice { keep_unembedding, buffers, explanation })
    }

    /// Returns the most layers that fit beside a ring, or `None` if the ring does not fit.
    fn most_layers(&self, keep_unembedding: bool, buffers: usize) -> Option<usize> {
        let unembedding = if keep_unembedding { self.shape.unembedding_bytes() } else { 0 };
        let left = self.left.checked_sub(self.shape.ring_bytes(buffers))?.checked_sub(unembedding)?;
        (0..=self.shape.layers()).rev().find(|&count| most_bytes(self.shape, count) <= left)
    }

    /// Predicts the speed with another number of resident layers.
    fn row(&self, count: usize, choice: &Choice) -> Result<Prediction, MemoryError> {
        let keeps_all =
            count == self.shape.layers() && (choice.keep_unembedding || self.shape.unembedding_bytes() == 0);
        let buffers = if keeps_all { 0 } else { choice.buffers.max(FEWEST_BUFFERS) };
        Ok(self.choice(count, choice.keep_unembedding, buffers)?.explanation.prediction)
    }
}

fn all_bytes(shape: &Shape) -> u64 {
    shape.parts.iter().map(|part| part.kept_bytes).sum()
}

/// Returns the longest chunk of a prompt whose intermediate results leave most of the memory to the weights.
fn chunk(shape: &Shape, left: u64) -> usize {
    let fits = |rows: &usize| *rows as u64 * shape.activation_bytes_per_row <= left / ACTIVATION_DIVISOR;
    let mut rows = std::iter::successors(Some(MAX_CHUNK_ROWS), |rows| Some(rows / 2))
        .take_while(|&rows| rows > MIN_CHUNK_ROWS);
    rows.find(fits).unwrap_or(MIN_CHUNK_ROWS)
}

#[cfg(test)]
mod tests {
    use super::super::{DeviceProfile, Part};
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn model(layers: usize) -> Shape {
        let part = |is_layer| Part { bytes: 50 * MIB, kept_bytes: 50 * MIB, is_layer };
        let mut parts = vec![part(true); layers];
        parts.extend([part(false); 4]);
        Shape {
            parts,
            kv_bytes_per_token: 100 << 10,
            activation_bytes_per_row: 200 << 10,
            fixed_bytes: 80 * MIB,
        }
    }

    fn planned(memory: u64, mode: Mode) -> Result<Plan, MemoryError> {
        let shape = model(24);
        plan(&shape, &DeviceProfile::conservative().rates(&shape).unwrap(), memory, mode, 8192)
    }

    #[test]
    fn with_room_for_all_parts_nothing_is_streamed() {
        let plan = planned(4096 * MIB, Mode::Balanced).unwrap();
        assert_eq!((plan.kept_layers.len(), plan.keep_unembedding, plan.buffers), (24, true, 0));
        assert_eq!(plan.chunk, MAX_CHUNK_ROWS);
        assert_eq!(plan.prediction, *plan.table.last().unwrap());
        assert_eq!(plan.prediction.waiting, 0.0);
    }

    #[test]
    fn a_table_has_every_number_of_layers_and_the_chosen_one() {
        let plan = planned(1024 * MIB, Mode::Throughput).unwrap();
        assert_eq!(plan.table.len(), 25);
        assert!(!plan.kept_layers.is_empty() && plan.kept_layers.len() < 24);
        assert_eq!(plan.table[plan.kept_layers.len()], plan.prediction);
        assert!(plan.table.is_sorted_by(|a, b| a.seconds_per_token >= b.seconds_per_token * 0.98));
    }

    #[test]
    fn a_longer_context_leaves_less_for_layers() {
        let [throughput, balanced, context] =
            [Mode::Throughput, Mode::Balanced, Mode::Context].map(|mode| planned(1300 * MIB, mode).unwrap());
        assert_eq!([throughput.kv_tokens, balanced.kv_tokens, context.kv_tokens], [512, 1024, 8192]);
        let speeds = [&throughput, &balanced, &context].map(|plan| plan.prediction.tokens_per_second);
        assert!(speeds.is_sorted_by(|faster, slower| faster > slower), "{speeds:?}");
        assert_eq!(Mode::Balanced.kv_tokens(100), 100);
    }

    #[test]
    fn too_little_memory_is_refused_with_an_amount_that_suffices() {
        let error = planned(100 * MIB, Mode::Throughput).unwrap_err();
        let MemoryError::TooLittleMemory { needed, .. } = error else { panic!("{error}") };
        let plan = planned(needed, Mode::Throughput).unwrap();
        assert!(plan.kept_layers.is_empty() && !plan.keep_unembedding);
        assert_eq!((plan.buffers, plan.prediction.peak_bytes), (2, needed));
        assert!(planned(needed - 1, Mode::Throughput).is_err());
    }

    #[test]
    fn of_layers_and_unembedding_the_slower_to_stream_is_kept() {
        // Blocks that are slow to read for their size, since every read has its latency.
        let mut shape = model(8);
        shape.parts.truncate(8);
        shape.parts.extend([Part { bytes: MIB, kept_bytes: MIB, is_layer: false }; 50]);
        let mut rates = DeviceProfile::conservative().rates(&shape).unwrap();
        rates.read_latency = 0.05;
        let memory = 80 * MIB + 200 * MIB + 180 * MIB;
        let plan = plan(&shape, &rates, memory, Mode::Throughput, 512).unwrap();
        assert!(plan.keep_unembedding && plan.kept_layers.len() < 8);
    }

    proptest! {
        #[test]
        fn plans_fit_their_memory_and_more_memory_never_slows(
            memory in 300 * MIB..2500 * MIB, more in 0..500 * MIB, layers in 1usize..30, bandwidth in 1e8..2e10,
        ) {
            let shape = model(layers);
            let profile = DeviceProfile { read_bytes_per_second: bandwidth, ..DeviceProfile::conservative() };
            let rates = profile.rates(&shape).unwrap();
            let plan = |memory| plan(&shape, &rates, memory, Mode::Throughput, 512).unwrap();
            let (small, large) = (plan(memory), plan(memory + more));
            for (plan, memory) in [(&small, memory), (&large, memory + more)] {
                prop_assert!(plan.prediction.peak_bytes <= memory);
            }
            // A plan is within a hundredth of the fastest, and more memory may mean a longer chunk.
            let speeds = [&small, &large].map(|plan| plan.prediction.tokens_per_second);
            prop_assert!(speeds[1] >= speeds[0] * 0.9, "{speeds:?}");
        }
    }
}
