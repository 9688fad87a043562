//! Encodes turns with a sentence encoder.

use std::path::Path;

use burn::tensor::Device;

use super::{Similarity, TurnContent, TurnEncoder, examples};
use crate::embed::Framed;
use crate::{EmbedOptions, Model, RuntimeError};

/// The most tokens of a text, special ones included. Sentence encoders such as all-MiniLM-L6-v2 are trained on no
/// more, even if their positions allow it.
const PIECE: usize = 256;

/// Encodes turns with a sentence encoder, a second and much smaller model.
#[derive(Debug, Clone)]
pub struct SentenceEncoder {
    model: Model,
}

impl SentenceEncoder {
    /// Opens the directory of an encoder with its tokenizer, such as all-MiniLM-L6-v2 as published.
    pub fn open(path: impl AsRef<Path>, device: &Device) -> Result<Self, RuntimeError> {
        Self::new(Model::open(path, device)?)
    }

    /// Uses an open encoder.
    pub fn new(model: Model) -> Result<Self, RuntimeError> {
        model.encoder()?;
        model.tokenizer()?;
        Ok(Self { model })
    }

    /// Returns a scorer fitted to English sentence pairs that come with the library. For other languages
    /// [fit](Similarity::fit) pairs in those, with an encoder that knows them.
    pub fn calibrated(self) -> Result<Similarity<Self>, RuntimeError> {
        Similarity::fit(self, &examples::untokenized().pairs())
    }
}

impl TurnEncoder for SentenceEncoder {
    fn encode(&mut self, content: TurnContent<'_>) -> Result<Vec<f32>, RuntimeError> {
        let framed = Framed::new(self.model.tokenizer()?, content.text)?;
        if framed.words.is_empty() {
            return Ok(Vec::new());
        }
        let longest = self.model.encoder()?.config().max_positions.min(PIECE);
        Ok(self.model.embed_framed(&[framed], longest, &EmbedOptions::default())?.remove(0))
    }

    fn has_background(&self) -> bool {
        false
    }
}
