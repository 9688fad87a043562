//! Transformer language models as Burn modules with swappable components.
//!
//! A [`Decoder`] is built over the weights of a `firebox_store::Checkpoint` on any Burn device. Its forward
//! pass is a value, a [`Pass`], that runs layer by layer against the caches of the sequences it works on.

mod adapter;
mod attention;
mod block;
mod bridge;
pub mod config;
mod decoder;
mod delta_net;
mod encoder;
mod error;
mod expert_cache;
mod experts;
mod families;
mod feed_forward;
mod fields;
mod gated;
mod head;
mod initial;
mod linear;
mod matrix;
mod mixer;
mod norm;
mod observer;
mod partition;
mod pass;
mod pieces;
mod pooling;
mod prepared;
mod resident;
mod rope;
mod rows;
mod slot;
mod stream_lock;
mod streamed;
mod streamed_decoder;
mod tower;
mod weights;

pub use adapter::Adapter;
pub use attention::Attention;
pub use block::Block;
pub use bridge::Bridge;
pub use config::DecoderConfig;
pub use decoder::{Decoder, Network, StreamGuard};
pub use delta_net::GatedDeltaNet;
pub use encoder::{Encoder, EncoderConfig, EncoderInput};
pub use error::{ComponentError, ModelError};
pub use experts::MixtureOfExperts;
pub use families::{Architecture, supported_families};
pub use feed_forward::{FeedForward, HeldFeedForward, OwnFeedForward};
pub use gated::GatedFeedForward;
pub use head::{Head, HeadForm};
pub use initial::Seeded;
pub use linear::Linear;
pub use matrix::{BlockMatrix, DenseMatrix, GroupedMatrix, Matrix};
pub use mixer::{HeldMixer, Mixer, MixerMemory, OwnMixer, Sequence, Sequences};
pub use norm::RmsNorm;
pub use observer::{Observer, Passed};
pub use partition::Partition;
pub use pass::{LogitRows, Pass};
pub use pooling::{Pooling, of_length_one};
pub use rows::Input;
pub use streamed::{StepHook, StreamedConfig, StreamedWeights};
pub use streamed_decoder::StreamedDecoder;
pub use tower::{AdapterPlan, ExitPlan, Fed, Reached, Tower, Trained};
