use burn::tensor::{Device, Tensor};
use firebox_kernels::attend::Stored;

/// What keys and values are kept in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum KvType {
    /// As they were computed.
    F32,
    /// Rounded to half precision: half the memory, and half the reading at every token.
    #[default]
    F16,
    /// Rounded to bytes, with a scale for every head and position: a little more than a quarter.
    Int8,
}

impl KvType {
    /// Numbers `[kv_heads, positions, head_dim]` as they can be [assigned](Stored::assign) to what keeps them.
    pub(crate) fn store(self, numbers: Tensor<3>) -> Stored {
        match self {
            Self::F32 | Self::F16 => Stored::Float(numbers),
            Self::Int8 => Stored::quantize(numbers),
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

/// What one layer remembers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerLayout {
    /// A key and a value of every head for every position.
    Attention {
        /// Heads of keys and values.
        kv_heads: usize,
        /// Width of one head.
        head_dim: usize,
    },
    /// A state of constant size.
    Recurrent,
    /// Hidden states between two layers, exact: what layers behind them need to be run again.
    States {
        /// Width of a hidden state.
        width: usize,
    },
}

/// What all layers of a model remember, and how.
#[derive(Debug, Clone)]
pub struct Layout {
    /// Layer by layer.
    pub layers: Vec<LayerLayout>,
    /// What keys and values are kept in.
    pub kept: KvType,
    /// Where they are kept.
    pub device: Device,
}

impl Layout {
    /// Bytes that the keys and values of one position take in all layers together.
    pub fn bytes_per_position(&self) -> usize {
        self.layers.iter().map(|layer| self.layer_bytes(*layer)).sum()
    }

    /// Bytes that one position takes in a layer.
    pub(crate) fn layer_bytes(&self, layer: LayerLayout) -> usize {
        match layer {
            LayerLayout::Attention { kv_heads, head_dim } => 2 * kv_heads * self.kept.row_bytes(head_dim),
            LayerLayout::Recurrent => 0,
            LayerLayout::States { width } => KvType::F32.row_bytes(width),
        }
    }

    /// Whether any layer has a recurrent state.
    pub fn is_recurrent(&self) -> bool {
        self.layers.contains(&LayerLayout::Recurrent)
    }
}
