use serde::Serialize;

use super::placement::most_bytes;
use super::{Explanation, Placement, Prediction, Rates, Shape, place};
use crate::MemoryError;

/// One buffer is read into while the part in the other computes.
pub const FEWEST_BUFFERS: usize = 2;

/// Tokens of a page of keys and values: a context takes whole pages.
pub const KV_PAGE_TOKENS: usize = 128;

/// A ring this deep evens out all that kept layers between streamed ones can.
const MOST_BUFFERS: usize = 8;

/// Rows of a prompt that go through the layers together: beyond the most, products gain nothing; below the least, they
/// hardly share a read of the weights.
const MOST_ROWS: usize = 512;
const FEWEST_ROWS: usize = 16;

/// Intermediate results of a prompt may take this part of what would else go to kept layers.
const ACTIVATION_SHARE: u64 = 8;

/// A deeper ring, or a streamed unembedding, has to save this share of the time: predictions are no better than that.
const WORTHWHILE: f64 = 0.01;

/// What memory is for, beyond the least that each needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// As many layers as possible, and room for 512 tokens.
    Throughput,
    /// Room for 1024 tokens.
    #[default]
    Balanced,
    /// Room for the whole context.
    Context,
}

impl Mode {
    /// For how many tokens room is kept in advance, if the context is expected to become so long.
    pub fn kv_tokens(self, context: usize) -> usize {
        match self {
            Self::Throughput => context.min(512),
            Self::Balanced => context.min(1024),
            Self::Context => context,
        }
    }
}

/// What to keep, what to stream, and what comes of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// The layers to keep, in the order in which they are to be kept.
    pub kept_layers: Vec<usize>,
    /// Whether the unembedding is kept.
    pub keep_unembedding: bool,
    /// How many buffers the other parts are streamed through; none where everything is kept.
    pub buffers: usize,
    /// How many rows of a prompt go through the layers together.
    pub chunk: usize,
    /// For how many tokens room is kept.
    pub kv_tokens: usize,
    /// Why these layers.
    pub explanation: Explanation,
    /// How fast it is going to be, and the memory that takes: keys, values and activations included.
    pub prediction: Prediction,
    /// The same for every number of kept layers, from none to all, with the same unembedding.
    pub table: Vec<Prediction>,
}

/// Plans how a model runs in so many bytes of memory: first what it cannot do without, then as many kept layers as fit.
pub fn plan(
    shape: &Shape,
    rates: &Rates,
    memory_bytes: u64,
    mode: Mode,
    context: usize,
) -> Result<Plan, MemoryError> {
    rates.check(shape)?;
    // Keys and values come in whole pages.
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
    /// Keys, values and activations.
    reserve: u64,
    /// What is left for weights and buffers.
    left: u64,
}

struct Choice {
    keep_unembedding: bool,
    buffers: usize,
    explanation: Explanation,
}

impl Choice {
    fn beats(&self, other: &Self) -> bool {
        self.explanation.prediction.is_faster(&other.explanation.prediction, WORTHWHILE)
    }
}

impl<'a> Planner<'a> {
    fn new(shape: &'a Shape, rates: &'a Rates, memory: u64, kv_tokens: usize) -> Result<Self, MemoryError> {
        let kv_bytes = (kv_tokens as u64).saturating_mul(shape.kv_bytes_per_token);
        // A model of very few layers is smaller than the ring it would be streamed through.
        let weights = shape.ring_bytes(FEWEST_BUFFERS).min(all_bytes(shape));
        let least = shape.fixed_bytes.saturating_add(kv_bytes).saturating_add(weights);
        // A piece of a prompt is no longer than what there is room for.
        let chunk = chunk(shape, memory.saturating_sub(least)).min(kv_tokens.max(FEWEST_ROWS));
        let needed = least.saturating_add(chunk as u64 * shape.activation_bytes_per_row);
        if needed > memory {
            return Err(MemoryError::TooLittleMemory { needed, memory, kv_tokens });
        }
        let reserve = shape.reserve(kv_tokens, chunk);
        Ok(Self { shape, rates, kv_tokens, chunk, reserve, left: memory - shape.fixed_bytes - reserve })
    }

    /// Whatever is predicted to be fastest, a kept unembedding and a shallow ring coming first.
    fn choose(&self) -> Result<Choice, MemoryError> {
        let layers = self.shape.layers();
        if all_bytes(self.shape) <= self.left {
            return self.choice(layers, true, 0);
        }
        let mut best: Option<Choice> = None;
        for buffers in FEWEST_BUFFERS..=MOST_BUFFERS {
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

    /// How many layers fit beside such a ring; nothing if not even the ring does.
    fn most_layers(&self, keep_unembedding: bool, buffers: usize) -> Option<usize> {
        let unembedding = if keep_unembedding { self.shape.unembedding_bytes() } else { 0 };
        let left = self.left.checked_sub(self.shape.ring_bytes(buffers))?.checked_sub(unembedding)?;
        (0..=self.shape.layers()).rev().find(|&count| most_bytes(self.shape, count) <= left)
    }

    /// What would come of another number of kept layers.
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

/// The longest piece of a prompt whose intermediate results leave most of the memory to the weights.
fn chunk(shape: &Shape, left: u64) -> usize {
    let fits = |rows: &usize| *rows as u64 * shape.activation_bytes_per_row <= left / ACTIVATION_SHARE;
    let mut rows =
        std::iter::successors(Some(MOST_ROWS), |rows| Some(rows / 2)).take_while(|&rows| rows > FEWEST_ROWS);
    rows.find(fits).unwrap_or(FEWEST_ROWS)
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
    fn with_room_for_all_nothing_is_streamed() {
        let plan = planned(4096 * MIB, Mode::Balanced).unwrap();
        assert_eq!((plan.kept_layers.len(), plan.keep_unembedding, plan.buffers), (24, true, 0));
        assert_eq!(plan.chunk, MOST_ROWS);
        assert_eq!(plan.prediction, *plan.table.last().unwrap());
        assert_eq!(plan.prediction.waiting, 0.0);
    }

    #[test]
    fn a_table_has_every_number_of_layers_and_the_chosen_one_among_them() {
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
    fn too_little_memory_is_said_to_be_and_what_is_said_suffices() {
        let error = planned(100 * MIB, Mode::Throughput).unwrap_err();
        let MemoryError::TooLittleMemory { needed, .. } = error else { panic!("{error}") };
        let plan = planned(needed, Mode::Throughput).unwrap();
        assert!(plan.kept_layers.is_empty() && !plan.keep_unembedding);
        assert_eq!((plan.buffers, plan.prediction.peak_bytes), (2, needed));
        assert!(planned(needed - 1, Mode::Throughput).is_err());
    }

    #[test]
    fn of_layers_and_unembedding_the_slower_to_stream_is_kept() {
        // Blocks that are read slowly for their size, since every read has its latency.
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
        fn plans_keep_to_their_memory_and_more_memory_never_slows(
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
            // A plan is chosen among those within a hundredth of the fastest, and more memory may mean a longer chunk.
            let speeds = [&small, &large].map(|plan| plan.prediction.tokens_per_second);
            prop_assert!(speeds[1] >= speeds[0] * 0.9, "{speeds:?}");
        }
    }
}
