use std::sync::Arc;

use firebox_text::{Detokenizer, StopStrings, Tokenizer};

use crate::generation::{Finish, GenerationConfig, Piece};
use crate::paused::{Paused, Said};
use crate::{Constraint, GrammarError, LogProbabilities, RuntimeError, Sampler, likeliest};

/// What becomes of the logits of one request: tokens, their text, and an end. It knows neither a session nor a clock.
#[derive(Debug)]
pub(crate) struct Answer {
    tokenizer: Option<Arc<Tokenizer>>,
    detokenizer: Option<Detokenizer>,
    stops: StopStrings,
    sampler: Sampler,
    constraint: Option<Constraint>,
    /// Logits of which only those are left that the grammar permits; kept for its memory.
    permitted: Vec<f32>,
    /// Of the token chosen last, if they are wanted.
    logprobs: Option<LogProbabilities>,
    config: GenerationConfig,
    text: String,
    tokens: Vec<u32>,
    /// Tokens that it had before it was paused, and that it does not know any more.
    forgotten: usize,
    finish: Option<Finish>,
}

impl Answer {
    /// One that has not begun. Without a tokenizer only tokens come out.
    pub fn new(config: GenerationConfig, tokenizer: Option<Arc<Tokenizer>>) -> Result<Self, RuntimeError> {
        let constraint = constraint(&config, tokenizer.as_ref())?;
        let detokenizer = tokenizer.as_ref().map(|tokenizer| {
            // A grammar is about all of the text, a space at its beginning included.
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
            permitted: Vec::new(),
            logprobs: None,
            config,
            text: String::new(),
            tokens: Vec::new(),
            forgotten: 0,
        })
    }

    /// Stops it, in a sequence that has `length` tokens of which it has `prompt_tokens` before its own. `chosen` is its
    /// next token, if that is known already.
    pub fn pause(self, length: usize, chosen: Option<u32>, prompt_tokens: usize) -> (Paused, Said) {
        let paused = Paused::new(&self, length, chosen, prompt_tokens);
        (paused, Said { text: self.text, tokens: self.tokens })
    }

    /// Goes on where it was paused, having said what it had said or nothing.
    pub fn resume(
        paused: &Paused,
        said: Said,
        tokenizer: Option<Arc<Tokenizer>>,
    ) -> Result<Self, RuntimeError> {
        let config = paused.config();
        let mut constraint = constraint(&config, tokenizer.as_ref())?;
        let forgotten = paused.tokens().saturating_sub(said.tokens.len());
        if let Some(constraint) = &mut constraint {
            if forgotten > 0 {
                return Err(GrammarError::Forgotten { tokens: forgotten }.into());
            }
            for &token in said.tokens.iter().chain(paused.chosen().as_ref()) {
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
            permitted: Vec::new(),
            logprobs: paused.chosen_logprobs(),
            config,
            text: said.text,
            forgotten,
            tokens: said.tokens,
            finish: paused.finish(),
        })
    }

    /// Where what chooses its tokens is.
    pub fn drawn(&self) -> u64 {
        self.sampler.drawn()
    }

    /// The token that follows the logits, in a sequence of these tokens. It is either [added](Self::add) or ends the answer.
    pub fn choose(&mut self, logits: &[f32], tokens: &[u32]) -> Result<u32, RuntimeError> {
        let token = match &mut self.constraint {
            None => self.sampler.sample(logits, tokens),
            Some(constraint) => {
                self.permitted.clear();
                self.permitted.extend_from_slice(logits);
                constraint.mask(&mut self.permitted)?;
                let mut token = self.sampler.sample(&self.permitted, tokens);
                if self.permitted[token as usize] == f32::NEG_INFINITY {
                    // Penalties and biases can leave the sampler with nothing but what is not permitted.
                    token = likeliest(&self.permitted);
                }
                constraint.accept(token)?;
                token
            }
        };
        self.logprobs = self.config.logprobs.map(|most| LogProbabilities::of(logits, token, most));
        Ok(token)
    }

    /// Tokens that follow whatever the logits are.
    pub fn forced(&mut self) -> Vec<u32> {
        self.constraint.as_mut().map(Constraint::forced).unwrap_or_default()
    }

    /// How many of these tokens may follow, one after the other.
    pub fn permitted(&mut self, tokens: &[u32]) -> usize {
        self.constraint.as_mut().map_or(tokens.len(), |constraint| constraint.permitted(tokens))
    }

    /// What chooses its tokens.
    pub fn sampler(&mut self) -> &mut Sampler {
        &mut self.sampler
    }

    /// Whether a token is one that ends it, and is no part of it.
    pub fn ends_at(&self, token: u32) -> bool {
        // Where a grammar permits the end, going on could have no meaning.
        (!self.config.ignore_end || self.constraint.is_some())
            && (self.config.end_tokens.contains(&token)
                || self.tokenizer.as_ref().is_some_and(|tokenizer| tokenizer.is_eos(token)))
    }

    /// Goes on by a token, and hands out the text that is certain now.
    pub fn add(&mut self, token: u32) -> Piece {
        self.tokens.push(token);
        let is_special = self.tokenizer.as_ref().is_some_and(|tokenizer| tokenizer.is_special(token));
        let text = match &mut self.detokenizer {
            // It has no text, and none from before may come after it: no stop string goes on behind a control token.
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

    /// Ends it, and hands out what was held back, if anything was.
    pub fn end(&mut self, finish: Finish) -> Option<Piece> {
        self.finish = Some(finish);
        let mut text = match &mut self.detokenizer {
            Some(detokenizer) => self.stops.push(&detokenizer.finish()),
            None => String::new(),
        };
        text.push_str(&self.stops.finish());
        self.text.push_str(&text);
        (!text.is_empty()).then_some(Piece { token: None, text, logprobs: None })
    }

    /// Why it ended, once it has.
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// How many more tokens it may come to, in a sequence that has `length`.
    pub fn room(&self, length: usize) -> usize {
        let asked = self.config.max_tokens.map_or(usize::MAX, |most| most.saturating_sub(self.count()));
        let fits = self.config.context.map_or(usize::MAX, |most| most.saturating_sub(length));
        asked.min(fits)
    }

    /// How many tokens it has, without one that ended it.
    pub fn count(&self) -> usize {
        self.forgotten + self.tokens.len()
    }

    pub fn config(&self) -> &GenerationConfig {
        &self.config
    }

    pub fn detokenizer(&self) -> Option<&Detokenizer> {
        self.detokenizer.as_ref()
    }

    pub fn stops(&self) -> &StopStrings {
        &self.stops
    }

    /// Of a token that was chosen and not added yet, if they are wanted.
    pub fn logprobs(&self) -> Option<&LogProbabilities> {
        self.logprobs.as_ref()
    }

    /// Its text and its tokens.
    pub fn into_parts(self) -> (String, Vec<u32>) {
        (self.text, self.tokens)
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
        let mut answer = Answer::new(config, Some(tokenizer)).unwrap();
        assert_eq!([0, 2, 1].map(|token| answer.add(token).text), ["", "E", "ND"]);
        assert_eq!(answer.finish(), None);
        assert_eq!([0, 1].map(|token| answer.add(token).text), ["", ""]);
        assert_eq!(answer.finish(), Some(Finish::Stop));
    }
}
