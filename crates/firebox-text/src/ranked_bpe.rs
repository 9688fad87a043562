//! BPE with a ranked list of merges: the pair that is first in the list merges first.

use crate::error::TextError;
use crate::merging::{Merge, Symbols};
use crate::tokenizers_adapter::WordTokenizer;
use crate::vocabulary::Vocabulary;
use hashbrown::HashMap;
use std::sync::Arc;
use tokenizers::Result;

/// The BPE of the `tokenizers` crate, without dropout, prefixes and suffixes.
///
/// It returns the same tokens in less memory. With a vocabulary of 152,000 tokens a tokenizer of `tokenizers` takes 27 MB, and 91
/// during construction; this one takes 8 and 27.
#[derive(Debug, Clone)]
pub(crate) struct RankedBpe {
    vocabulary: Arc<Vocabulary>,
    /// The result of merging two neighbouring tokens.
    merges: HashMap<(u32, u32), Merge>,
    /// Tokens of the first characters, which are the most frequent ones, and the alphabet of byte-level vocabularies.
    letters: Vec<Option<u32>>,
    /// Tokens of each byte, if unknown characters may be spelled in bytes.
    bytes: Option<Box<[Option<u32>; 256]>>,
    options: Options,
}

/// Characters below this one are looked up by their number.
const TABULATED_CHARS: char = '\u{180}';

/// Options beside the merges.
#[derive(Debug, Clone, Default)]
pub(crate) struct Options {
    pub unk_token: Option<String>,
    /// Whether a run of unknown characters becomes one token.
    pub fuse_unk: bool,
    /// Whether unknown characters are spelled with byte tokens.
    pub byte_fallback: bool,
    /// Whether a word that is a token becomes that token, independent of merges.
    pub ignore_merges: bool,
}

impl RankedBpe {
    pub fn new<'a>(
        vocabulary: Vocabulary,
        merges: impl ExactSizeIterator<Item = std::result::Result<(&'a str, &'a str), TextError>>,
        options: Options,
    ) -> std::result::Result<Self, TextError> {
        let bytes = options
            .byte_fallback
            .then(|| Box::new(std::array::from_fn(|byte| vocabulary.id(&format!("<0x{byte:02X}>")))));
        let letters =
            ('\0'..TABULATED_CHARS).map(|letter| vocabulary.id(letter.encode_utf8(&mut [0; 4]))).collect();
        let mut model = Self {
            vocabulary: Arc::new(vocabulary),
            letters,
            merges: HashMap::with_capacity(merges.len()),
            bytes,
            options,
        };
        let mut merged = String::new();
        for (rank, (index, merge)) in (0..).zip(merges.enumerate()) {
            let (left, right) = merge?;
            merged.clear();
            merged.push_str(left);
            merged.push_str(right);
            let [Some(one), Some(other), Some(id)] =
                [left, right, &merged].map(|token| model.vocabulary.id(token))
            else {
                let merge = format!("{left} {right}");
                return Err(TextError::InvalidMerge {
                    index,
                    merge,
                    reason: "the vocabulary lacks one of its tokens",
                });
            };
            // As in `tokenizers`, the last of several equal rules counts.
            model.merges.insert((one, other), Merge { rank, id });
        }
        Ok(model)
    }

    fn character(&self, character: char) -> Option<u32> {
        match self.letters.get(character as usize) {
            Some(id) => *id,
            None => self.vocabulary.id(character.encode_utf8(&mut [0; 4])),
        }
    }

    /// Every character that is a token by itself.
    fn spelled(&self, word: &str) -> Result<Symbols> {
        let mut symbols = Symbols::with_capacity(word.len());
        let mut unknown: Option<(u32, usize)> = None;
        let mut buffer = [0; 4];
        for character in word.chars() {
            if let Some(id) = self.character(character) {
                if let Some((id, len)) = unknown.take() {
                    symbols.push(id, len);
                }
                symbols.push(id, character.len_utf8());
                continue;
            }
            let text: &str = character.encode_utf8(&mut buffer);
            let byte = |byte| self.bytes.as_ref()?[usize::from(byte)];
            if text.bytes().all(|value| byte(value).is_some()) {
                text.bytes().filter_map(byte).for_each(|id| symbols.push(id, 1));
                continue;
            }
            // Without an unknown token the character is dropped, as in `tokenizers`.
            let Some(token) = &self.options.unk_token else { continue };
            let id = self.vocabulary.id(token).ok_or_else(|| {
                format!("the token `{token}` for what cannot be spelled is not in the vocabulary")
            })?;
            match &mut unknown {
                Some((_, len)) if self.options.fuse_unk => *len += text.len(),
                _ => {
                    if let Some((id, len)) = unknown.replace((id, text.len())) {
                        symbols.push(id, len);
                    }
                }
            }
        }
        if let Some((id, len)) = unknown {
            symbols.push(id, len);
        }
        Ok(symbols)
    }
}

