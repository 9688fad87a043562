//! The files of `firebox-kernels` that have unsafe code, and the products that reach all of it, compiled without Burn:
//! a sanitizer has to watch every line it is given, and Burn's are many. Their own tests run here too.
//!
//! `RUSTFLAGS=-Zsanitizer=address cargo +nightly test --target x86_64-unknown-linux-gnu`

#![allow(dead_code, unused_imports)] // Some of it is only used by operations that are not here.

#[path = "../../crates/firebox-kernels/src/simd/mod.rs"]
mod simd;
#[path = "../../crates/firebox-kernels/src/thread_pool.rs"]
mod thread_pool;

mod linear;
