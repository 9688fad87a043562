//! The tokens of a tokenizer by their bytes.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use firebox_text::Tokenizer;
use llguidance::ParserFactory;
use llguidance::api::ParserLimits;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{INVALID_TOKEN, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};

use super::GrammarError;

/// The longest token that is ever permitted: a trie node counts its ancestors in ten bits.
const MAX_TOKEN_BYTES: usize = 1000;

/// Returns the limits of a grammar. Exceeding one is an error.
fn limits() -> ParserLimits {
    ParserLimits {
        // A state takes one or two kilobytes; the default permits half a gigabyte.
        max_lexer_states: 50_000,
        // Computing all of these takes about 10 ms. The default ends ordinary answers with vocabularies that have many tokens
        // across word boundaries.
        step_max_items: 250_000,
        // Symbols take a kilobyte or two each while they are built; the default permits a gigabyte. Slightly more than this
        // panics.
        max_grammar_size: 65_000,
        // The parser's state means nothing to the author of a grammar.
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// The tokens of a tokenizer by their bytes.
pub(super) struct Vocabulary {
    factory: ParserFactory,
}

impl Vocabulary {
    /// Returns the vocabulary of a tokenizer, which is built once and kept as long as the tokenizer exists.
    pub fn of(tokenizer: &Arc<Tokenizer>) -> Result<Arc<Self>, GrammarError> {
        static VOCABULARIES: Mutex<Vec<(Weak<Tokenizer>, Arc<Vocabulary>)>> = Mutex::new(Vec::new());
        let mut vocabularies = VOCABULARIES.lock().unwrap_or_else(PoisonError::into_inner);
        vocabularies.retain(|(tokenizer, _)| tokenizer.strong_count() > 0);
        if let Some((_, known)) = vocabularies.iter().find(|(of, _)| std::ptr::eq(of.as_ptr(), &**tokenizer))
        {
            return Ok(known.clone());
        }
        let vocabulary = Arc::new(Self::new(tokenizer)?);
        vocabularies.push((Arc::downgrade(tokenizer), vocabulary.clone()));
        Ok(vocabulary)
    }

    fn new(tokenizer: &Tokenizer) -> Result<Self, GrammarError> {
        let unusable = |reason: String| GrammarError::Vocabulary { reason };
        let words: Vec<Vec<u8>> =
            (0..tokenizer.vocab_size() as u32).map(|id| token_text(tokenizer, id)).collect();
        // Tokens may share nodes of the trie, but it never has more nodes than this.
        let nodes: usize = words.iter().map(Vec::len).sum();
        if words.is_empty() || nodes >= 1 << 22 {
            return Err(unusable(format!("its {} tokens have {nodes} bytes", words.len())));
        }
        let ends = tokenizer.eos_ids();
        let first = ends.first().copied().unwrap_or(INVALID_TOKEN);
        let mut trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, first), &words);
        if ends.len() > 1 {
            trie = trie.with_eos_tokens(ends);
        }
        // Clones of a tokenizer share their data, and the registry holds a weak reference to another allocation.
        let tokens: TokEnv = Arc::new(Tokens { tokenizer: tokenizer.clone(), trie });
        let slices = SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&tokens, InferenceCapabilities::default(), &slices)
            .map_err(|error| unusable(error.to_string()))?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Self { factory })
    }

    pub fn factory(&self) -> &ParserFactory {
        &self.factory
    }
}

/// Returns the bytes of a token in a text. Control tokens begin with a byte that no text contains.
fn token_text(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let bytes = match tokenizer.id_to_token(id) {
        Some(name) if tokenizer.is_control(id) => {
            [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat()
        }
        // The token for unknown text does not tell which text it stands for.
        _ if tokenizer.unk_id() == Some(id) => Vec::new(),
        _ => tokenizer.token_bytes(id).unwrap_or_default().to_vec(),
    };
    if bytes.len() > MAX_TOKEN_BYTES { Vec::new() } else { bytes }
}

struct Tokens {
    tokenizer: Tokenizer,
    trie: TokTrie,
}

impl Tokens {
    /// Encodes a text as a continuation of other text.
    fn encode(&self, text: &str) -> Vec<u32> {
        let spells = |tokens: &[u32]| self.trie.decode_raw(tokens) == text.as_bytes();
        if let Ok(tokens) = self.tokenizer.encode_literal(text, false)
            && spells(&tokens)
        {
            return tokens;
        }
        // Some tokenizers add a space at the start of a text, but not after a line break.
        if let (Ok(line), Ok(both)) = (
            self.tokenizer.encode_literal("\n", false),
            self.tokenizer.encode_literal(&format!("\n{text}"), false),
        ) && let Some(tokens) = both.strip_prefix(&line[..])
            && spells(tokens)
        {
            return tokens.to_vec();
        }
        self.trie.greedy_tokenize(text.as_bytes())
    }
}

impl TokenizerEnv for Tokens {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| self.encode(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::tokenizer;

    #[test]
    fn a_vocabulary_is_built_once_and_lives_as_long_as_its_tokenizer() {
        let tokenizer = tokenizer("llama");
        let first = Vocabulary::of(&tokenizer).unwrap();
        assert!(Arc::ptr_eq(&first, &Vocabulary::of(&tokenizer).unwrap()));
        let other = Arc::new((*tokenizer).clone());
        assert!(!Arc::ptr_eq(&first, &Vocabulary::of(&other).unwrap()));
        let gone = Arc::downgrade(&Vocabulary::of(&other).unwrap());
        drop(other);
        Vocabulary::of(&tokenizer).unwrap();
        assert!(gone.upgrade().is_none());
    }

    /// For every family, the bytes of the tokens of a text are the text.
    #[test]
    fn tokens_of_every_family_spell_the_text() {
        for family in crate::tests::FAMILIES {
            let vocabulary = Vocabulary::of(&tokenizer(family)).unwrap();
            let tokens = vocabulary.factory().tok_env();
            for text in ["{\"name\": \"", " true", "a", "\n  ", "<|im_end|>", "</s>"] {
                let ids = tokens.tokenize_bytes(text.as_bytes());
                assert_eq!(tokens.tok_trie().decode_raw(&ids), text.as_bytes(), "{family}, {text:?}");
                assert!(!ids.iter().any(|&id| tokens.tok_trie().is_special_token(id)), "{family}, {text:?}");
            }
            // Bytes that no token spells are no reason to fail.
            tokens.tokenize_bytes("é日本".as_bytes());
            tokens.tokenize_bytes(&[b'a', 0xE6, 0x97]);
        }
    }
}
