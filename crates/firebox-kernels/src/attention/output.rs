//! The output of attention over one span or several.

use burn::tensor::{DType, Device, Tensor};

/// Output of attention over one or more spans.
#[derive(Debug, Clone)]
pub struct AttentionOutput {
    /// Weighted mean of the values, `[rows, heads, head_dim]`; zero where nothing was visible.
    pub output: Tensor<3>,
    /// Log-sum-exp of the scores, `[rows, heads]`; -inf where nothing was visible.
    pub log_sum_exp: Tensor<2>,
}

impl AttentionOutput {
    pub(super) fn nothing(shape: [usize; 3], device: &Device) -> Self {
        let [rows, heads, _] = shape;
        Self {
            output: Tensor::zeros(shape, (device, DType::F32)),
            log_sum_exp: Tensor::full([rows, heads], f32::NEG_INFINITY, (device, DType::F32)),
        }
    }
}
