//! A model of either kind, a decoder or an encoder.

use std::sync::Arc;

use burn::tensor::Device;
use firebox_store::Checkpoint;

use crate::families::Architecture;
use crate::{Decoder, Encoder, ModelError};

/// A model of either kind.
#[derive(Debug)]
pub enum Network {
    /// It continues text.
    Decoder(Arc<Decoder>),
    /// It turns text into a vector.
    Encoder(Encoder),
}

impl Network {
    /// Builds whichever kind the checkpoint is.
    pub fn load(checkpoint: &Checkpoint, device: &Device) -> Result<Self, ModelError> {
        match Architecture::from_json(checkpoint.config())? {
            Architecture::Decoder(_) => {
                Decoder::load(checkpoint, device).map(|decoder| Self::Decoder(Arc::new(decoder)))
            }
            Architecture::Encoder(_) => Encoder::load(checkpoint, device).map(Self::Encoder),
        }
    }
}
