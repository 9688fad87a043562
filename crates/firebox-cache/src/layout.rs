//! The layout of a cache: what each layer stores per position, and in which number format.

use burn::tensor::{Device, Tensor};
use firebox_kernels::attention::KvTensor;

/// The number format of stored keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum KvType {
    /// 32-bit floats, as computed.
    F32,
    /// Half precision: half the memory and half the reading at every token.
    #[default]
    F16,
    /// Bytes with one scale per head and position: slightly more than a quarter of the memory.
    Int8,
}

impl KvType {
    /// Converts numbers `[kv_heads, positions, head_dim]` to a form that can be [assigned](KvTensor::assign) to storage of this type.
    pub(crate) fn store(self, numbers: Tensor<3>) -> KvTensor {
        match self {
            Self::F32 | Self::F16 => KvTensor::Float(numbers),
            Self::Int8 => KvTensor::quantize(numbers),
        }
    }

    /// Bytes of one head at one position.
    fn row_bytes(self, head_dim: usize) -> usize {
        match self {
            Self::F32 => 4 * head_dim,
            Self::F16 => 2 * head_dim,
            Self::Int8 => head_dim.next_multiple_of(4) + size_of::<f32>(),
        }
    }
}

/// What one layer stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerLayout {
    /// A key and a value per head and position.
    Attention {
        /// Heads of keys and values.
        kv_heads: usize,
        /// Width of one head.
        head_dim: usize,
    },
    /// Nothing: it reads the keys and values of an earlier layer.
    Shared {
        /// The layer that stores them.
        layer: usize,
    },
    /// A row per position that is key and value of one head at once.
    Latents {
        /// Width of a row.
        width: usize,
    },
    /// A state of constant size.
    Recurrent,
    /// Exact hidden states between two layers, from which the layers behind them can be run again.
    HiddenStates {
        /// Width of a hidden state.
        width: usize,
    },
}

/// What all layers of a model store, and how.
#[derive(Debug, Clone)]
pub struct Layout {
    /// The layers in order.
    pub layers: Vec<LayerLayout>,
    /// The number format of keys and values.
    pub kv_dtype: KvType,
    /// The device that holds them.
    pub device: Device,
}

impl Layout {
    /// Bytes of one position over all layers.
    pub fn bytes_per_position(&self) -> usize {
        self.layers.iter().map(|layer| self.layer_bytes(*layer)).sum()
    }

    /// Bytes of one position in one layer.
    pub(crate) fn layer_bytes(&self, layer: LayerLayout) -> usize {
        match layer {
            LayerLayout::Attention { kv_heads, head_dim } => 2 * kv_heads * self.kv_dtype.row_bytes(head_dim),
            LayerLayout::Latents { width } => self.kv_dtype.row_bytes(width),
            LayerLayout::Shared { .. } | LayerLayout::Recurrent => 0,
            LayerLayout::HiddenStates { width } => KvType::F32.row_bytes(width),
        }
    }

    /// Returns whether any layer has a recurrent state.
    pub fn is_recurrent(&self) -> bool {
        self.layers.contains(&LayerLayout::Recurrent)
    }
}
