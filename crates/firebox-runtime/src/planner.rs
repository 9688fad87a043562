//! Plans how much of a model stays in memory: the planner of `firebox-memory`, with shapes read from checkpoints.

use firebox_cache::{KvType, Layout};
use firebox_model::config::{
    AttentionConfig, BlockConfig, DecoderConfig, DeltaNetConfig, FeedForwardConfig, LatentAttentionConfig,
    MambaConfig, MixerConfig,
};
use firebox_model::{EncoderConfig, Partition, QUERIES_AT_ONCE};
use firebox_store::Checkpoint;

pub use firebox_memory::planner::{
    Compared, DeviceProfile, Explanation, FEWEST_BUFFERS, KV_PAGE_TOKENS, Mode, Part, Placement, Plan,
    Prediction, Rates, Shape, place, plan, predict, spread,
};

use crate::RuntimeError;

const _: () = assert!(KV_PAGE_TOKENS == firebox_cache::PAGE_TOKENS);

/// Memory of the program and its threads: a model of a few kilobytes was measured to run in 26 MiB.
pub(crate) const PROGRAM_BYTES: u64 = 32 << 20;

/// Bytes of a token in the tables of a tokenizer, with its merge: 77 were measured with a vocabulary of 152,000, and
/// 200 while the tokenizer was built from JSON.
const TOKENIZER_BYTES_PER_TOKEN: u64 = 128;

/// Ratio of resident to live memory: the allocator caches freed blocks by size, and matrix products pack their
/// operands. 0.9 to 1.8 were measured.
const ALLOCATED: usize = 2;

/// Hidden states that are alive at once: the residual, its normed copy, and an output to be added.
const HIDDEN_COPIES: usize = 3;

/// Returns the shape of a model on disk.
pub fn decoder_shape(
    checkpoint: &Checkpoint,
    config: &DecoderConfig,
    kept: KvType,
) -> Result<Shape, RuntimeError> {
    let partition = Partition::of(checkpoint, config)?;
    let parts = partition.units.iter().enumerate().map(|(index, unit)| Part {
        bytes: unit.bytes() + experts_read(config, &partition, index),
        kept_bytes: partition.part_bytes(index),
        is_layer: index < partition.block_parts(),
    });
    let parts = parts.collect();
    let layers = config.blocks.iter().map(|block| block.layout()).collect();
    let layout = Layout { layers, kv_dtype: kept, device: Default::default() };
    let vocabulary = config.vocab_size as u64;
    Ok(Shape {
        parts,
        kv_bytes_per_token: layout.bytes_per_position() as u64,
        activation_bytes_per_row: activation_bytes_per_row(config),
        fixed_bytes: PROGRAM_BYTES + vocabulary * (TOKENIZER_BYTES_PER_TOKEN + size_of::<f32>() as u64),
    })
}

/// Returns the bytes of the experts that a token activates in a layer.
fn experts_read(config: &DecoderConfig, partition: &Partition, part: usize) -> u64 {
    let (Some(block), Some(whole)) = (config.blocks.get(part), partition.whole.get(part)) else { return 0 };
    let FeedForwardConfig::MixtureOfExperts(mixture) = &block.feed_forward else { return 0 };
    let experts = whole.bytes() - partition.units[part].bytes();
    experts * mixture.chosen as u64 / mixture.experts.max(1) as u64
}

/// Returns the bytes of activations per row.
fn activation_bytes_per_row(config: &DecoderConfig) -> u64 {
    // Inputs of all layers stay for the whole pass.
    let inputs = config.layer_inputs.as_ref().map_or(0, |inputs| inputs.width * config.blocks.len());
    let numbers = numbers_per_row(&config.blocks, config.hidden_size) + inputs;
    (ALLOCATED * numbers * size_of::<f32>()) as u64
}

/// Returns how many numbers a row needs. The widest layer decides, because a layer's results are freed before the next one
/// runs.
fn numbers_per_row(blocks: &[BlockConfig], hidden_size: usize) -> usize {
    let numbers = blocks.iter().map(|block| {
        let mixer = match &block.mixer {
            MixerConfig::Attention(attention) => attention_numbers(attention),
            MixerConfig::LatentAttention(attention) => latent_attention_numbers(attention),
            MixerConfig::GatedDeltaNet(net) => delta_net_numbers(net),
            // What the projection yields, both products and the sums.
            MixerConfig::ShortConvolution(convolution) => 6 * convolution.hidden_size,
            MixerConfig::Mamba(mamba) => mamba_numbers(mamba),
            MixerConfig::Absent => 0,
        };
        let feed_forward = match &block.feed_forward {
            // Gate, up, and their product.
            FeedForwardConfig::Gated(gated) => 3 * gated.inner_size,
            // Before and after the activation.
            FeedForwardConfig::Plain(plain) => 2 * plain.inner_size,
            FeedForwardConfig::MixtureOfExperts(experts) => {
                let shared = experts.shared.as_ref().map_or(0, |shared| shared.network.inner_size);
                3 * (experts.expert.inner_size * experts.chosen + shared)
            }
            FeedForwardConfig::Absent => 0,
        };
        mixer.max(feed_forward)
    });
    numbers.max().unwrap_or(0) + HIDDEN_COPIES * hidden_size
}

