//! Constrained decoding: which tokens a grammar permits next.
//!
//! A [`Grammar`] describes a text, and a [`Constraint`] follows the text token by token. Before every choice it masks the
//! tokens that the grammar does not permit; the model and the sampler choose among the rest.

mod gbnf;
mod grammar;
mod vocabulary;

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use firebox_text::Tokenizer;
use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;

pub use gbnf::to_lark as gbnf_to_lark;
pub use grammar::Grammar;

use vocabulary::Vocabulary;

/// The error of `llguidance` if the text could only continue with bytes that no token has.
const NO_TOKEN_FITS: &str = "NoExtensionBias";

/// Why a text cannot follow a grammar.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The grammar is invalid, or exceeds a limit.
    #[error("the {kind} cannot be used: {reason}")]
    Grammar {
        /// The kind of grammar.
        kind: &'static str,
        /// What is wrong with it, and where.
        reason: String,
    },
    /// The bytes of the model's tokens are not known.
    #[error("the model's vocabulary cannot follow a grammar: {reason}")]
    Vocabulary {
        /// The reason.
        reason: String,
    },
    /// Without a tokenizer the text of tokens is not known.
    #[error(
        "a grammar is about text, and the model has no tokenizer; put its tokenizer.json beside config.json"
    )]
    NoTokenizer,
    /// No token can follow.
    #[error("the answer cannot go on by its grammar: {reason}")]
    Stuck {
        /// The reason.
        reason: String,
    },
    /// A paused answer lacks tokens.
    #[error(
        "{tokens} tokens of the answer are missing, and where its grammar is depends on them; resume it with what it said"
    )]
    Forgotten {
        /// How many are missing.
        tokens: usize,
    },
    /// The grammar does not permit a token.
    #[error("token {token} is not what the grammar permits there")]
    Refused {
        /// The token.
        token: u32,
    },
}

/// Memory that symbols of a compiled grammar take for a byte of its text. `llguidance` tells the memory of its lexer alone.
const SYMBOL_BYTES: u64 = 64;

/// The position of a text in its grammar. Clones move on independently; they share the states of the lexer, and the limit of
/// their number.
#[derive(Clone)]
pub struct Constraint {
    matcher: Matcher,
    vocabulary: Arc<Vocabulary>,
    /// Tokens that end the text in addition to the tokenizer's.
    ends: Vec<u32>,
    ended: bool,
    /// Memory that the compiled grammar takes.
    bytes: u64,
}

impl Constraint {
    /// Starts a text. Where the grammar permits, the tokenizer's end tokens and any of `ends` end it.
    ///
    /// The time and the memory of a grammar are bounded; one that exceeds the bounds is an error.
    pub fn new(grammar: &Grammar, tokenizer: &Arc<Tokenizer>, ends: &[u32]) -> Result<Self, GrammarError> {
        let compiled = grammar.compiled()?;
        let vocabulary = Vocabulary::of(tokenizer)?;
        let parser = vocabulary.factory().create_parser(compiled);
        let parser = parser.map_err(|error| grammar.error(&error.to_string()))?;
        let symbols = SYMBOL_BYTES * grammar.source_bytes() as u64;
        let bytes = symbols + parser.parser.lexer_stats().num_bytes as u64;
        let ends = ends.iter().copied().filter(|&end| !tokenizer.is_eos(end)).collect();
        let matcher = Matcher::new(Ok(parser));
        let mut constraint = Self { matcher, vocabulary, ends, ended: false, bytes };
        // Some grammars are complete with an empty text.
        constraint.matcher.consume_tokens(&[]).map_err(|error| grammar.error(&error.to_string()))?;
        constraint.ended = constraint.matcher.is_stopped();
        Ok(constraint)
    }

    /// Returns a copy that shares no state with this one: what its text makes the lexer build counts towards no other limit.
    pub fn separate(&self) -> Self {
        Self {
            matcher: self.matcher.deep_clone(),
            vocabulary: self.vocabulary.clone(),
            ends: self.ends.clone(),
            ..*self
        }
    }

