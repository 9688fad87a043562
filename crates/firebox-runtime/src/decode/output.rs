//! The output side of decoding: tokens chosen from logits, their text, and where the answer ends.

use std::mem;
use std::sync::Arc;

use firebox_text::{Detokenizer, StopStrings, Tokenizer};

use crate::decode::{
    Finish, GenerationConfig, LogProbabilities, OutputSnapshot, PartialOutput, PausedGeneration, Piece,
    Sampler, ScoreRow, likeliest,
};
use crate::{Charge, Constraint, GrammarError, RequestGrammar, RuntimeError};

/// The output of one request: it chooses tokens from logits under a grammar, makes text of them, and finds the end. It needs
/// neither a session nor a clock.
#[derive(Debug)]
pub struct OutputState {
    tokenizer: Option<Arc<Tokenizer>>,
    detokenizer: Option<Detokenizer>,
    stops: StopStrings,
    sampler: Sampler,
    constraint: Option<Constraint>,
    /// What the budget was charged for the constraint.
    _grammar_charge: Option<Arc<Charge>>,
    /// A buffer for the logits that the grammar permits.
    permitted: Vec<f32>,
    /// Log-probabilities of the token chosen last, if they were asked for.
    logprobs: Option<LogProbabilities>,
    config: GenerationConfig,
    text: String,
    tokens: Vec<u32>,
    /// Tokens generated before a pause whose ids were not handed back.
    forgotten: usize,
    finish: Option<Finish>,
}

impl OutputState {
    /// Begins an output. Without a tokenizer it has tokens and no text.
    pub fn new(config: GenerationConfig, tokenizer: Option<Arc<Tokenizer>>) -> Result<Self, RuntimeError> {
        let constraint = constraint(&config, tokenizer.as_ref())?;
        Self::begin(config, tokenizer, constraint)
    }

    /// Begins an output under a grammar that is compiled already, whatever the configuration has.
    pub fn with_grammar(
        config: GenerationConfig,
        tokenizer: Option<Arc<Tokenizer>>,
        grammar: RequestGrammar,
    ) -> Result<Self, RuntimeError> {
        let RequestGrammar { constraint, charge } = grammar;
        let output = Self::begin(config, tokenizer, Some(constraint))?;
        Ok(Self { _grammar_charge: charge, ..output })
    }

    fn begin(
        config: GenerationConfig,
        tokenizer: Option<Arc<Tokenizer>>,
        constraint: Option<Constraint>,
    ) -> Result<Self, RuntimeError> {
        let detokenizer = tokenizer.as_ref().map(|tokenizer| {
            // A grammar describes all of the text, a space at its beginning included.
            if config.continues || constraint.is_some() {
                Detokenizer::continuing(tokenizer, true)
            } else {
                Detokenizer::new(tokenizer, true)
            }
        });
        Ok(Self {
            detokenizer,
            tokenizer,
            stops: StopStrings::new(config.stop.clone()),
            sampler: Sampler::new(config.sampler.clone())?,
            finish: constraint.as_ref().is_some_and(Constraint::ended).then_some(Finish::Stop),
            constraint,
            _grammar_charge: None,
            permitted: Vec::new(),
            logprobs: None,
            config,
            text: String::new(),
            tokens: Vec::new(),
            forgotten: 0,
        })
    }

    /// Pauses an output in a sequence of `length` tokens that began with a prompt of `prompt_tokens`. `chosen` is the next
    /// token, if that was chosen already.
    pub(crate) fn pause(
        &mut self,
        length: usize,
        chosen: Option<u32>,
        prompt_tokens: usize,
    ) -> (PausedGeneration, PartialOutput) {
        let paused = PausedGeneration::new(self.snapshot(), length, chosen, prompt_tokens);
        (paused, self.take())
    }

