//! Text from a stream of tokens, in whole characters.

use serde::{Deserialize, Serialize};

use crate::tokenizer::Tokenizer;

/// Converts a stream of token ids to text.
///
/// A character can span several tokens; it is returned when its last byte has arrived. A push costs no more than the token's
/// bytes. Bytes that cannot form a character become U+FFFD, one per maximal invalid run, as in [`String::from_utf8_lossy`].
/// The results of all pushes and of [`finish`](Self::finish) concatenate to exactly [`Tokenizer::decode`] of all ids.
///
/// ```
/// # use firebox_text::{GgufVocabulary, TextAssets, Tokenizer, TokenizerSource};
/// # let vocabulary = GgufVocabulary {
/// #     model: "gpt2".into(),
/// #     tokens: ["Ã", "©", "t"].map(String::from).to_vec(),
/// #     ..GgufVocabulary::default()
/// # };
/// # let source = Some(TokenizerSource::Gguf(vocabulary));
/// # let assets = TextAssets { tokenizer: source, ..TextAssets::default() };
/// # let tokenizer = Tokenizer::new(&assets, &serde_json::Value::Null)?;
/// let mut stream = tokenizer.detokenizer(true);
/// assert_eq!(stream.push(2), "t");
/// assert_eq!(stream.push(0), ""); // the first of the two bytes of `é`
/// assert_eq!(stream.push(1), "é");
/// assert_eq!(stream.finish(), "");
/// # Ok::<(), firebox_text::TextError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    held: DetokenizerState,
}

/// The state of a [`Detokenizer`], from which another one can [resume](Detokenizer::resume).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DetokenizerState {
    first: bool,
    /// Leading characters that may still be stripped.
    strip_left: usize,
    held_space: bool,
    pending: Vec<u8>,
}

impl Detokenizer {
    /// A stream at the beginning of a text. `skip_special` omits control tokens.
    pub fn new(tokenizer: &Tokenizer, skip_special: bool) -> Self {
        let strip_left = tokenizer.pieces().decoding().strip_start().map_or(0, |(_, count)| count);
        let held = DetokenizerState { first: true, strip_left, held_space: false, pending: Vec::new() };
        Self::resume(tokenizer, skip_special, held)
    }

    /// A stream that continues text already shown: the space before its first word is kept.
    pub fn continuing(tokenizer: &Tokenizer, skip_special: bool) -> Self {
        let mut stream = Self::new(tokenizer, skip_special);
        (stream.held.first, stream.held.strip_left) = (false, 0);
        stream
    }

    /// A stream that resumes from the state of another one of the same tokenizer.
    pub fn resume(tokenizer: &Tokenizer, skip_special: bool, held: DetokenizerState) -> Self {
        Self { tokenizer: tokenizer.clone(), skip_special, held }
    }

    /// The current state.
    pub fn state(&self) -> &DetokenizerState {
        &self.held
    }

    /// Adds a token and returns the text that is now complete. Ids outside the vocabulary add nothing: models often have more
    /// rows than their vocabulary has tokens.
    pub fn push(&mut self, id: u32) -> String {
        let tokenizer = self.tokenizer.clone();
        let pieces = tokenizer.pieces();
        if !pieces.contains(id) || (self.skip_special && pieces.is_special(id)) {
            return String::new();
        }
        if self.held.first {
            self.held.first = false;
            self.held.pending.extend(pieces.first_bytes(id).unwrap_or_default());
        } else {
            self.held.pending.extend_from_slice(pieces.bytes(id).unwrap_or_default());
        }
        let text = self.take_complete();
        self.trim(text)
    }

    /// Ends the stream: an incomplete character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let rest = std::mem::take(&mut self.held.pending);
        let text = self.trim(String::from_utf8_lossy(&rest).into_owned());
        self.held.held_space = false;
        text
    }

    fn take_complete(&mut self) -> String {
        let mut text = String::with_capacity(self.held.pending.len());
        let mut done = 0;
        while done < self.held.pending.len() {
            match std::str::from_utf8(&self.held.pending[done..]) {
                Ok(valid) => {
                    text.push_str(valid);
                    done = self.held.pending.len();
                }
                Err(error) => {
                    let valid = &self.held.pending[done..done + error.valid_up_to()];
                    text.push_str(&String::from_utf8_lossy(valid));
                    done += error.valid_up_to();
                    let Some(broken) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    done += broken;
                }
            }
        }
        self.held.pending.drain(..done);
        text
    }

    /// Applies the rules for spaces at the start and at the end of the text.
    fn trim(&mut self, mut text: String) -> String {
        let decoding = self.tokenizer.pieces().decoding();
        if let Some((unwanted, _)) = decoding.strip_start()
            && self.held.strip_left > 0
            && !text.is_empty()
        {
            let dropped = text.chars().take(self.held.strip_left).take_while(|c| *c == unwanted).count();
            text.drain(..dropped * unwanted.len_utf8());
            self.held.strip_left = if text.is_empty() { self.held.strip_left - dropped } else { 0 };
        }
        if decoding.hold_trailing_space() && !text.is_empty() {
            if std::mem::take(&mut self.held.held_space) {
                text.insert(0, ' ');
            }
            if text.ends_with(' ') {
                text.pop();
                self.held.held_space = true;
            }
        }
        text
    }
}

impl Tokenizer {
    /// The text of some ids; `skip_special` omits special tokens. Ids outside the vocabulary are ignored; bytes that are not UTF-8
    /// become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut stream = self.detokenizer(skip_special);
        let mut text = String::new();
        for &id in ids {
            text += &stream.push(id);
        }
        text + &stream.finish()
    }

    /// A decoder for a stream of ids.
    pub fn detokenizer(&self, skip_special: bool) -> Detokenizer {
        Detokenizer::new(self, skip_special)
    }
}
