//! The gated delta rule: a matrix per head that decays by a gate and is corrected towards every token.

#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
mod flex;
pub mod reference;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
use burn::tensor::{DType, Tensor};

use crate::flex::{DispatchBackend, has_native_ops, is_flex};

/// Added to the squared length of a query or key.
const EPSILON: f64 = 1e-6;

/// Largest key width that the accelerator kernel supports.
const MAX_KEY_WIDTH: usize = 3072;

/// Layout of a token's channels in heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Heads of queries and of keys.
    pub key_heads: usize,
    /// Heads of values, a multiple of the key heads; each has a matrix.
    pub value_heads: usize,
    /// Width of a query or key.
    pub key_width: usize,
    /// Width of a value.
    pub value_width: usize,
    /// Whether value head `h` belongs to key head `h % key_heads`, and not `h / (value_heads / key_heads)`.
    pub tiled: bool,
}

/// Inputs of the rule for some tokens.
#[derive(Debug, Clone)]
pub struct Tokens {
    /// Queries of all key heads, then keys, then values of all value heads, `[tokens, channels]` in f64, or
    /// in f32 on devices without f64. Queries and keys are normalised to length one.
    pub mixed: Tensor<2>,
    /// Step size of the correction before the sigmoid, `[tokens, value heads]` in f32.
    pub step: Tensor<2>,
    /// Decay before the bias and the softplus, `[tokens, value heads]` in f32.
    pub decay: Tensor<2>,
}

/// Decay parameters of every head, in f32.
#[derive(Debug, Clone)]
pub struct DecayParams {
    /// Factor of a token's decay, `[value heads]`: a negative number, or the logarithm of its negation.
    pub rate: Tensor<1>,
    /// Added to a token's decay, `[value heads]`.
    pub bias: Tensor<1>,
    /// Whether `rate` is a logarithm.
    pub logarithmic: bool,
}

/// Runs the memory `[value heads, key width, value width]` (zero if absent) through the tokens: decay,
/// correct, read. Returns the reads, `[tokens, value heads * value width]` rounded to f32, and the memory
/// after the last token, in f64. Accelerators compute and keep the memory in f32, because few support f64 and
/// fewer are fast at it.
///
/// A token's result does not depend, to the last bit, on the number of tokens in the call. Many tokens
/// therefore take the same steps as one: the chunked form sums the contributions of a chunk before they meet
/// the memory, so its rounding depends on where chunks begin. With many tokens, a few columns of a matrix
/// stay in the L1 cache for all of them.
pub fn delta_rule(
    tokens: Tokens,
    decay_params: DecayParams,
    heads: Heads,
    memory: Option<Tensor<3>>,
) -> (Tensor<2>, Tensor<3>) {
    let device = tokens.mixed.device();
    let accelerated = has_native_ops(&device) && !is_flex(&device);
    let dtype = if accelerated { DType::F32 } else { DType::F64 };
    let memory = match memory {
        Some(memory) => memory.cast(dtype),
        None => {
            let shape = [heads.value_heads, heads.key_width, heads.value_width];
            Tensor::zeros(shape, (&device, dtype))
        }
    };
    if !has_native_ops(&device) || accelerated && heads.key_width > MAX_KEY_WIDTH {
        return reference::delta_rule(tokens, decay_params, heads, memory);
    }
    let (read, memory) = <DispatchBackend as DeltaOps>::delta_rule(
        tokens.mixed.cast(dtype).into_dispatch(),
        tokens.step.cast(DType::F32).into_dispatch(),
        tokens.decay.cast(DType::F32).into_dispatch(),
        decay_params.rate.cast(DType::F32).into_dispatch(),
        decay_params.bias.cast(DType::F32).into_dispatch(),
        memory.into_dispatch(),
        heads,
        decay_params.logarithmic,
    );
    (Tensor::from_dispatch(read), Tensor::from_dispatch(memory))
}

impl Heads {
    fn channels(&self) -> usize {
        2 * self.key_heads * self.key_width + self.value_heads * self.value_width
    }

    fn key_head(&self, value_head: usize) -> usize {
        if self.tiled {
            value_head % self.key_heads
        } else {
            value_head / (self.value_heads / self.key_heads)
        }
    }
}

#[backend_extension(Flex, Cube: cfg(any(feature = "wgpu", feature = "cuda")))]
pub(crate) trait DeltaOps: Backend {
    #[allow(clippy::too_many_arguments)] // The macro passes tensors on one by one.
    fn delta_rule(
        mixed: FloatTensor<Self>,
        step: FloatTensor<Self>,
        decay: FloatTensor<Self>,
        rate: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        memory: FloatTensor<Self>,
        heads: Heads,
        logarithmic: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}