    fn snapshot(&self) -> OutputSnapshot<'_> {
        OutputSnapshot {
            config: &self.config,
            drawn: self.sampler.drawn(),
            detokenizer: self.detokenizer.as_ref(),
            stops: &self.stops,
            tokens: self.count(),
            finish: self.finish,
            logprobs: self.logprobs.as_ref(),
        }
    }

    /// Continues an output that was paused. `output` is what it had by then, or empty.
    pub(crate) fn resume(
        paused: &PausedGeneration,
        output: PartialOutput,
        tokenizer: Option<Arc<Tokenizer>>,
    ) -> Result<Self, RuntimeError> {
        let config = paused.config();
        let mut constraint = constraint(&config, tokenizer.as_ref())?;
        let forgotten = paused.tokens().saturating_sub(output.tokens.len());
        if let Some(constraint) = &mut constraint {
            if forgotten > 0 {
                return Err(GrammarError::Forgotten { tokens: forgotten }.into());
            }
            for &token in output.tokens.iter().chain(paused.chosen().as_ref()) {
                constraint.accept(token)?;
            }
        }
        let held = tokenizer.as_ref().zip(paused.held_back());
        Ok(Self {
            detokenizer: held.map(|(tokenizer, held)| Detokenizer::resume(tokenizer, true, held.clone())),
            tokenizer,
            stops: paused.stops(),
            sampler: paused.sampler()?,
            constraint,
            _grammar_charge: None,
            permitted: Vec::new(),
            logprobs: paused.chosen_logprobs(),
            config,
            text: output.text,
            forgotten,
            tokens: output.tokens,
            finish: paused.finish(),
        })
    }

    /// Returns how many of the likeliest tokens it chooses from, if it needs no other scores: a grammar and log-probabilities
    /// take all logits.
    pub(crate) fn candidates(&self) -> Option<usize> {
        let needs_all = self.constraint.is_some() || self.config.logprobs.is_some();
        self.sampler.candidates_needed().filter(|_| !needs_all)
    }

    /// Chooses the token that follows the scores, in a sequence of `tokens`. The token is then either [added](Self::add) or
    /// ends the answer. The likeliest tokens suffice where [`candidates`](Self::candidates) says so.
    pub(crate) fn choose(&mut self, scores: ScoreRow<'_>, tokens: &[u32]) -> Result<u32, RuntimeError> {
        let logits = match scores {
            ScoreRow::Logits(logits) => logits,
            ScoreRow::Likeliest(likeliest) => {
                self.logprobs = None;
                return Ok(self.sampler.sample_likeliest(likeliest));
            }
        };
        let token = match &mut self.constraint {
            None => self.sampler.sample(logits, tokens),
            Some(constraint) => {
                self.permitted.clear();
                self.permitted.extend_from_slice(logits);
                constraint.mask(&mut self.permitted)?;
                let mut token = self.sampler.sample(&self.permitted, tokens);
                if self.permitted[token as usize] == f32::NEG_INFINITY {
                    // Penalties and biases can leave nothing that is permitted.
                    token = likeliest(&self.permitted);
                }
                constraint.accept(token)?;
                token
            }
        };
        self.logprobs = self.config.logprobs.map(|most| LogProbabilities::new(logits, token, most));
        Ok(token)
    }

    /// Returns the tokens that the grammar forces next, whatever the logits are.
    pub(crate) fn forced(&mut self) -> Vec<u32> {
        self.constraint.as_mut().map(Constraint::forced).unwrap_or_default()
    }

    /// Returns how many of `tokens` the grammar permits, one after the other.
    pub(crate) fn permitted(&mut self, tokens: &[u32]) -> usize {
        self.constraint.as_mut().map_or(tokens.len(), |constraint| constraint.permitted(tokens))
    }

    /// Returns the sampler that chooses the tokens.
    pub(crate) fn sampler(&mut self) -> &mut Sampler {
        &mut self.sampler
    }

    /// Returns true for a token that ends the answer and is no part of it.
    pub(crate) fn ends_at(&self, token: u32) -> bool {
        // A grammar that permits the end may permit nothing else.
        (!self.config.ignore_end || self.constraint.is_some())
            && (self.config.end_tokens.contains(&token)
                || self.tokenizer.as_ref().is_some_and(|tokenizer| tokenizer.is_eos(token)))
    }

    /// Adds a token, and returns it with the text that is certain now.
    pub(crate) fn add(&mut self, token: u32) -> Piece {
        self.tokens.push(token);
        let is_special = self.tokenizer.as_ref().is_some_and(|tokenizer| tokenizer.is_special(token));
        let text = match &mut self.detokenizer {
            // A control token has no text, and no stop string continues behind it.
            Some(_) if is_special => self.stops.finish(),
            Some(detokenizer) => self.stops.push(&detokenizer.push(token)),
            None => String::new(),
        };
        self.text.push_str(&text);
        if self.stops.matched().is_some() {
            self.finish = Some(Finish::Stop);
        }
        let mut piece = Piece { token: Some(token), text, logprobs: self.logprobs.take() };
        if self.finish.is_none() && self.constraint.as_ref().is_some_and(Constraint::ended) {
            piece.text.extend(self.end(Finish::Stop).map(|rest| rest.text));
        }
        piece
    }

    /// Ends the answer, and returns the text that was held back, if any was.
    pub(crate) fn end(&mut self, finish: Finish) -> Option<Piece> {
        self.finish = Some(finish);
        let mut text = match &mut self.detokenizer {
            Some(detokenizer) => self.stops.push(&detokenizer.finish()),
            None => String::new(),
        };
        text.push_str(&self.stops.finish());
        self.text.push_str(&text);
        (!text.is_empty()).then_some(Piece { token: None, text, logprobs: None })
    }

    /// Returns why the answer ended, once it has.
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// Returns whether the answer ends once it only repeats itself.
    pub(crate) fn has_loop_guard(&self) -> bool {
        self.config.loop_guard
    }

    /// Returns how many more tokens the answer may have, in a sequence that has `length`.
    pub(crate) fn room(&self, length: usize) -> usize {
        let asked = self.config.max_tokens.map_or(usize::MAX, |most| most.saturating_sub(self.count()));
        let fits = self.config.context.map_or(usize::MAX, |most| most.saturating_sub(length));
        asked.min(fits)
    }

    /// Returns how many tokens the answer has, without one that ended it.
    pub fn count(&self) -> usize {
        self.forgotten + self.tokens.len()
    }

    /// Takes the text and the tokens out.
    pub(crate) fn take(&mut self) -> PartialOutput {
        PartialOutput { text: mem::take(&mut self.text), tokens: mem::take(&mut self.tokens) }
    }
}

