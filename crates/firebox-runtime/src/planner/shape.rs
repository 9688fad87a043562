use firebox_cache::{KvType, Layout};
use firebox_model::config::{AttentionConfig, DecoderConfig, DeltaNetConfig, FeedForwardConfig, MixerConfig};
use firebox_model::{EncoderConfig, Partition};
use firebox_store::Checkpoint;
use serde::{Deserialize, Serialize};

use crate::RuntimeError;

/// The program with its threads: a model of a few kilobytes was measured to run in 26 MiB.
pub(crate) const PROGRAM_BYTES: u64 = 32 << 20;

/// A token in the tables of a tokenizer, with its merge: 77 were measured on a vocabulary of 152,000, and 200 while it was made
/// from JSON.
const TOKENIZER_BYTES_PER_TOKEN: u64 = 128;

/// An allocator keeps what one operation has given back for others of its size, and products pack what they multiply:
/// 0.9 to 1.8 times what is alive was measured to be resident.
const ALLOCATED: usize = 2;

/// Of so many bytes that are read one more is read beside them, because blocks of a disk are read whole.
const READ_BESIDE: u64 = 128;

/// Hidden states that live at the same time: the residual, its normed copy, and an output to be added.
const HIDDEN_COPIES: usize = 3;

/// One of the parts that a forward pass goes through in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// What is read when it is streamed.
    pub bytes: u64,
    /// What it takes in memory when it is kept.
    pub kept_bytes: u64,
    /// Whether it is a layer; the others are blocks of the unembedding.
    pub is_layer: bool,
}

/// What a model is made of, as far as memory and speed go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// In the order of a forward pass: the layers, then the blocks of the unembedding.
    pub parts: Vec<Part>,
    /// Keys and values of one token in all layers.
    pub kv_bytes_per_token: u64,
    /// Intermediate results of one row of a pass.
    pub activation_bytes_per_row: u64,
    /// What is in memory whatever is streamed: program, tokenizer, logits.
    pub fixed_bytes: u64,
}

impl Shape {
    /// The shape of a model on disk.
    pub fn of(checkpoint: &Checkpoint, config: &DecoderConfig, kept: KvType) -> Result<Self, RuntimeError> {
        let partition = Partition::of(checkpoint, config)?;
        let parts = partition.portions.iter().enumerate().map(|(index, portion)| Part {
            bytes: portion.bytes() + experts_read(config, &partition, index),
            kept_bytes: partition.kept_bytes(index),
            is_layer: index < partition.block_parts(),
        });
        let parts = parts.collect();
        let layers = config.blocks.iter().map(|block| block.layout()).collect();
        let layout = Layout { layers, kv_dtype: kept, device: Default::default() };
        let vocabulary = config.vocab_size as u64;
        Ok(Self {
            parts,
            kv_bytes_per_token: layout.bytes_per_position() as u64,
            activation_bytes_per_row: activation_bytes_per_row(config),
            fixed_bytes: PROGRAM_BYTES + vocabulary * (TOKENIZER_BYTES_PER_TOKEN + size_of::<f32>() as u64),
        })
    }

    /// How many layers there are.
    pub fn layers(&self) -> usize {
        self.parts.iter().filter(|part| part.is_layer).count()
    }

    /// What the unembedding takes in memory when it is kept.
    pub fn unembedding_bytes(&self) -> u64 {
        self.parts.iter().filter(|part| !part.is_layer).map(|part| part.kept_bytes).sum()
    }

    /// What keys and values of so many tokens take, and the activations of so many rows.
    pub(crate) fn reserve(&self, kv_tokens: usize, rows: usize) -> u64 {
        let keys_and_values = (kv_tokens as u64).saturating_mul(self.kv_bytes_per_token);
        keys_and_values.saturating_add((rows as u64).saturating_mul(self.activation_bytes_per_row))
    }

    /// What a ring of buffers takes. Each has room for the largest part, so that what is kept may change while a model
    /// runs and the ring stays.
    pub(crate) fn ring_bytes(&self, buffers: usize) -> u64 {
        let largest = self.parts.iter().map(|part| part.bytes).max().unwrap_or(0);
        buffers as u64 * (largest + largest / READ_BESIDE)
    }

