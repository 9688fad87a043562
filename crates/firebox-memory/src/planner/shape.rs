//! The parts of a model, as far as memory and speed depend on them.

use serde::{Deserialize, Serialize};

/// One byte more is read for every so many bytes of a part, because a disk reads whole blocks.
const BYTES_PER_EXTRA_BYTE: u64 = 128;

/// A part of a model. A forward pass goes through the parts in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Bytes read when it is streamed.
    pub bytes: u64,
    /// Bytes in memory when it is resident.
    pub kept_bytes: u64,
    /// Whether it is a layer; the other parts are blocks of the unembedding.
    pub is_layer: bool,
}

/// The sizes of a model that decide its memory and speed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// The layers, then the blocks of the unembedding, in the order of a pass.
    pub parts: Vec<Part>,
    /// Bytes of keys and values of one token in all layers.
    pub kv_bytes_per_token: u64,
    /// Bytes of intermediate results of one row of a pass.
    pub activation_bytes_per_row: u64,
    /// Bytes that are in memory whatever is streamed: program, tokenizer, logits.
    pub fixed_bytes: u64,
}

impl Shape {
    /// Returns the number of layers.
    pub fn layers(&self) -> usize {
        self.parts.iter().filter(|part| part.is_layer).count()
    }

    /// Returns the bytes of a resident unembedding.
    pub fn unembedding_bytes(&self) -> u64 {
        self.parts.iter().filter(|part| !part.is_layer).map(|part| part.kept_bytes).sum()
    }

    /// Returns the bytes of keys and values of `kv_tokens`, and of the activations of `rows`.
    pub fn reserve(&self, kv_tokens: usize, rows: usize) -> u64 {
        let keys_and_values = (kv_tokens as u64).saturating_mul(self.kv_bytes_per_token);
        keys_and_values.saturating_add((rows as u64).saturating_mul(self.activation_bytes_per_row))
    }

    /// Returns the bytes of a ring of buffers. Each holds the largest part, so that the ring stays the same when the resident
    /// parts change.
    pub fn ring_bytes(&self, buffers: usize) -> u64 {
        let largest = self.parts.iter().map(|part| part.bytes).max().unwrap_or(0);
        buffers as u64 * (largest + largest / BYTES_PER_EXTRA_BYTE)
    }

    /// Returns which parts are resident, given the resident layers.
    pub fn kept_parts(&self, layers: &[usize], unembedding: bool) -> Vec<bool> {
        let mut seen = 0;
        let is_kept = |part: &Part| {
            seen += usize::from(part.is_layer);
            if part.is_layer { layers.contains(&(seen - 1)) } else { unembedding }
        };
        self.parts.iter().map(is_kept).collect()
    }

    /// Returns the bytes of these layers when they are resident.
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
