//! What a generation hands out: pieces of its answer, why it ended, and a summary.

use serde::{Deserialize, Serialize};

use crate::decode::LogProbabilities;

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// The model ended it, or a stop string did.
    Stop,
    /// It has as many tokens as were asked for, or as fit.
    Length,
    /// The caller ended it.
    Cancelled,
    /// It only [repeated itself](crate::GenerationConfig::loop_guard).
    Repetition,
}

/// One generated token and the text that is now certain.
#[derive(Debug, Clone, PartialEq)]
pub struct Piece {
    /// The token; absent when the text was held back from earlier ones.
    pub token: Option<u32>,
    /// Empty while a character or a stop string may still be incomplete.
    pub text: String,
    /// The token's log-probability, if that was [asked for](crate::GenerationConfig::logprobs).
    pub logprobs: Option<LogProbabilities>,
}

/// The outcome of a generation.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Summary {
    /// The text.
    pub text: String,
    /// The tokens, without the one that ended it.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Milliseconds to the first token.
    pub ttft_ms: f64,
    /// Prompt tokens per second; 0 for a generation that was [resumed](crate::Generation::resume), as its prompt was fed before.
    pub prefill_tps: f64,
    /// Generated tokens per second after the first; 0 when there are fewer than two.
    pub decode_tps: f64,
    /// Tokens that were drafted and verified.
    pub drafted_tokens: usize,
    /// Drafted tokens that the model chose.
    pub accepted_tokens: usize,
    /// Why it ended.
    pub finish: Finish,
}
