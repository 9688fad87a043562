//! Measurements of a model: perplexity, agreement with reference logits, speed, and what a change of heads takes.

mod benchmark;
mod device_comparison;
mod error;
mod perplexity;
mod swap_timings;
mod verification;

pub use benchmark::{Benchmark, BenchmarkConfig, benchmark};
pub use device_comparison::{DeviceComparison, compare_devices};
pub use error::EvalError;
pub use perplexity::{Divergence, Perplexity, perplexity};
pub use swap_timings::SwapTimings;
pub use verification::{
    EmbeddingVerification, LogitVerification, Prefill, Verification, expected_input_ids, verify_against,
};
