//! Options of a generation.

use crate::Grammar;
use crate::decode::SamplerConfig;

/// Options of a generation.
#[derive(Debug, Clone, Default)]
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
