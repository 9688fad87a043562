//! Tensor operations that Burn does not have, or not at the speed of the memory.
//!
//! Each operation is a plain function on tensors. On Flex it runs a version of its own, on every other
//! device the reference in Burn's operations, which is also what its tests compare with.

pub mod activation;
pub mod attend;
pub mod convolution;
pub mod delta;
mod flex;
pub mod gate;
pub mod linear;
pub mod norm;
pub mod rope;
mod simd;

pub use activation::Activation;
pub use attend::Attending;
pub use flex::host;
pub use linear::Grouping;

/// Runs a computation of many operations on a thread of the pool that the operations share their work with.
///
/// Called from any other thread, every single operation would hand its work over and sleep until it is done.
pub fn on_pool<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    rayon::scope(|_| work())
}
