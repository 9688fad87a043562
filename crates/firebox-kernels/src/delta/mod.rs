//! The gated delta rule: a matrix per head that forgets by a gate and is corrected towards every token.

#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
mod flex;
pub mod reference;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
use burn::tensor::{DType, Tensor};

use crate::flex::{DispatchBackend, has_native_ops, is_flex};

/// Added to the square of a query's or key's length.
const EPSILON: f64 = 1e-6;

/// The widest key that accelerators have a version for.
const MAX_KEY_WIDTH: usize = 3072;

/// How the channels of a token are split into heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Heads of queries and of keys.
    pub key_heads: usize,
    /// Heads of values, a multiple of the key heads: as many matrices.
    pub value_heads: usize,
    /// Width of a query or key.
    pub key_width: usize,
    /// Width of a value.
    pub value_width: usize,
    /// Whether value head `h` belongs to key head `h % key_heads`, and not `h / (value_heads / key_heads)`.
    pub tiled: bool,
}

/// What the rule reads for some tokens.
#[derive(Debug, Clone)]
pub struct Tokens {
    /// The queries of all key heads, their keys, and the values of all value heads, `[tokens, channels]` in f64,
    /// or in f32 on devices that have nothing wider. Queries and keys may have any length, and count as if they had
    /// length one.
    pub mixed: Tensor<2>,
    /// How far to correct, before the sigmoid, `[tokens, value heads]` in f32.
    pub step: Tensor<2>,
    /// How much to forget, before the bias and the softplus, `[tokens, value heads]` in f32.
    pub decay: Tensor<2>,
}

/// How fast every head forgets, in f32.
#[derive(Debug, Clone)]
pub struct DecayParams {
    /// Multiplies a token's decay, `[value heads]`: a negative number, or the logarithm of its opposite.
    pub rate: Tensor<1>,
    /// Added to a token's decay, `[value heads]`
    pub bias: Tensor<1>,
    /// Whether `rate` is the logarithm.
    pub logarithmic: bool,
}

/// Takes the memory `[value heads, key width, value width]`, zero where it is absent, through the tokens: forget,
/// correct, read. Returns what was read, `[tokens, value heads * value width]` rounded to f32, and the memory after
/// the last token, in f64. Accelerators compute in f32 and have the memory in f32 too, because few of them know f64 and
/// fewer are fast at it.
///
/// A token's result does not depend on how many come with it, to the last bit. That is why many tokens take the same
/// steps as one: the form that works on chunks of tokens by matrix products sums what a chunk contributes before it
/// meets the memory, and so rounds differently wherever the chunks are cut. What many tokens gain here is that some
/// columns of a matrix stay in the first-level cache for all of them.
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
