//! Firebox from other languages: open a model, begin a session, say something and hear the answer piece by piece, change
//! the head, tell facts, save and restore.
//!
//! There are two faces over the same calls. C has [`c`], which `include/firebox.h` declares. Python, Swift and Kotlin
//! have [`objects`], for which [UniFFI](https://mozilla.github.io/uniffi-rs/) generates modules from the built library:
//!
//! ```text
//! cargo build --release
//! cc -Icrates/firebox-ffi/include say.c -Ltarget/release -lfirebox_ffi -o say
//!
//! pip install 'uniffi-bindgen==0.31.*'
//! uniffi-bindgen generate target/release/libfirebox_ffi.so --language python --out-dir .
//! ```
//!
//! The module that is generated looks for the library beside itself.

::uniffi::setup_scaffolding!();

pub mod c;
mod conversation;
mod error;
mod held;
pub mod objects;
mod opened;
mod router;

pub use conversation::{Answer, Ended};
pub use error::FireboxError;