impl WordTokenizer for RankedBpe {
    fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    fn tokenize_word(&self, word: &str) -> Result<Vec<(u32, (usize, usize))>> {
        if word.is_empty() {
            return Ok(Vec::new());
        }
        if let Some(id) = self.vocabulary.id(word).filter(|_| self.options.ignore_merges) {
            return Ok(vec![(id, (0, word.len()))]);
        }
        let mut symbols = self.spelled(word)?;
        symbols.merge(|left, right| self.merges.get(&(left.id, right.id)).copied());
        Ok(symbols.iter().map(|symbol| (symbol.id, symbol.range())).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizers_adapter::CustomModel;
    use proptest::prelude::*;
    use tokenizers::models::bpe::{BPE, Vocab};
    use tokenizers::{Model, Token};

    /// Tokens from random merges of a few characters, bytes included, compared with those of `tokenizers`.
    fn both(pairs: &[(usize, usize)], has_bytes: bool, options: &Options) -> (CustomModel<RankedBpe>, BPE) {
        let mut tokens: Vec<String> = ["<unk>", "a", "b", "c", "é", "日"].map(String::from).to_vec();
        if has_bytes {
            // All bytes of `x` and `ß` are tokens; of other characters some or none.
            tokens.extend([0x78, 0xC3, 0x9F, 0xF0, 0x98, 0x80].map(|byte: u8| format!("<0x{byte:02X}>")));
        }
        let mut merges = Vec::new();
        for &(left, right) in pairs {
            let (left, right) = (tokens[left % tokens.len()].clone(), tokens[right % tokens.len()].clone());
            let merged = format!("{left}{right}");
            if merged.len() < 90 && !tokens.contains(&merged) {
                tokens.push(merged);
            }
            merges.push((left, right));
        }
        merges.retain(|(left, right)| tokens.contains(&format!("{left}{right}")));
        let mut theirs = BPE::builder()
            .vocab_and_merges(tokens.iter().cloned().zip(0..).collect::<Vocab>(), merges.clone())
            .fuse_unk(options.fuse_unk)
            .byte_fallback(options.byte_fallback)
            .ignore_merges(options.ignore_merges);
        if let Some(token) = &options.unk_token {
            theirs = theirs.unk_token(token.clone());
        }
        let vocabulary = Vocabulary::new(tokens.iter().map(|token| token.as_str().into()).zip(0..).collect());
        let merges = merges.iter().map(|(left, right)| Ok((left.as_str(), right.as_str())));
        let ours = RankedBpe::new(vocabulary.unwrap(), merges, options.clone());
        (CustomModel(ours.unwrap()), theirs.build().unwrap())
    }

    proptest! {
        #[test]
        fn gives_the_tokens_of_tokenizers(
            pairs in proptest::collection::vec((0_usize..40, 0_usize..40), 0..40),
            has_bytes in any::<bool>(),
            flags in any::<[bool; 4]>(),
            words in proptest::collection::vec("[abcé日xß😀]{0,24}", 1..8),
        ) {
            let [has_unknown, fuse_unk, byte_fallback, ignore_merges] = flags;
            let unk_token = has_unknown.then(|| "<unk>".to_owned());
            let (ours, theirs) = both(&pairs, has_bytes, &Options { unk_token, fuse_unk, byte_fallback, ignore_merges });
            for word in words {
                let told = |tokens: Vec<Token>| -> Vec<_> {
                    tokens.into_iter().map(|token| (token.id, token.value, token.offsets)).collect()
                };
                prop_assert_eq!(told(ours.tokenize(&word).unwrap()), told(theirs.tokenize(&word).unwrap()), "{}", word);
            }
        }
    }

    #[test]
    fn a_missing_unknown_token_is_an_error_only_where_it_is_needed() {
        let options = Options { unk_token: Some("[UNK]".to_owned()), ..Options::default() };
        let (ours, theirs) = both(&[], false, &options);
        assert!(ours.tokenize("ab").is_ok() && theirs.tokenize("ab").is_ok());
        assert!(ours.tokenize("ax").is_err() && theirs.tokenize("ax").is_err());
    }
}
