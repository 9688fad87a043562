//! The tensors of a page, and how many positions they are allocated for.

use std::sync::Arc;

use burn::tensor::{Bytes, DType, Device, Int, Tensor, TensorData};
use firebox_kernels::attention::KvTensor;

use crate::arena::{Arena, Place};
use crate::layer_kv::LayerKv;
use crate::layout::{KvType, LayerLayout, Layout};
use crate::ledger::PageLedger;

/// Positions of a page.
pub const PAGE_TOKENS: usize = 128;

/// The fewest positions that a layer's buffer of a page holds. Buffers double as they fill, because the unused rest of
/// last pages would otherwise outweigh what conversations need.
pub(crate) const MIN_BUFFER_POSITIONS: usize = 16;

/// The tensors of a page by layer, allocated on first use and doubled on demand: fresh memory is slow to obtain, and most
/// conversations end before their last page is full. Layers that store nothing in pages have none.
#[derive(Debug, Default)]
pub(crate) struct PageBuffers {
    pub layers: Vec<Option<LayerKv>>,
    /// The places of layers in the arena. They are dropped after the tensors.
    places: Vec<Option<Place>>,
    arena: Arc<Arena>,
    /// Bytes of all tensors.
    bytes: usize,
    /// Is notified of changes of `bytes`.
    ledger: Option<Arc<dyn PageLedger>>,
}

impl PageBuffers {
    pub fn new(layout: &Layout, arena: &Arc<Arena>, ledger: Option<&Arc<dyn PageLedger>>) -> Self {
        Self {
            layers: layout.layers.iter().map(|_| None).collect(),
            places: layout.layers.iter().map(|_| None).collect(),
            arena: arena.clone(),
            bytes: 0,
            ledger: ledger.cloned(),
        }
    }

    /// Allocates buffers for `positions` in every layer.
    pub fn with_positions(
        positions: usize,
        layout: &Layout,
        arena: &Arc<Arena>,
        ledger: Option<&Arc<dyn PageLedger>>,
    ) -> Self {
        let mut buffers = Self::new(layout, arena, ledger);
        for layer in 0..layout.layers.len() {
            buffers.layer(layer, positions, layout);
        }
        buffers
    }

    /// Bytes that are allocated now.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The buffer of a layer, enlarged to hold at least `positions`.
    pub fn layer(&mut self, layer: usize, positions: usize, layout: &Layout) -> Option<&mut LayerKv> {
        let held = self.layers.get_mut(layer)?;
        let before = held.as_ref().map_or(0, LayerKv::positions);
        if held.is_none() || before < positions {
            let positions = buffer_positions(positions);
            let Layout { layers, kv_dtype, device } = layout;
            let mut place = None;
            let mut larger = match layers[layer] {
                LayerLayout::Attention { kv_heads, head_dim } => {
                    let shape = [kv_heads, positions, head_dim];
                    let shared = shared_dtype(*kv_dtype)
                        .and_then(|dtype| self.arena.take(layer, shape, device, dtype));
                    let [keys, values] = match shared {
                        Some((taken, sides)) => {
                            place = Some(taken);
                            sides
                        }
                        None => [(); 2].map(|()| empty(*kv_dtype, shape, device)),
                    };
                    LayerKv::Attention { keys, values }
                }
                LayerLayout::Latents { width } => {
                    LayerKv::Latents(empty(*kv_dtype, [1, positions, width], device))
                }
                LayerLayout::HiddenStates { width } => {
                    LayerKv::HiddenStates(empty(KvType::F32, [1, positions, width], device))
                }
                LayerLayout::Shared { .. } | LayerLayout::Recurrent => return None,
            };
            if let Some(held) = held {
                larger.assign(0, held.clone());
            }
            *held = Some(larger);
            // After it has been copied from.
            self.places[layer] = place;
            let more = (positions - before) * layout.layer_bytes(layers[layer]);
            self.bytes += more;
            if let Some(ledger) = &self.ledger {
                ledger.grew(more);
            }
        }
        held.as_mut()
    }
}

