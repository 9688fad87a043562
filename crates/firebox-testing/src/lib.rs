//! Helpers of tests, fuzzing and benchmarks of several crates. Never published.

pub mod checks;
pub mod control_group;
pub mod grammar;
pub mod model;
#[cfg(feature = "heads")]
pub mod test_heads;
pub mod thinking;
pub mod tool;
