//! Quantization of keys and values to bytes.

use burn::tensor::{DType, Tensor};

use super::kv_tensor::KvTensor;
use super::ops::AttentionOps;
use super::reference;
use crate::flex::{DispatchBackend, has_native_ops};

impl KvTensor {
    /// Quantizes `[kv_heads, positions, head_dim]` to bytes. The largest magnitude of each head and position
    /// becomes 127.
    pub fn quantize(values: Tensor<3>) -> Self {
        let values = values.cast(DType::F32);
        if !has_native_ops(&values.device()) || values.shape().num_elements() == 0 {
            return reference::quantize(values);
        }
        let (words, scales) = <DispatchBackend as AttentionOps>::quantize(values.into_dispatch());
        Self::Bytes { words: Tensor::from_dispatch(words), scales: Tensor::from_dispatch(scales) }
    }

    /// Returns the values in f32, `[kv_heads, positions, head_dim]`.
    pub fn dequantize(&self, head_dim: usize) -> Tensor<3> {
        reference::dequantize(self, head_dim)
    }
}
