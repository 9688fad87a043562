//! Tensor operations that Burn does not have, or not at the speed of the memory.
//!
//! Each operation is a plain function on tensors. On Flex it runs a version of its own, and most do on accelerators
//! (CubeCL). Everywhere else the reference in Burn's operations runs, which is also what the tests compare with.
//!
//! Gradients flow through all of them. On Flex under autodiff most operations are one step of the graph each, with a
//! way back of its own (feature `autodiff`); elsewhere the references are what is differentiated.

pub mod activation;
pub mod attention;
pub mod convolution;
pub mod cross_entropy;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
pub mod delta;
mod flex;
pub mod gate;
#[cfg(feature = "autodiff")]
mod graph;
pub mod linear;
#[cfg(feature = "autodiff")]
mod matrix;
pub mod norm;
pub mod rope;
mod simd;
mod thread_pool;

pub use activation::Activation;
use burn::tensor::Device;

pub use flex::host_device;
pub use linear::Grouping;
pub use simd::instructions;

/// Runs a computation of many operations on a device where it runs best.
///
/// On the CPU that is a thread of the pool that the operations share their work with: called from any other, every
/// single operation would hand its work over and sleep until it is done. Accelerators order operations by the thread
/// that asks for them, and a computation that came from another thread every time could overtake itself.
pub fn on_pool<R: Send>(device: &Device, work: impl FnOnce() -> R + Send) -> R {
    let on_flex = flex::is_flex(device);
    #[cfg(feature = "autodiff")]
    let on_flex = on_flex || graph::records(device);
    if on_flex { thread_pool::run_on_pool(work) } else { work() }
}
