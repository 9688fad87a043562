use std::path::Path;

use burn::tensor::Device;

use super::{Similarity, TurnContent, TurnEncoder, examples, mean_of_pieces};
use crate::{Model, RuntimeError};

/// The longest text, in tokens and with the special ones, that sentence encoders such as all-MiniLM-L6-v2 are made
/// for, where their positions would allow for more.
const PIECE: usize = 256;

/// A turn's vector from a sentence encoder, a second and much smaller model that was trained to tell what texts are
/// about.
#[derive(Debug, Clone)]
pub struct SentenceEncoder {
    model: Model,
}

impl SentenceEncoder {
    /// Opens the directory of an encoder with its tokenizer, such as all-MiniLM-L6-v2 as it is published.
    pub fn open(path: impl AsRef<Path>, device: &Device) -> Result<Self, RuntimeError> {
        Self::new(Model::open(path, device)?)
    }

    /// Over an encoder that is open already.
    pub fn new(model: Model) -> Result<Self, RuntimeError> {
        model.encoder()?;
        model.tokenizer()?;
        Ok(Self { model })
    }

    /// A scorer fitted to pairs of English sentences that come with the library. For conversations in other languages
    /// [fit](Similarity::fit) pairs in those, with an encoder that knows them.
    pub fn calibrated(self) -> Result<Similarity<Self>, RuntimeError> {
        Similarity::fit(self, &examples::untokenized().pairs())
    }
}

impl TurnEncoder for SentenceEncoder {
    fn encode(&mut self, content: TurnContent<'_>) -> Result<Vec<f32>, RuntimeError> {
        let (encoder, tokenizer) = (self.model.encoder()?, self.model.tokenizer()?);
        let words = tokenizer.encode_literal(content.text, false)?;
        let framed = tokenizer.encode_literal(content.text, true)?;
        let special = framed.len() - words.len();
        let before = framed.windows(words.len().max(1)).position(|part| part == words).unwrap_or(0);
        let (opening, closing) = (&framed[..before], &framed[before + words.len()..]);
        let room = encoder.config().max_positions.min(PIECE).saturating_sub(special).max(1);
        let pieces: Vec<&[u32]> = words.chunks(room).collect();
        mean_of_pieces(&pieces, |piece| {
            let vector = encoder.embed(&[opening, piece, closing].concat())?.try_into_vec_as::<f32>();
            vector.map_err(|error| RuntimeError::Readback { reason: error.to_string() })
        })
    }

    fn has_background(&self) -> bool {
        false
    }
}
