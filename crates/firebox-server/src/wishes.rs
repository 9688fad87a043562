//! What a request wishes of an answer: how long, how tokens are chosen, what form it has.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use firebox_runtime::{GenerationConfig, Grammar, SamplerConfig};
use serde_json::Value;

use crate::error::ApiError;
use crate::fields::Fields;
use crate::served::Served;

/// Answers to one request, and with them what one client can take of a queue.
const MOST_CHOICES: u64 = 64;
const MOST_STOPS: usize = 16;
/// A bias that a vocabulary would need is shorter.
const MOST_BIASES: usize = 4096;

/// How many answers are wished, and how they come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Delivery {
    /// Answers to every prompt.
    pub each: usize,
    pub stream: bool,
    /// Whether a stream ends with how many tokens it took.
    pub usage: bool,
}

impl Delivery {
    pub fn of(fields: &Fields<'_>) -> Result<Self, ApiError> {
        let options = fields.object("stream_options")?;
        let usage = options.map(|options| options.truth("include_usage")).transpose()?.flatten();
        Ok(Self {
            each: fields.whole("n", 1, MOST_CHOICES)?.unwrap_or(1) as usize,
            stream: fields.truth("stream")?.unwrap_or(false),
            usage: usage.unwrap_or(false),
        })
    }

    /// Refuses more answers than one request may have.
    pub fn expect_few(&self, prompts: usize) -> Result<(), ApiError> {
        let all = prompts.saturating_mul(self.each);
        if all as u64 <= MOST_CHOICES {
            return Ok(());
        }
        Err(ApiError::field(
            "n",
            format!("{all} answers in all are more than {MOST_CHOICES}; ask in several requests"),
        ))
    }
}

/// What every answer to a request has in common. What the request leaves open is as the model's makers recommend, and
/// else as the model has it, with nothing left out.
pub(crate) fn config(fields: &Fields<'_>, served: &Served) -> Result<GenerationConfig, ApiError> {
    let most = |field| fields.whole(field, 1, u64::from(u32::MAX));
    let most_tokens = match most("max_completion_tokens")? {
        Some(most) => Some(most),
        None => most("max_tokens")?,
    };
    let stop: Vec<String> = fields.texts("stop")?.into_iter().map(str::to_owned).collect();
    if stop.len() > MOST_STOPS {
        return Err(fields.wrong("stop", format!("{} texts are more than {MOST_STOPS}", stop.len())));
    }
    if stop.iter().any(String::is_empty) {
        return Err(fields.wrong("stop", "an empty text would stop everything"));
    }
    Ok(GenerationConfig {
        max_tokens: most_tokens.map(|most| most as usize),
        context: Some(served.expect_context()?),
        stop,
        end_tokens: served.model.end_tokens(),
        ignore_end: fields.truth("ignore_eos")?.unwrap_or(false),
        continues: false,
        grammar: grammar(fields)?,
        logprobs: None,
        sampler: sampler(fields, served.model.checkpoint().text().generation_config.as_ref())?,
    })
}

fn sampler(fields: &Fields<'_>, makers: Option<&Value>) -> Result<SamplerConfig, ApiError> {
    let unasked = SamplerConfig { temperature: 1.0, ..SamplerConfig::default() }.recommended_by(makers);
    let wished = |name, least, most, unasked| -> Result<f32, ApiError> {
        Ok(fields.number(name, least, most)?.map_or(unasked, |number| number as f32))
    };
    let top_k = fields.whole("top_k", 0, u64::from(u32::MAX))?;
    Ok(SamplerConfig {
        temperature: wished("temperature", 0.0, 100.0, unasked.temperature)?,
        top_k: top_k.map_or(unasked.top_k, |k| k as usize),
        top_p: wished("top_p", 0.0, 1.0, unasked.top_p)?,
        min_p: wished("min_p", 0.0, 1.0, unasked.min_p)?,
        typical_p: wished("typical_p", 0.0, 1.0, unasked.typical_p)?,
        repetition_penalty: wished("repetition_penalty", 0.01, 100.0, unasked.repetition_penalty)?,
        presence_penalty: wished("presence_penalty", -2.0, 2.0, unasked.presence_penalty)?,
        frequency_penalty: wished("frequency_penalty", -2.0, 2.0, unasked.frequency_penalty)?,
        penalty_window: unasked.penalty_window,
        logit_bias: biases(fields)?,
        seed: seed(fields)?,
    })
}

