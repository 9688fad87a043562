//! Helpers of the tests of several crates. Never published.

pub mod grammar;