    /// Estimates the memory of the compiled grammar, without states that texts add.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Masks the tokens that may not follow: their logits become negative infinity. Logits of permitted tokens stay; NaN
    /// becomes the least finite number, so that such a token is still preferred to masked ones.
    pub fn mask(&mut self, logits: &mut [f32]) -> Result<(), GrammarError> {
        let permitted = self.permitted_next()?;
        let (words, rest) = logits.as_chunks_mut::<32>();
        let bits = permitted.as_slice();
        for (at, logits) in words.iter_mut().enumerate() {
            mask_word(logits, bits.get(at).copied().unwrap_or(0));
        }
        mask_word(rest, bits.get(words.len()).copied().unwrap_or(0));
        if logits.iter().any(|logit| *logit > f32::NEG_INFINITY) {
            return Ok(());
        }
        Err(GrammarError::Stuck { reason: "the model has none of the tokens that may follow".into() })
    }

    /// Advances by a token. An end token is accepted only where the grammar permits the end.
    pub fn accept(&mut self, token: u32) -> Result<(), GrammarError> {
        if self.ended {
            return Err(GrammarError::Refused { token });
        }
        if self.ends.contains(&token) && self.may_end()? {
            self.ended = true;
            return Ok(());
        }
        // A parser fails for good when it consumes a token that is not permitted.
        if self.permitted(&[token]) == 0 {
            return Err(match self.matcher.get_error() {
                Some(reason) => stuck(&reason),
                None => GrammarError::Refused { token },
            });
        }
        self.matcher.consume_token(token).map_err(|error| stuck(&error.to_string()))?;
        self.ended = self.matcher.is_stopped();
        Ok(())
    }

    /// Returns whether the text is complete and nothing can follow.
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// Returns whether the text is complete, though more may follow.
    pub fn may_end(&mut self) -> Result<bool, GrammarError> {
        if self.ended {
            return Ok(true);
        }
        self.matcher.is_accepting().map_err(|error| stuck(&error.to_string()))
    }

    /// Returns the tokens that have to follow whatever the model prefers, as the tokenizer would encode them. The list may be
    /// empty.
    pub fn forced(&mut self) -> Vec<u32> {
        if self.ended { Vec::new() } else { self.matcher.compute_ff_tokens() }
    }

    /// Returns how many of these tokens may follow, one after the other.
    pub fn permitted(&mut self, tokens: &[u32]) -> usize {
        let known = self.vocabulary.factory().tok_env().tok_trie().vocab_size();
        let known = tokens.iter().take_while(|token| (**token as usize) < known).count();
        if self.ended { 0 } else { self.matcher.validate_tokens(&tokens[..known]).unwrap_or(0) }
    }

    fn permitted_next(&mut self) -> Result<SimpleVob, GrammarError> {
        if self.ended {
            return Err(stuck("it is complete"));
        }
        let mut permitted =
            self.matcher.compute_mask().map_err(|error| match error.to_string().contains(NO_TOKEN_FITS) {
                true => stuck("no token of the vocabulary spells what has to follow"),
                false => stuck(&error.to_string()),
            })?;
        let may_end = !self.ends.is_empty() && self.may_end()?;
        for &end in &self.ends {
            if (end as usize) < permitted.len() {
                permitted.set(end as usize, may_end);
            }
        }
        Ok(permitted)
    }
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint")
            .field("ends", &self.ends)
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}

/// Masks the logits, at most 32, whose bits are not set.
fn mask_word(logits: &mut [f32], bits: u32) {
    if bits == 0 {
        logits.fill(f32::NEG_INFINITY);
        return;
    }
    for (at, logit) in logits.iter_mut().enumerate() {
        if bits >> at & 1 == 0 {
            *logit = f32::NEG_INFINITY;
        } else if logit.is_nan() || *logit == f32::NEG_INFINITY {
            *logit = f32::MIN;
        }
    }
}

fn stuck(reason: &str) -> GrammarError {
    GrammarError::Stuck { reason: grammar::without_debug_info(reason) }
}
