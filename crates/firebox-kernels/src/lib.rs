//! Tensor operations that Burn lacks, or that run faster than Burn's.
//!
//! Each operation is a plain function on tensors. Flex, Burn's CPU backend, has a version of every operation,
//! and accelerators (CubeCL) have one of most. Other devices run the reference, which is written in Burn's
//! operations and which the tests compare with.
//!
//! All operations are differentiable. On Flex with autodiff (feature `autodiff`) most operations are one node
//! of the graph with a backward pass of its own; elsewhere autodiff differentiates the reference.

pub mod activation;
pub mod attention;
pub mod convolution;
mod cores;
pub mod cross_entropy;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
pub mod delta;
mod flex;
pub mod gate;
#[cfg(feature = "autodiff")]
mod graph;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod launches;
pub mod likeliest;
pub mod linear;
#[cfg(feature = "autodiff")]
mod matrix;
pub mod norm;
pub mod rope;
mod simd;
pub mod state_space;
pub mod step;
mod thread_pool;
pub mod transfers;

pub use activation::Activation;
use burn::tensor::Device;

pub use cores::{Cores, CoresError};
pub use flex::host_device;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub use launches::launches;
pub use linear::Grouping;
pub use simd::instructions;

/// Runs a computation of many operations on the thread where it runs best.
///
/// On the CPU that is a thread of rayon's pool: from any other thread, every operation would hand its work
/// over and sleep until it is done. Accelerators run `work` on the calling thread, because they order
/// operations by thread: a computation that changed threads could overtake itself.
pub fn on_pool<R: Send>(device: &Device, work: impl FnOnce() -> R + Send) -> R {
    let on_flex = flex::is_flex(device);
    #[cfg(feature = "autodiff")]
    let on_flex = on_flex || graph::records(device);
    if on_flex { thread_pool::run_on_pool(work) } else { work() }
}
