//! Firebox for other languages: opens models and sessions, streams answers, selects heads, adds facts, saves and restores.
//!
//! There are two interfaces to the same calls. C uses [`c`], declared in `include/firebox.h`. Python, Swift and Kotlin use
//! [`objects`], for which [UniFFI](https://mozilla.github.io/uniffi-rs/) generates modules from the built library:
//!
//! ```text
//! cargo build --release
//! cc -Icrates/firebox-ffi/include say.c -Ltarget/release -lfirebox_ffi -o say
//!
//! pip install 'uniffi-bindgen==0.31.*'
//! uniffi-bindgen generate target/release/libfirebox_ffi.so --language python --out-dir .
//! ```
//!
//! The generated module looks for the library in its own folder.

::uniffi::setup_scaffolding!();

pub mod c;
mod conversation;
mod error;
pub mod objects;
mod open_model;
mod select_head;
mod shared_conversation;

pub use conversation::{Answer, Ended};
pub use error::FireboxError;
