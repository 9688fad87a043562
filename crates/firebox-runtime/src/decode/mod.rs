//! Decoding: from logits to tokens and text, for one generation and for batches alike.
//!
//! - [`DecodeState`] is the decoding loop. It chooses the token that follows the logits, ends the answer, and keeps
//!   drafts in step with the choices. A [`Generation`] drives it for one session, a batch for each of its sequences.
//!   [`draft_together`] drafts for all sequences of a batch, by the measured [`PassCosts`].
//! - [`OutputState`] turns chosen tokens into text: grammar, stop strings, control tokens, log-probabilities.
//! - [`Sampler`] chooses a token from [`Scores`]: logits, or the likeliest tokens alone where they suffice.
//! - [`Speculation`] drafts tokens that a pass verifies together with the token before them.

mod branch;
mod config;
mod generation;
mod logprobs;
mod output;
mod paused_file;
mod paused_generation;
mod piece;
mod repetition;
mod sampler;
mod sampler_config;
mod scores;
mod speculation;
mod state;
mod timing;

pub use config::GenerationConfig;
pub use generation::Generation;
pub(crate) use generation::GenerationStart;
pub use logprobs::LogProbabilities;
pub use output::OutputState;
pub(crate) use paused_generation::OutputSnapshot;
pub use paused_generation::{PartialOutput, PausedGeneration};
pub use piece::{Finish, Piece, Summary};
pub use sampler::{Sampler, likeliest};
pub use sampler_config::SamplerConfig;
pub(crate) use scores::ScoreRow;
pub use scores::Scores;
pub use speculation::{
    BatchDraft, DRAFT_BRANCHES, DRAFT_TOKENS, Draft, Drafter, LookupDrafter, ModelDrafter, PassCosts,
    Speculation, draft_together,
};
pub use state::{Advance, DecodeState};
pub use timing::Timing;
