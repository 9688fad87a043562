//! Options of a generation.

use crate::Grammar;
use crate::decode::SamplerConfig;

/// Options of a generation.
///
/// Fields may be added: outside this crate it is built with its methods.
///
/// ```
/// use firebox_runtime::{GenerationConfig, SamplerConfig};
///
/// let sampler = SamplerConfig::default().with_temperature(0.7).with_seed(7);
/// let config = GenerationConfig::new().with_max_tokens(64).with_stop("\n").with_sampler(sampler);
/// assert_eq!(config.max_tokens, Some(64));
/// ```
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct GenerationConfig {
    /// Ends after this many tokens.
    pub max_tokens: Option<usize>,
    /// Ends when the sequence, prompt included, has this many tokens.
    pub context: Option<usize>,
    /// Ends before any of these strings.
    pub stop: Vec<String>,
    /// Ends at any of these tokens, beside those the tokenizer knows; [`Model::end_tokens`](crate::Model::end_tokens)
    /// has them for a model without a tokenizer.
    pub end_tokens: Vec<u32>,
    /// Continues after a token that would end it, unless a grammar has permitted the end.
    pub ignore_end: bool,
    /// Ends once the same tokens, up to 512 of them, have followed one another eight times and fill 256 tokens or more.
    pub loop_guard: bool,
    /// The text continues that of the prompt, so that a space before its first word is kept, as it is under a grammar.
    /// Otherwise the text begins anew.
    pub continues: bool,
    /// The grammar of the answer. The answer ends where the grammar does, and where the model ends it and the grammar
    /// permits that.
    pub grammar: Option<Grammar>,
    /// Every token comes with its log-probability, and with those of this many of the likeliest tokens.
    pub logprobs: Option<usize>,
    /// How tokens are chosen.
    pub sampler: SamplerConfig,
}

impl GenerationConfig {
    /// Returns the defaults: greedy, up to the end that the model sets.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets [`max_tokens`](Self::max_tokens).
    #[must_use]
    pub fn with_max_tokens(mut self, tokens: usize) -> Self {
        self.max_tokens = Some(tokens);
        self
    }

    /// Sets [`context`](Self::context).
    #[must_use]
    pub fn with_context(mut self, tokens: usize) -> Self {
        self.context = Some(tokens);
        self
    }

    /// Adds a string to [`stop`](Self::stop).
    #[must_use]
    pub fn with_stop(mut self, text: impl Into<String>) -> Self {
        self.stop.push(text.into());
        self
    }

    /// Adds tokens to [`end_tokens`](Self::end_tokens).
    #[must_use]
    pub fn with_end_tokens(mut self, tokens: impl IntoIterator<Item = u32>) -> Self {
        self.end_tokens.extend(tokens);
        self
    }

    /// Sets [`ignore_end`](Self::ignore_end).
    #[must_use]
    pub fn with_ignore_end(mut self, ignore: bool) -> Self {
        self.ignore_end = ignore;
        self
    }

    /// Sets [`loop_guard`](Self::loop_guard).
    #[must_use]
    pub fn with_loop_guard(mut self, guard: bool) -> Self {
        self.loop_guard = guard;
        self
    }

    /// Sets [`continues`](Self::continues).
    #[must_use]
    pub fn with_continues(mut self, continues: bool) -> Self {
        self.continues = continues;
        self
    }

    /// Sets [`grammar`](Self::grammar).
    #[must_use]
    pub fn with_grammar(mut self, grammar: Grammar) -> Self {
        self.grammar = Some(grammar);
        self
    }

    /// Sets [`logprobs`](Self::logprobs).
    #[must_use]
    pub fn with_logprobs(mut self, likeliest: usize) -> Self {
        self.logprobs = Some(likeliest);
        self
    }

    /// Sets [`sampler`](Self::sampler).
    #[must_use]
    pub fn with_sampler(mut self, sampler: SamplerConfig) -> Self {
        self.sampler = sampler;
        self
    }
}