    /// Which parts are kept, from which layers are.
    pub fn kept_parts(&self, layers: &[usize], unembedding: bool) -> Vec<bool> {
        let mut seen = 0;
        let is_kept = |part: &Part| {
            seen += usize::from(part.is_layer);
            if part.is_layer { layers.contains(&(seen - 1)) } else { unembedding }
        };
        self.parts.iter().map(is_kept).collect()
    }

    /// What these layers take in memory when they are kept.
    pub(super) fn layer_bytes(&self, layers: &[usize]) -> u64 {
        let of_layers: Vec<u64> =
            self.parts.iter().filter(|part| part.is_layer).map(|part| part.kept_bytes).collect();
        layers.iter().filter_map(|&layer| of_layers.get(layer)).sum()
    }
}

/// Bytes of the experts that a token chooses in a layer.
fn experts_read(config: &DecoderConfig, partition: &Partition, part: usize) -> u64 {
    let (Some(block), Some(whole)) = (config.blocks.get(part), partition.whole.get(part)) else { return 0 };
    let FeedForwardConfig::MixtureOfExperts(mixture) = &block.feed_forward else { return 0 };
    let experts = whole.bytes() - partition.portions[part].bytes();
    experts * mixture.chosen as u64 / mixture.experts.max(1) as u64
}

/// The widest layer decides: the results of one are gone before the next computes.
fn activation_bytes_per_row(config: &DecoderConfig) -> u64 {
    let numbers = config.blocks.iter().map(|block| {
        let mixer = match &block.mixer {
            MixerConfig::Attention(attention) => attention_numbers(attention),
            MixerConfig::GatedDeltaNet(net) => delta_net_numbers(net),
        };
        let feed_forward = match &block.feed_forward {
            // Gate, up, and their product.
            FeedForwardConfig::Gated(gated) => 3 * gated.inner_size,
            FeedForwardConfig::MixtureOfExperts(experts) => 3 * experts.expert.inner_size * experts.chosen,
        };
        mixer.max(feed_forward)
    });
    let widest = numbers.max().unwrap_or(0) + HIDDEN_COPIES * config.hidden_size;
    (ALLOCATED * widest * size_of::<f32>()) as u64
}

/// Intermediate results of texts of such lengths that go through an encoder together.
pub(crate) fn encoder_activation_bytes(
    config: &EncoderConfig,
    lengths: impl Iterator<Item = usize> + Clone,
) -> u64 {
    let EncoderConfig { hidden_size, inner_size, heads, .. } = *config;
    // Queries, keys, values and what comes of them, or what goes into an activation and what comes out.
    let widest = (4 * hidden_size).max(2 * inner_size) + HIDDEN_COPIES * hidden_size;
    let (rows, longest) = (lengths.clone().sum::<usize>(), lengths.max().unwrap_or(0));
    // One text attends after the other: scores, and the shares that they come to.
    let attended = 2 * heads * longest * longest;
    (ALLOCATED * (rows * widest + attended) * size_of::<f32>()) as u64
}

/// Queries, keys and values before and after their rotation, the output of every head, and a gate where there is one.
fn attention_numbers(attention: &AttentionConfig) -> usize {
    let projected = (attention.heads + 2 * attention.kv_heads) * attention.head_dim;
    let of_heads = attention.heads * attention.head_dim;
    2 * projected + if attention.gated { 2 * of_heads } else { of_heads }
}

/// What goes into the convolution and what comes out, the output of every head, and its gate.
fn delta_net_numbers(net: &DeltaNetConfig) -> usize {
    let values = net.value_heads * net.value_dim;
    2 * (2 * net.key_heads * net.key_dim + values) + 2 * values
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
        let shape = Shape::of(&checkpoint, &config, KvType::F16).unwrap();
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

    #[test]
    fn layers_are_counted_among_the_parts() {
        let layer = Part { bytes: 2, kept_bytes: 3, is_layer: true };
        let block = Part { bytes: 1, kept_bytes: 1, is_layer: false };
        let shape = Shape {
            parts: vec![layer, layer, block, block],
            kv_bytes_per_token: 0,
            activation_bytes_per_row: 0,
            fixed_bytes: 0,
        };
        assert_eq!(shape.kept_parts(&[1], false), [false, true, false, false]);
        assert_eq!(shape.kept_parts(&[0], true), [true, false, true, true]);
        assert_eq!((shape.layer_bytes(&[0, 1]), shape.unembedding_bytes(), shape.ring_bytes(2)), (6, 2, 4));
    }
}
