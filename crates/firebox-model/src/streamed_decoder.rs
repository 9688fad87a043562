//! A decoder that streams its weights, as a type of its own.

use std::cell::RefCell;
use std::ops::Deref;
use std::sync::Arc;

use burn::tensor::Device;
use firebox_store::{Checkpoint, Unmapped};

use crate::ModelError;
use crate::decoder::{Decoder, decoder_config};
use crate::streamed::{StreamedConfig, StreamedWeights};
use crate::weights::Weights;

/// A decoder that reads its blocks and its unembedding from disk whenever they are needed, except for
/// [resident](StreamedWeights::load) parts. It computes what a [loaded](Decoder::load) decoder computes.
#[derive(Debug, Clone)]
pub struct StreamedDecoder {
    decoder: Arc<Decoder>,
    weights: Arc<StreamedWeights>,
}

impl StreamedDecoder {
    /// Builds the decoder of a checkpoint. Every tensor must be present, in the shape that the configuration says, and no other.
    pub fn open(
        checkpoint: &Checkpoint,
        device: &Device,
        streaming: &StreamedConfig,
    ) -> Result<Self, ModelError> {
        let config = decoder_config(checkpoint.config())?;
        let taken = RefCell::default();
        let unmapped = Unmapped(checkpoint);
        let root = Weights::new(&unmapped, device, &taken);
        let weights = Arc::new(StreamedWeights::open(checkpoint, &config, &root, streaming)?);
        let decoder = Arc::new(Decoder::with_streamed(weights.clone(), config, &root)?);
        Ok(Self { decoder, weights })
    }

    /// The decoder's weights.
    pub fn weights(&self) -> &Arc<StreamedWeights> {
        &self.weights
    }

    /// The decoder, shared.
    pub fn decoder(&self) -> &Arc<Decoder> {
        &self.decoder
    }
}

impl Deref for StreamedDecoder {
    type Target = Decoder;

    fn deref(&self) -> &Decoder {
        &self.decoder
    }
}
