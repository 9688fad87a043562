//! Text that has to have a form: which tokens a grammar permits next.
//!
//! A [`Grammar`] says what a text may be, and a [`Constraint`] goes along with the text token by token. Before every choice
//! it takes all tokens out of the running that the grammar does not permit there; which of the rest is chosen stays the
//! model's and the sampler's affair.

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

/// What `llguidance` says where a text could only go on by bytes that no token has.
const NOTHING_LEFT: &str = "NoExtensionBias";

/// Why a text cannot be held to a grammar.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintError {
    /// The grammar says nothing that could be followed, or asks for more than is spent on one.
    #[error("the {kind} cannot be used: {reason}")]
    Grammar {
        /// What it was given as.
        kind: &'static str,
        /// What is wrong with it, and where.
        reason: String,
    },
    /// The tokens of the model cannot be looked at by their bytes.
    #[error("the model's vocabulary cannot follow a grammar: {reason}")]
    Vocabulary {
        /// Why.
        reason: String,
    },
    /// Without a tokenizer nothing is known of what tokens spell.
    #[error(
        "a grammar is about text, and the model has no tokenizer; put its tokenizer.json beside config.json"
    )]
    NoTokenizer,
    /// The text cannot go on.
    #[error("the answer cannot go on by its grammar: {reason}")]
    Stuck {
        /// Why.
        reason: String,
    },
    /// Of an answer that was paused, tokens are not there any more.
    #[error(
        "{tokens} tokens of the answer are missing, and where its grammar is depends on them; resume it with what it said"
    )]
    Forgotten {
        /// How many.
        tokens: usize,
    },
    /// A token that the grammar does not permit where it came.
    #[error("token {token} is not what the grammar permits there")]
    Refused {
        /// The token.
        token: u32,
    },
}

/// A text in progress, and what its grammar says of the next token. A clone goes its own way.
#[derive(Clone)]
pub struct Constraint {
    matcher: Matcher,
    vocabulary: Arc<Vocabulary>,
    /// Tokens that end the text, beside those the tokenizer knows.
    ends: Vec<u32>,
    ended: bool,
}

impl Constraint {
    /// A text that has not begun. It may be ended where the grammar says so, by the tokenizer's own tokens for that and by
    /// any of `ends`.
    ///
    /// What a grammar may cost is bounded, in time and in memory; one that would go beyond is an error.
    pub fn new(grammar: &Grammar, tokenizer: &Arc<Tokenizer>, ends: &[u32]) -> Result<Self, ConstraintError> {
        let compiled = grammar.compiled()?;
        let vocabulary = Vocabulary::of(tokenizer)?;
        let parser = vocabulary.factory().create_parser(compiled);
        let parser = parser.map_err(|error| grammar.error(&error.to_string()))?;
        let ends = ends.iter().copied().filter(|&end| !tokenizer.is_eos(end)).collect();
        let mut constraint = Self { matcher: Matcher::new(Ok(parser)), vocabulary, ends, ended: false };
        // Some grammars are complete before anything was said.
        constraint.matcher.consume_tokens(&[]).map_err(|error| grammar.error(&error.to_string()))?;
        constraint.ended = constraint.matcher.is_stopped();
        Ok(constraint)
    }

    /// Takes all tokens out of the running that are not permitted next: their logits become negative infinity. Permitted
    /// ones keep theirs; one that is no number becomes the smallest, so that it is still chosen before those.
    pub fn mask(&mut self, logits: &mut [f32]) -> Result<(), ConstraintError> {
        let permitted = self.permitted_next()?;
        let (words, rest) = logits.as_chunks_mut::<32>();
        let bits = permitted.as_slice();
        for (at, logits) in words.iter_mut().enumerate() {
            keep(logits, bits.get(at).copied().unwrap_or(0));
        }
        keep(rest, bits.get(words.len()).copied().unwrap_or(0));
        if logits.iter().any(|logit| *logit > f32::NEG_INFINITY) {
            return Ok(());
        }
        Err(ConstraintError::Stuck { reason: "the model has none of the tokens that may follow".into() })
    }

    /// Goes on by a token. One that ends the text has to come where the grammar permits it.
    pub fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        if self.ended {
            return Err(ConstraintError::Refused { token });
        }
        if self.ends.contains(&token) && self.may_end()? {
            self.ended = true;
            return Ok(());
        }
        // A parser that meets what it does not permit is of no use any more.
        if self.permitted(&[token]) == 0 {
            return Err(match self.matcher.get_error() {
                Some(reason) => stuck(&reason),
                None => ConstraintError::Refused { token },
            });
        }
        self.matcher.consume_token(token).map_err(|error| stuck(&error.to_string()))?;
        self.ended = self.matcher.is_stopped();
        Ok(())
    }

    /// Whether the text is complete, and nothing can follow.
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// Whether the text is complete as it is, though more may follow.
    pub fn may_end(&mut self) -> Result<bool, ConstraintError> {
        if self.ended {
            return Ok(true);
        }
        self.matcher.is_accepting().map_err(|error| stuck(&error.to_string()))
    }

    /// What has to follow whatever the model thinks, as the tokenizer would have it. Possibly nothing.
    pub fn forced(&mut self) -> Vec<u32> {
        if self.ended { Vec::new() } else { self.matcher.compute_ff_tokens() }
    }

    /// How many of these tokens may follow, one after the other.
    pub fn permitted(&mut self, tokens: &[u32]) -> usize {
        let known = self.vocabulary.factory().tok_env().tok_trie().vocab_size();
        let known = tokens.iter().take_while(|token| (**token as usize) < known).count();
        if self.ended { 0 } else { self.matcher.validate_tokens(&tokens[..known]).unwrap_or(0) }
    }

    fn permitted_next(&mut self) -> Result<SimpleVob, ConstraintError> {
        if self.ended {
            return Err(stuck("it is complete"));
        }
        let mut permitted =
            self.matcher.compute_mask().map_err(|error| match error.to_string().contains(NOTHING_LEFT) {
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

/// Keeps those of up to 32 logits whose bits are set.
fn keep(logits: &mut [f32], bits: u32) {
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

fn stuck(reason: &str) -> ConstraintError {
    ConstraintError::Stuck { reason: grammar::plain(reason) }
}
