//! Settings of a sampler.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::RuntimeError;

/// Settings of a [`Sampler`](crate::Sampler). Fields may be added: outside this crate it is built with its
/// methods.
///
/// The steps run in the order of the fields: penalties and biases change logits, the temperature divides them, and each
/// filter narrows the candidates that the one before it left.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct SamplerConfig {
    /// Divides positive and multiplies negative logits of tokens in the penalty window; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted for each occurrence of a token in the penalty window; 0 is off.
    pub frequency_penalty: f32,
    /// Subtracted from tokens in the penalty window; 0 is off.
    pub presence_penalty: f32,
    /// The number of last tokens that penalties look at.
    pub penalty_window: usize,
    /// Added to the logits of single tokens.
    pub logit_bias: HashMap<u32, f32>,
    /// Divides the logits; 0 takes the likeliest token and ignores all filters.
    pub temperature: f32,
    /// Keeps this many of the likeliest tokens; 0 is off.
    pub top_k: usize,
    /// Keeps the tokens whose surprise is closest to the expected one, up to this much probability; 1 is off.
    pub typical_p: f32,
    /// Keeps the likeliest tokens up to this much probability; 1 is off.
    pub top_p: f32,
    /// Keeps tokens at least this many times as likely as the likeliest; 0 is off.
    pub min_p: f32,
    /// Seed of the random sequence: equal seeds, settings and logits give equal tokens.
    pub seed: u64,
}

impl Default for SamplerConfig {
    fn default() -> Self {
        Self {
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            penalty_window: 64,
            logit_bias: HashMap::new(),
            temperature: 0.0,
            top_k: 0,
            typical_p: 1.0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
        }
    }
}

impl SamplerConfig {
    /// Always the likeliest token.
    pub fn greedy() -> Self {
        Self::default()
    }

    /// Sets [`repetition_penalty`](Self::repetition_penalty).
    #[must_use]
    pub fn with_repetition_penalty(mut self, penalty: f32) -> Self {
        self.repetition_penalty = penalty;
        self
    }

    /// Sets [`frequency_penalty`](Self::frequency_penalty).
    #[must_use]
    pub fn with_frequency_penalty(mut self, penalty: f32) -> Self {
        self.frequency_penalty = penalty;
        self
    }

    /// Sets [`presence_penalty`](Self::presence_penalty).
    #[must_use]
    pub fn with_presence_penalty(mut self, penalty: f32) -> Self {
        self.presence_penalty = penalty;
        self
    }

    /// Sets [`penalty_window`](Self::penalty_window).
    #[must_use]
    pub fn with_penalty_window(mut self, tokens: usize) -> Self {
        self.penalty_window = tokens;
        self
    }

    /// Sets [`temperature`](Self::temperature).
    #[must_use]
    pub fn with_temperature(mut self, temperature: f32) -> Self {
        self.temperature = temperature;
        self
    }

    /// Sets [`top_k`](Self::top_k).
    #[must_use]
    pub fn with_top_k(mut self, tokens: usize) -> Self {
        self.top_k = tokens;
        self
    }

    /// Sets [`typical_p`](Self::typical_p).
    #[must_use]
    pub fn with_typical_p(mut self, share: f32) -> Self {
        self.typical_p = share;
        self
    }

    /// Sets [`top_p`](Self::top_p).
    #[must_use]
    pub fn with_top_p(mut self, share: f32) -> Self {
        self.top_p = share;
        self
    }

    /// Sets [`min_p`](Self::min_p).
    #[must_use]
    pub fn with_min_p(mut self, share: f32) -> Self {
        self.min_p = share;
        self
    }

    /// Sets [`seed`](Self::seed).
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Adds `bias` to the logit of a token.
    #[must_use]
    pub fn with_logit_bias(mut self, token: u32, bias: f32) -> Self {
        self.logit_bias.insert(token, bias);
        self
    }

    /// Takes over the settings that a model's `generation_config.json` recommends, if there is one.
    #[must_use]
    pub fn recommended_by(mut self, makers: Option<&Value>) -> Self {
        let field = |name: &str| makers.and_then(|file| file.get(name));
        for (name, setting) in [
            ("temperature", &mut self.temperature),
            ("top_p", &mut self.top_p),
            ("min_p", &mut self.min_p),
            ("typical_p", &mut self.typical_p),
            ("repetition_penalty", &mut self.repetition_penalty),
        ] {
            *setting = field(name).and_then(Value::as_f64).map_or(*setting, |number| number as f32);
        }
        self.top_k = field("top_k").and_then(Value::as_u64).map_or(self.top_k, |k| k as usize);
        if field("do_sample").and_then(Value::as_bool) == Some(false) {
            self.temperature = 0.0;
        }
        self
    }

    /// Refuses values that have no meaning.
    pub(super) fn check(&self) -> Result<(), RuntimeError> {
        let within = |setting, value: f32, ok: bool, reason| {
            if ok { Ok(()) } else { Err(RuntimeError::Setting { setting, value: value.to_string(), reason }) }
        };
        let share = |value: f32| (0.0..=1.0).contains(&value);
        within(
            "temperature",
            self.temperature,
            self.temperature >= 0.0 && self.temperature.is_finite(),
            "should be 0 or more",
        )?;
        within("top_p", self.top_p, share(self.top_p), "should be between 0 and 1")?;
        within("typical_p", self.typical_p, share(self.typical_p), "should be between 0 and 1")?;
        within("min_p", self.min_p, share(self.min_p), "should be between 0 and 1")?;
        let penalty = self.repetition_penalty;
        within("repetition_penalty", penalty, penalty > 0.0 && penalty.is_finite(), "should be above 0")?;
        within(
            "frequency_penalty",
            self.frequency_penalty,
            self.frequency_penalty.is_finite(),
            "should be finite",
        )?;
        within(
            "presence_penalty",
            self.presence_penalty,
            self.presence_penalty.is_finite(),
            "should be finite",
        )
    }
}