fn constraint(
    config: &GenerationConfig,
    tokenizer: Option<&Arc<Tokenizer>>,
) -> Result<Option<Constraint>, RuntimeError> {
    match (&config.grammar, tokenizer) {
        (Some(grammar), Some(tokenizer)) => {
            Ok(Some(Constraint::new(grammar, tokenizer, &config.end_tokens)?))
        }
        (Some(_), None) => Err(GrammarError::NoTokenizer.into()),
        (None, _) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use firebox_text::{GgufVocabulary, TextAssets, TokenizerSource};
    use serde_json::Value;

    use super::*;

    #[test]
    fn no_text_is_held_back_across_a_control_token() {
        let vocabulary = GgufVocabulary {
            model: "gpt2".into(),
            tokens: ["E", "ND", "<tool_call>"].map(String::from).to_vec(),
            token_types: vec![1, 1, 3],
            ..GgufVocabulary::default()
        };
        let source = Some(TokenizerSource::Gguf(vocabulary));
        let assets = TextAssets { tokenizer: source, ..TextAssets::default() };
        let tokenizer = Arc::new(Tokenizer::new(&assets, &Value::Null).unwrap());
        let config = GenerationConfig { stop: vec!["END".into()], ..GenerationConfig::default() };
        let mut output = OutputState::new(config, Some(tokenizer)).unwrap();
        assert_eq!([0, 2, 1].map(|token| output.add(token).text), ["", "E", "ND"]);
        assert_eq!(output.finish(), None);
        assert_eq!([0, 1].map(|token| output.add(token).text), ["", ""]);
        assert_eq!(output.finish(), Some(Finish::Stop));
    }
}
