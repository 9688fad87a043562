//! Generations that were stopped between two tokens.

use firebox_cache::CacheError;
use firebox_text::{Detokenizer, DetokenizerState, StopStrings};
use serde::{Deserialize, Serialize};

use crate::decode::{Finish, GenerationConfig, LogProbabilities, Sampler, SamplerConfig};
use crate::{Grammar, RuntimeError, Session};

/// The state of a generation beside its session: the place of the sampler in its random sequence, text that is held back for
/// incomplete characters and stop strings, the options, and how many tokens there are. It takes a few hundred bytes as JSON,
/// beside a grammar and log-probabilities, however long the output is.
///
/// The session stays as it is, with its pages; or it is [written](Self::write) to the same file, and its pages go back to
/// the pool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PausedGeneration {
    max_tokens: Option<usize>,
    context: Option<usize>,
    stop: Vec<String>,
    end_tokens: Vec<u32>,
    ignore_end: bool,
    /// Absent in files that are older than the guard.
    #[serde(default)]
    loop_guard: bool,
    continues: bool,
    grammar: Option<Grammar>,
    logprobs: Option<usize>,
    /// Settings without biases.
    sampler: SamplerConfig,
    /// Tokens, and their biases as bits: numbers of JSON are neither exact nor infinite.
    biases: Vec<(u32, u32)>,
    /// The place in the random sequence.
    drawn: u64,
    held_back: Option<DetokenizerState>,
    held_for_stop: String,
    met: Option<String>,
    tokens: usize,
    finish: Option<Finish>,
    /// Tokens of the sequence.
    length: usize,
    chosen: Option<Chosen>,
    prompt_tokens: usize,
}

/// A token that was chosen and not handed out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Chosen {
    token: u32,
    /// Log-probabilities of the token and of the likeliest ones, as bits like biases.
    logprobs: Option<(u32, Vec<(u32, u32)>)>,
}

/// The text and tokens of a generation so far.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartialOutput {
    /// The text.
    pub text: String,
    /// The tokens.
    pub tokens: Vec<u32>,
}

/// The state of an output at a pause.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OutputSnapshot<'a> {
    pub config: &'a GenerationConfig,
    /// The place of the sampler in its random sequence.
    pub drawn: u64,
    pub detokenizer: Option<&'a Detokenizer>,
    pub stops: &'a StopStrings,
    /// The number of tokens.
    pub tokens: usize,
    pub finish: Option<Finish>,
    /// Log-probabilities of a token that was chosen and not added yet.
    pub logprobs: Option<&'a LogProbabilities>,
}

impl PausedGeneration {
    pub(crate) fn new(
        output: OutputSnapshot<'_>,
        length: usize,
        chosen: Option<u32>,
        prompt_tokens: usize,
    ) -> Self {
        let GenerationConfig {
            max_tokens,
            context,
            stop,
            end_tokens,
            ignore_end,
            loop_guard,
            continues,
            sampler,
            grammar,
            logprobs,
        } = output.config.clone();
        let mut biases: Vec<_> =
            sampler.logit_bias.iter().map(|(token, bias)| (*token, bias.to_bits())).collect();
        biases.sort_unstable();
        let bits = |(token, logprob): &(u32, f32)| (*token, logprob.to_bits());
        let likely = output.logprobs.map(|LogProbabilities { token, likeliest }| {
            (token.to_bits(), likeliest.iter().map(bits).collect())
        });
        Self {
            max_tokens,
            context,
            stop,
            end_tokens,
            ignore_end,
            loop_guard,
            continues,
            grammar,
            logprobs,
            sampler: SamplerConfig { logit_bias: Default::default(), ..sampler },
            biases,
            drawn: output.drawn,
            held_back: output.detokenizer.map(|detokenizer| detokenizer.state().clone()),
            held_for_stop: output.stops.held().to_owned(),
            met: output.stops.matched().map(str::to_owned),
            tokens: output.tokens,
            finish: output.finish,
            length,
            chosen: chosen.map(|token| Chosen { token, logprobs: likely }),
            prompt_tokens,
        }
    }

    /// Returns an error unless the generation can continue in `session`.
    pub(crate) fn check(&self, session: &Session) -> Result<(), RuntimeError> {
        let mismatch = |reason: String| Err(CacheError::Mismatch { reason }.into());
        if session.tokens().len() != self.length {
            let (length, found) = (self.length, session.tokens().len());
            return mismatch(format!(
                "the generation was paused in a sequence of {length} tokens, not of {found}"
            ));
        }
        match self.chosen() {
            Some(token) if !session.has_token(token) => mismatch(format!(
                "the generation continues with token {token}, which the model does not have"
            )),
            _ => Ok(()),
        }
    }

    pub(crate) fn config(&self) -> GenerationConfig {
        GenerationConfig {
            max_tokens: self.max_tokens,
            context: self.context,
            stop: self.stop.clone(),
            end_tokens: self.end_tokens.clone(),
            ignore_end: self.ignore_end,
            loop_guard: self.loop_guard,
            continues: self.continues,
            grammar: self.grammar.clone(),
            logprobs: self.logprobs,
            sampler: self.sampler_config(),
        }
    }

    fn sampler_config(&self) -> SamplerConfig {
        let biases = self.biases.iter().map(|(token, bits)| (*token, f32::from_bits(*bits)));
        SamplerConfig { logit_bias: biases.collect(), ..self.sampler.clone() }
    }

    pub(crate) fn sampler(&self) -> Result<Sampler, RuntimeError> {
        Sampler::resume(self.sampler_config(), self.drawn)
    }

    pub(crate) fn stops(&self) -> StopStrings {
        StopStrings::new(self.stop.clone()).resume(self.held_for_stop.clone(), self.met.as_deref())
    }

    pub(crate) fn held_back(&self) -> Option<&DetokenizerState> {
        self.held_back.as_ref()
    }

    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    pub(crate) fn finish(&self) -> Option<Finish> {
        self.finish
    }

    pub(crate) fn chosen(&self) -> Option<u32> {
        self.chosen.as_ref().map(|chosen| chosen.token)
    }

    /// Returns the log-probabilities of the chosen token.
    pub(crate) fn chosen_logprobs(&self) -> Option<LogProbabilities> {
        let (token, likeliest) = self.chosen.as_ref()?.logprobs.as_ref()?;
        let number = |(token, bits): &(u32, u32)| (*token, f32::from_bits(*bits));
        let likeliest = likeliest.iter().map(number).collect();
        Some(LogProbabilities { token: f32::from_bits(*token), likeliest })
    }

    pub(crate) fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }
}
