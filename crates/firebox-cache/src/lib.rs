//! What a running sequence remembers: keys and values of attention layers, and the fixed-size state of
//! recurrent ones.
//!
//! A [`SequenceCache`] holds one [`LayerCache`] per layer. Layers append to it during a pass and read
//! everything visible back; nothing here knows what a model is.

mod kv;
mod recurrent;
mod sequence;

pub use kv::{KvCache, KvType};
pub use recurrent::RecurrentState;
pub use sequence::{LayerCache, SequenceCache};
