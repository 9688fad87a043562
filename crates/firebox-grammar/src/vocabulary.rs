use std::sync::{Arc, Mutex, PoisonError, Weak};

use firebox_text::Tokenizer;
use llguidance::ParserFactory;
use llguidance::api::ParserLimits;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{INVALID_TOKEN, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};

use super::ConstraintError;

/// Longer tokens are never permitted: a trie node counts its ancestors in ten bits.
const LONGEST_TOKEN: usize = 1000;

/// What may be spent on one grammar. All of these stop with an error where they are exceeded.
fn limits() -> ParserLimits {
    ParserLimits {
        // A state takes one or two kilobytes, and the default is half a gigabyte of them.
        max_lexer_states: 50_000,
        // A mask takes 10 ms or so where all of these are made. With the default, vocabularies with many tokens across the
        // borders of words end answers that are nothing special.
        step_max_items: 250_000,
        // Symbols of rules take a kilobyte or two each while they are made and joined, and the default is a gigabyte of them. Some
        // more than these end in a panic.
        max_grammar_size: 65_000,
        // What is wrong is said without the state of the parser, which means nothing to whoever wrote the grammar.
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// A tokenizer's tokens by their bytes, as grammars look at them.
pub(super) struct Vocabulary {
    factory: ParserFactory,
}

impl Vocabulary {
    /// That of a tokenizer: made once, and kept for as long as the tokenizer lives.
    pub fn of(tokenizer: &Arc<Tokenizer>) -> Result<Arc<Self>, ConstraintError> {
        static MADE: Mutex<Vec<(Weak<Tokenizer>, Arc<Vocabulary>)>> = Mutex::new(Vec::new());
        let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
        made.retain(|(tokenizer, _)| tokenizer.strong_count() > 0);
        if let Some((_, known)) = made.iter().find(|(of, _)| std::ptr::eq(of.as_ptr(), &**tokenizer)) {
            return Ok(known.clone());
        }
        let vocabulary = Arc::new(Self::new(tokenizer)?);
        made.push((Arc::downgrade(tokenizer), vocabulary.clone()));
        Ok(vocabulary)
    }

    fn new(tokenizer: &Tokenizer) -> Result<Self, ConstraintError> {
        let unusable = |reason: String| ConstraintError::Vocabulary { reason };
        let words: Vec<Vec<u8>> =
            (0..tokenizer.vocab_size() as u32).map(|id| spelled(tokenizer, id)).collect();
        // Two tokens may share a node of the trie, but no trie has more nodes than this.
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
        // Clones share what is in them, and the registry's weak reference is to another allocation.
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

/// The bytes a token adds to a text; special ones are set apart by a byte that no text has.
fn spelled(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let bytes = match tokenizer.id_to_token(id) {
        Some(name) if tokenizer.is_control(id) => {
            [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat()
        }
        // What stands for the unknown says nothing of what it stands for.
        _ if tokenizer.unk_id() == Some(id) => Vec::new(),
        _ => tokenizer.token_bytes(id).unwrap_or_default().to_vec(),
    };
    if bytes.len() > LONGEST_TOKEN { Vec::new() } else { bytes }
}

struct Tokens {
    tokenizer: Tokenizer,
    trie: TokTrie,
}

impl Tokens {
    /// A text in the midst of others, as the tokenizer has it.
    fn encode(&self, text: &str) -> Vec<u32> {
        let spells = |tokens: &[u32]| self.trie.decode_raw(tokens) == text.as_bytes();
        if let Ok(tokens) = self.tokenizer.encode_literal(text, false)
            && spells(&tokens)
        {
            return tokens;
        }
        // Some begin every text by a space; behind a line it begins no more.
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
    fn a_vocabulary_is_made_once_and_lives_as_long_as_its_tokenizer() {
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

    /// Whatever the family, a text is cut into tokens whose bytes are the text's.
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
            // What no token spells has none, and is no reason to fail.
            tokens.tokenize_bytes("é日本".as_bytes());
            tokens.tokenize_bytes(&[b'a', 0xE6, 0x97]);
        }
    }
}
