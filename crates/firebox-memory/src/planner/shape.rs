//! The parts of a model, as far as memory and speed depend on them.

use serde::{Deserialize, Serialize};

/// One byte more is read for every so many bytes of a part, because a disk reads whole blocks.
const READ_BESIDE: u64 = 128;

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
    /// How many layers there are.
    pub fn layers(&self) -> usize {
        self.parts.iter().filter(|part| part.is_layer).count()
    }

    /// What the unembedding takes in memory when it is kept.
    pub fn unembedding_bytes(&self) -> u64 {
        self.parts.iter().filter(|part| !part.is_layer).map(|part| part.kept_bytes).sum()
    }

    /// What keys and values of so many tokens take, and the activations of so many rows.
    pub fn reserve(&self, kv_tokens: usize, rows: usize) -> u64 {
        let keys_and_values = (kv_tokens as u64).saturating_mul(self.kv_bytes_per_token);
        keys_and_values.saturating_add((rows as u64).saturating_mul(self.activation_bytes_per_row))
    }

    /// What a ring of buffers takes. Each has room for the largest part, so that what is kept may change while a model
    /// runs and the ring stays.
    pub fn ring_bytes(&self, buffers: usize) -> u64 {
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

#[cfg(test)]
mod tests {
    use super::*;

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
