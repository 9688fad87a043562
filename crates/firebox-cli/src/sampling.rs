//! The sampling options: those of the command line, else those that the model recommends, else common defaults.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use clap::Args;
use firebox_runtime::SamplerConfig;
use firebox_text::Tokenizer;
use serde_json::Value;

use crate::outcome::usage;

/// The defaults of llama.cpp, which people's prompts and expectations are tuned to.
const TEMPERATURE: f32 = 0.8;
const TOP_K: usize = 40;
const TOP_P: f32 = 0.95;
const MIN_P: f32 = 0.05;

/// Options of sampling. What is left out comes from generation_config.json.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Sampling (defaults: generation_config.json, else those of llama.cpp)")]
pub struct SamplingArgs {
    /// Temperature; 0 always takes the likeliest token [default: 0.8]
    #[arg(long, value_name = "T", visible_alias = "temperature", env = "FIREBOX_TEMP")]
    pub temp: Option<f32>,
    /// Keep this many of the likeliest tokens; 0 is off [default: 40]
    #[arg(long, value_name = "K", env = "FIREBOX_TOP_K")]
    pub top_k: Option<usize>,
    /// Keep the likeliest tokens up to this much probability; 1 is off [default: 0.95]
    #[arg(long, value_name = "P", env = "FIREBOX_TOP_P")]
    pub top_p: Option<f32>,
    /// Keep tokens at least this many times as likely as the likeliest; 0 is off [default: 0.05]
    #[arg(long, value_name = "P", env = "FIREBOX_MIN_P")]
    pub min_p: Option<f32>,
    /// Keep tokens of typical surprise up to this much probability; 1 is off [default: 1]
    #[arg(long, value_name = "P", visible_alias = "typical-p", env = "FIREBOX_TYPICAL")]
    pub typical: Option<f32>,
    /// Divide the logits of recent tokens; 1 is off [default: 1]
    #[arg(long, value_name = "X", visible_alias = "repetition-penalty", env = "FIREBOX_REPEAT_PENALTY")]
    pub repeat_penalty: Option<f32>,
    /// How many tokens count as recent [default: 64]
    #[arg(long, value_name = "N", env = "FIREBOX_REPEAT_LAST_N")]
    pub repeat_last_n: Option<usize>,
    /// Subtract from the logits of recent tokens; 0 is off [default: 0]
    #[arg(long, value_name = "X", env = "FIREBOX_PRESENCE_PENALTY", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// Subtract from the logits of recent tokens, for each time they occur; 0 is off [default: 0]
    #[arg(long, value_name = "X", env = "FIREBOX_FREQUENCY_PENALTY", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// Add to the logit of a token, given by id or as the vocabulary spells it; -inf bans it
    #[arg(long, value_name = "TOKEN=BIAS")]
    pub logit_bias: Vec<String>,
    /// The same seed gives the same text [default: random]
    #[arg(short, long, value_name = "N", env = "FIREBOX_SEED")]
    pub seed: Option<u64>,
}

impl SamplingArgs {
    /// Returns the configuration of the sampler.
    pub fn config(
        &self,
        recommended: Option<&Value>,
        tokenizer: Option<&Tokenizer>,
    ) -> anyhow::Result<SamplerConfig> {
        let usual = SamplerConfig::default()
            .with_temperature(TEMPERATURE)
            .with_top_k(TOP_K)
            .with_top_p(TOP_P)
            .with_min_p(MIN_P);
        let mut config = usual.recommended_by(recommended);
        config.temperature = self.temp.unwrap_or(config.temperature);
        config.top_k = self.top_k.unwrap_or(config.top_k);
        config.top_p = self.top_p.unwrap_or(config.top_p);
        config.min_p = self.min_p.unwrap_or(config.min_p);
        config.typical_p = self.typical.unwrap_or(config.typical_p);
        config.repetition_penalty = self.repeat_penalty.unwrap_or(config.repetition_penalty);
        config.penalty_window = self.repeat_last_n.unwrap_or(config.penalty_window);
        config.presence_penalty = self.presence_penalty.unwrap_or(config.presence_penalty);
        config.frequency_penalty = self.frequency_penalty.unwrap_or(config.frequency_penalty);
        config.logit_bias = self.biases(tokenizer)?;
        config.seed = self.seed.unwrap_or_else(random_seed);
        Ok(config)
    }

    fn biases(&self, tokenizer: Option<&Tokenizer>) -> anyhow::Result<HashMap<u32, f32>> {
        self.logit_bias
            .iter()
            .map(|given| {
                let (token, bias) = given
                    .rsplit_once('=')
                    .ok_or_else(|| usage(format!("--logit-bias {given}: write TOKEN=BIAS, as in 42=-1.5")))?;
                let id = match token.parse() {
                    Ok(id) => Some(id),
                    Err(_) => tokenizer.and_then(|tokenizer| tokenizer.token_to_id(token)),
                };
                let id = id.ok_or_else(|| {
                    let reason = "is not a token; `firebox tokenize` shows those of a text";
                    usage(format!("--logit-bias {given}: {token:?} {reason}"))
                })?;
                let bias: f32 = bias
                    .parse()
                    .map_err(|_| usage(format!("--logit-bias {given}: {bias:?} is no number")))?;
                if bias.is_nan() {
                    return Err(usage(format!("--logit-bias {given}: the bias should be a number, or -inf")));
                }
                Ok((id, bias))
            })
            .collect()
    }
}

/// Small enough to survive any JSON reader, so that a run can be repeated from its report.
fn random_seed() -> u64 {
    // The standard library's hash keys are the random numbers that need no dependency.
    RandomState::new().build_hasher().finish() & u64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_command_line_outranks_the_makers_and_they_outrank_the_defaults() {
        let makers = json!({"do_sample": true, "temperature": 0.6, "top_k": 20});
        let args = SamplingArgs { top_k: Some(5), ..SamplingArgs::default() };
        let config = args.config(Some(&makers), None).unwrap();
        assert_eq!((config.temperature, config.top_k, config.top_p), (0.6, 5, TOP_P));
        let config = SamplingArgs::default().config(None, None).unwrap();
        assert_eq!((config.temperature, config.top_k, config.min_p), (TEMPERATURE, TOP_K, MIN_P));
    }

    #[test]
    fn makers_who_do_not_sample_get_the_likeliest_token() {
        let makers = json!({"do_sample": false, "temperature": 0.6});
        assert_eq!(SamplingArgs::default().config(Some(&makers), None).unwrap().temperature, 0.0);
    }

    #[test]
    fn biases_are_read_or_refused() {
        let biases = |given: &str| {
            SamplingArgs { logit_bias: vec![given.into()], ..SamplingArgs::default() }.biases(None)
        };
        assert_eq!(biases("7=-inf").unwrap()[&7], f32::NEG_INFINITY);
        assert_eq!(biases("7=1.5").unwrap()[&7], 1.5);
        for bad in ["7", "7=", "x=1", "7=nan", "-1=2"] {
            assert!(biases(bad).is_err(), "{bad}");
        }
    }
}