fn seed(fields: &Fields<'_>) -> Result<u64, ApiError> {
    match fields.get("seed") {
        None => Ok(RandomState::new().build_hasher().finish()),
        Some(value) => match (value.as_u64(), value.as_i64()) {
            (Some(seed), _) => Ok(seed),
            // Negative ones are seeds as good as any.
            (None, Some(seed)) => Ok(seed as u64),
            (None, None) => Err(fields.wrong("seed", "expected a whole number")),
        },
    }
}

fn biases(fields: &Fields<'_>) -> Result<HashMap<u32, f32>, ApiError> {
    let Some(biases) = fields.object("logit_bias")? else { return Ok(HashMap::new()) };
    if biases.map().len() > MOST_BIASES {
        return Err(fields.wrong("logit_bias", format!("more than {MOST_BIASES} tokens")));
    }
    let of = |token: &String| {
        let id =
            token.parse().map_err(|_| fields.wrong("logit_bias", format!("{token:?} is no token id")))?;
        let bias = biases.number(token, -100.0, 100.0)?.unwrap_or(0.0);
        Ok((id, bias as f32))
    };
    biases.map().keys().map(of).collect()
}

fn grammar(fields: &Fields<'_>) -> Result<Option<Grammar>, ApiError> {
    let Some(format) = fields.object("response_format")? else { return Ok(None) };
    if format.text("type")? != Some("json_schema") {
        return form(&format, &format);
    }
    let about = format.object("json_schema")?;
    form(&format, &about.ok_or_else(|| format.wrong("json_schema", "is missing"))?)
}

/// The form that an answer is to have; `about` is where its schema is.
pub(crate) fn form(format: &Fields<'_>, about: &Fields<'_>) -> Result<Option<Grammar>, ApiError> {
    match format.needed_text("type")? {
        "text" => Ok(None),
        "json_object" => Ok(Some(Grammar::JsonObject)),
        "json_schema" => {
            about.text("name")?;
            about.truth("strict")?;
            match about.get("schema") {
                Some(schema @ (Value::Object(_) | Value::Bool(true))) => {
                    Ok(Some(Grammar::JsonSchema(schema.clone())))
                }
                Some(_) => Err(about.wrong("schema", "expected an object")),
                None => Err(about.wrong("schema", "is missing")),
            }
        }
        other => Err(format.wrong("type", format!("{other:?} is none of text, json_object and json_schema"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn sampled(body: Value, makers: Option<Value>) -> Result<SamplerConfig, ApiError> {
        sampler(&Fields::of(&body).unwrap(), makers.as_ref())
    }

    #[test]
    fn a_request_outranks_the_makers_and_they_outrank_the_model() {
        let makers = json!({"temperature": 0.6, "top_k": 20});
        let config = sampled(json!({"top_k": 5, "seed": -3}), Some(makers)).unwrap();
        assert_eq!((config.temperature, config.top_k, config.top_p), (0.6, 5, 1.0));
        assert_eq!(config.seed, (-3i64) as u64);
        assert_eq!(sampled(json!({"temperature": null}), None).unwrap().temperature, 1.0);
        let greedy = sampled(json!({}), Some(json!({"do_sample": false, "temperature": 0.6}))).unwrap();
        assert_eq!(greedy.temperature, 0.0);
        assert_eq!(sampled(json!({"logit_bias": {"7": -100}}), None).unwrap().logit_bias[&7], -100.0);
    }

    #[test]
    fn what_is_wrong_is_told_by_its_name() {
        let named = |body: Value, name: &str| {
            let fields = Fields::of(&body).unwrap();
            let error = sampler(&fields, None).err().or_else(|| grammar(&fields).err());
            let error = error.or_else(|| Delivery::of(&fields).err()).unwrap().value();
            assert_eq!(error["error"]["param"], name, "{body}");
            assert!(error["error"]["message"].as_str().unwrap().starts_with(name), "{error}");
        };
        named(json!({"temperature": "hot"}), "temperature");
        named(json!({"temperature": -1}), "temperature");
        named(json!({"top_p": 1.5}), "top_p");
        named(json!({"seed": 1.5}), "seed");
        named(json!({"logit_bias": {"x": 1}}), "logit_bias");
        named(json!({"logit_bias": {"1": "x"}}), "logit_bias.1");
        named(json!({"logit_bias": []}), "logit_bias");
        named(json!({"n": 0}), "n");
        named(json!({"stream": 1}), "stream");
        named(json!({"stream_options": {"include_usage": 1}}), "stream_options.include_usage");
        named(json!({"response_format": {"type": "xml"}}), "response_format.type");
        named(json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema");
        named(
            json!({"response_format": {"type": "json_schema", "json_schema": {}}}),
            "response_format.json_schema.schema",
        );
    }
}
