//! Texts with the special tokens around them.

use firebox_text::Tokenizer;

use crate::RuntimeError;

/// A text's tokens, with the special tokens that the model puts around every text.
#[derive(Debug, Clone)]
pub(crate) struct Framed {
    pub opening: Vec<u32>,
    pub words: Vec<u32>,
    pub closing: Vec<u32>,
}

impl Framed {
    /// Encodes a text. Control tokens in it are encoded as plain text.
    pub fn new(tokenizer: &Tokenizer, text: &str) -> Result<Self, RuntimeError> {
        let words = tokenizer.encode_literal(text, false)?;
        let mut opening = tokenizer.encode_literal(text, true)?;
        let before =
            opening.windows(words.len().max(1)).position(|part| part == words).unwrap_or_else(|| {
                // An empty text has no position; the first token opens.
                opening.len().min(1)
            });
        let closing = opening.split_off((before + words.len()).min(opening.len()));
        opening.truncate(before);
        Ok(Self { opening, words, closing })
    }

    /// Returns tokens without special tokens.
    pub fn unframed(tokens: &[u32]) -> Self {
        Self { opening: Vec::new(), words: tokens.to_vec(), closing: Vec::new() }
    }

    /// Returns the number of special tokens around a piece.
    pub fn special(&self) -> usize {
        self.opening.len() + self.closing.len()
    }

    /// Returns pieces of at most `longest` tokens, each with the special tokens, and its share of the text. An empty
    /// text is one piece, unless there are no special tokens.
    pub fn pieces(&self, longest: usize) -> Vec<(Vec<u32>, f32)> {
        if self.words.is_empty() && self.special() > 0 {
            return vec![([&self.opening[..], &self.closing].concat(), 1.0)];
        }
        let room = longest.saturating_sub(self.special()).max(1);
        let piece = |words: &[u32]| {
            let share = words.len() as f32 / self.words.len() as f32;
            ([&self.opening[..], words, &self.closing].concat(), share)
        };
        self.words.chunks(room).map(piece).collect()
    }
}
