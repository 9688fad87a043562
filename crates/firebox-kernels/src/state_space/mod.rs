//! The selective state space of Mamba-2: a matrix per head that decays and gains an outer product with every token.

mod flex;
pub mod reference;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
use burn::tensor::{DType, Tensor};

use crate::flex::{DispatchBackend, is_flex};

/// Layout of a token's channels in heads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StateSpace {
    /// Heads of values; each has a matrix.
    pub heads: usize,
    /// Width of a head's value.
    pub width: usize,
    /// Groups of heads that share their directions; a divisor of the heads.
    pub groups: usize,
    /// Width of a direction.
    pub states: usize,
    /// The smallest and the largest time step; the latter may be infinite.
    pub steps: [f32; 2],
}

/// Inputs of the state space for some tokens, in f32.
#[derive(Debug, Clone)]
pub struct ScanTokens {
    /// Values of all heads, then the directions that all groups write to, then those that they read,
    /// `[tokens, channels]`.
    pub mixed: Tensor<2>,
    /// Time step before the bias and the softplus, `[tokens, heads]`.
    pub step: Tensor<2>,
}

/// Parameters of every head, `[heads]` in f32.
#[derive(Debug, Clone)]
pub struct ScanParams {
    /// Logarithm of the decay for a time step of one.
    pub rate: Tensor<1>,
    /// Added to a token's time step.
    pub bias: Tensor<1>,
    /// Factor of the value that is added to the read.
    pub skip: Tensor<1>,
}

/// Runs the memory `[heads, states, width]` (zero if absent) through the tokens: decay, write, read. Returns the
/// reads, `[tokens, heads * width]`, and the memory after the last token, all in f32.
///
/// On the CPU many tokens take the same steps as one, so a token's result does not depend, to the last bit, on
/// the number of tokens in the call: a few columns of a matrix stay in the L1 cache for all of them. Other devices
/// compute chunks of tokens by matrix products.
pub fn scan(
    tokens: ScanTokens,
    params: ScanParams,
    space: StateSpace,
    memory: Option<Tensor<3>>,
) -> (Tensor<2>, Tensor<3>) {
    let device = tokens.mixed.device();
    let memory = match memory {
        Some(memory) => memory.cast(DType::F32),
        None => Tensor::zeros([space.heads, space.states, space.width], (&device, DType::F32)),
    };
    if !is_flex(&device) {
        return reference::scan(tokens, params, space, memory);
    }
    let (read, memory) = <DispatchBackend as StateSpaceOps>::scan(
        tokens.mixed.into_dispatch(),
        tokens.step.into_dispatch(),
        params.rate.into_dispatch(),
        params.bias.into_dispatch(),
        params.skip.into_dispatch(),
        memory.into_dispatch(),
        space,
    );
    (Tensor::from_dispatch(read), Tensor::from_dispatch(memory))
}

impl StateSpace {
    /// Returns the channels of a token.
    pub fn channels(&self) -> usize {
        self.heads * self.width + 2 * self.groups * self.states
    }
}

#[backend_extension(Flex)]
pub(crate) trait StateSpaceOps: Backend {
    fn scan(
        mixed: FloatTensor<Self>,
        step: FloatTensor<Self>,
        rate: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        skip: FloatTensor<Self>,
        memory: FloatTensor<Self>,
        space: StateSpace,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}