/// Returns the bytes of activations when an encoder processes texts of these lengths in one pass.
pub(crate) fn encoder_activation_bytes(
    config: &EncoderConfig,
    lengths: impl Iterator<Item = usize> + Clone,
) -> u64 {
    let widest = numbers_per_row(&config.blocks, config.hidden_size);
    let (rows, longest) = (lengths.clone().sum::<usize>(), lengths.max().unwrap_or(0));
    // Texts attend one after the other, in pieces: scores and attention weights.
    let attended = 2 * config.heads() * longest.min(QUERIES_AT_ONCE) * longest;
    (ALLOCATED * (rows * widest + attended) * size_of::<f32>()) as u64
}

/// Returns how many numbers a row of attention needs: queries, keys and values before and after their rotation, the
/// output of every head, and a gate if there is one.
fn attention_numbers(attention: &AttentionConfig) -> usize {
    let projected = (attention.heads + 2 * attention.kv_heads) * attention.head_dim;
    let of_heads = attention.heads * attention.head_dim;
    2 * projected + if attention.gated { 2 * of_heads } else { of_heads }
}

/// Returns how many numbers a row of attention over latents needs: queries before and after they are multiplied by the factors of keys,
/// the latents that heads attend to, the output of every head, and the latents of queries and of the row itself.
fn latent_attention_numbers(attention: &LatentAttentionConfig) -> usize {
    let LatentAttentionConfig { heads, query_rank, plain_dim, rotated_dim, value_dim, .. } = *attention;
    let width = attention.width();
    heads * (plain_dim + 2 * rotated_dim + 3 * width + value_dim) + query_rank.unwrap_or(0) + 2 * width
}

/// Returns how many numbers a row of a delta net needs: input and output of the convolution, the output of every head,
/// and its gate.
fn delta_net_numbers(net: &DeltaNetConfig) -> usize {
    let values = net.value_heads * net.value_dim;
    2 * (2 * net.key_heads * net.key_dim + values) + 2 * values
}

/// Returns how many numbers a row of Mamba needs: what the projection yields, the parts of it, sums and output of the
/// convolution, the output of every head, gated and normed.
fn mamba_numbers(mamba: &MambaConfig) -> usize {
    let inner = mamba.heads * mamba.head_dim;
    let channels = inner + 2 * mamba.groups * mamba.states;
    2 * (inner + channels + mamba.heads) + 2 * channels + 3 * inner
}

#[cfg(test)]
mod tests {
    use super::*;
    use firebox_model::Architecture;

    fn shape(family: &str) -> (Checkpoint, Shape) {
        let path = format!("{}/../../tests/fixtures/reference/{family}", env!("CARGO_MANIFEST_DIR"));
        let checkpoint = Checkpoint::open(path).unwrap();
        let Architecture::Decoder(config) = Architecture::from_json(checkpoint.config()).unwrap() else {
            panic!("{family} is no decoder")
        };
        let shape = decoder_shape(&checkpoint, &config, KvType::F16).unwrap();
        assert_eq!(shape.layers(), config.blocks.len());
        (checkpoint, shape)
    }

    #[test]
    fn a_shape_has_all_that_is_read_in_a_pass() {
        for (family, tied) in [("llama", false), ("gemma3_text", true)] {
            let (checkpoint, shape) = shape(family);
            let embedding = if tied { "model.embed_tokens.weight" } else { "lm_head.weight" };
            let is_read = |name: &str| name.contains(".layers.") || name == embedding;
            let read = checkpoint.tensors().filter(|info| is_read(&info.name));
            let expected: u64 = read.map(|info| info.bytes).sum();
            assert_eq!(shape.parts.iter().map(|part| part.bytes).sum::<u64>(), expected, "{family}");
            assert!(shape.kv_bytes_per_token > 0 && shape.activation_bytes_per_row > 0);
        }
    }
}
