//! The operations that backends with kernels of their own implement.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};

use super::blocks::BlockFormat;
use super::grouping::Grouping;

/// Products that a backend implements natively.
#[backend_extension(Flex, Cube: cfg(any(feature = "wgpu", feature = "cuda")))]
pub(crate) trait LinearOps: Backend {
    fn multiply(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self>;

    fn multiply_grouped(
        x: FloatTensor<Self>,
        words: IntTensor<Self>,
        scales: FloatTensor<Self>,
        grouping: Grouping,
    ) -> FloatTensor<Self>;
}

/// Products with GGUF blocks, which only the CPU has.
#[backend_extension(Flex)]
pub(crate) trait BlockOps: Backend {
    fn multiply_blocks(
        x: FloatTensor<Self>,
        bytes: IntTensor<Self>,
        format: BlockFormat,
    ) -> FloatTensor<Self>;

    fn dequantize_blocks(bytes: IntTensor<Self>, format: BlockFormat) -> FloatTensor<Self>;
}