/// The size of the buffer that is allocated to hold `positions`.
fn buffer_positions(positions: usize) -> usize {
    positions.next_power_of_two().clamp(MIN_BUFFER_POSITIONS, PAGE_TOKENS)
}

/// Positions allocated for a sequence of `tokens` tokens.
pub fn allocated_positions(tokens: usize) -> usize {
    let rest = tokens % PAGE_TOKENS;
    tokens - rest + if rest == 0 { 0 } else { buffer_positions(rest) }
}

impl Drop for PageBuffers {
    fn drop(&mut self) {
        if let Some(ledger) = &self.ledger {
            ledger.shrank(self.bytes);
        }
    }
}

/// Returns whether a device has memory of its own.
pub(crate) fn is_accelerator(device: &Device) -> bool {
    firebox_kernels::host_device(device) != *device
}

/// The dtype of keys and values that may share memory with others.
fn shared_dtype(kv_dtype: KvType) -> Option<DType> {
    match kv_dtype {
        KvType::F32 => Some(DType::F32),
        KvType::F16 => Some(DType::F16),
        KvType::Int8 => None,
    }
}

fn empty(kv_dtype: KvType, shape: [usize; 3], device: &Device) -> KvTensor {
    match kv_dtype {
        KvType::F32 | KvType::F16 if is_accelerator(device) => {
            // An accelerator fills its own memory faster than it receives zeros.
            let dtype = if kv_dtype == KvType::F32 { DType::F32 } else { DType::F16 };
            KvTensor::Float(Tensor::zeros(shape, (device, dtype)))
        }
        KvType::F32 | KvType::F16 => {
            let count = shape.iter().product();
            // Built from zeros that the tensor takes over: filling a tensor needs a second buffer of its size for a moment, which
            // is slow to obtain on a virtual machine.
            let (zeros, dtype) = match kv_dtype {
                KvType::F32 => (Bytes::from_elems(vec![0f32; count]), DType::F32),
                _ => (Bytes::from_elems(vec![0u16; count]), DType::F16),
            };
            let zeros = TensorData::from_bytes(zeros, shape, dtype);
            KvTensor::Float(Tensor::from_data(zeros, (device, dtype)))
        }
        KvType::Int8 => {
            let [kv_heads, positions, head_dim] = shape;
            let words = [kv_heads, positions, head_dim.div_ceil(4)];
            KvTensor::Bytes {
                words: Tensor::<3, Int>::zeros(words, (device, DType::I32)),
                scales: Tensor::zeros([kv_heads, positions], (device, DType::F32)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocated_positions_predicts_the_bytes_of_pages() {
        let layers = vec![LayerLayout::Attention { kv_heads: 1, head_dim: 4 }];
        let layout = Layout { layers, kv_dtype: KvType::F32, device: Device::flex() };
        for (tokens, held) in [
            (0, 0),
            (1, MIN_BUFFER_POSITIONS),
            (MIN_BUFFER_POSITIONS, MIN_BUFFER_POSITIONS),
            (17, 32),
            (PAGE_TOKENS, PAGE_TOKENS),
            (PAGE_TOKENS + 1, PAGE_TOKENS + MIN_BUFFER_POSITIONS),
        ] {
            assert_eq!(allocated_positions(tokens), held, "{tokens}");
            let pages = (0..2).map(|page| tokens.saturating_sub(page * PAGE_TOKENS).min(PAGE_TOKENS));
            let buffers = pages
                .filter(|&positions| positions > 0)
                .map(|positions| PageBuffers::with_positions(positions, &layout, &Arc::default(), None));
            assert_eq!(
                buffers.map(|buffers| buffers.bytes()).sum::<usize>(),
                held * layout.bytes_per_position(),
                "{tokens}"
            );
        }
    }
}
