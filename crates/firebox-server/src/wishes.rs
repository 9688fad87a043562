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

    /// Refuses more answers than one request may have, and more than can ever run and wait at once.
    pub fn expect_few(&self, prompts: usize, at_once: usize) -> Result<(), ApiError> {
        let all = prompts.saturating_mul(self.each);
        let most = at_once.min(MOST_CHOICES as usize);
        if all <= most {
            return Ok(());
        }
        Err(ApiError::field(
            "n",
            format!("{all} answers in all are more than {most}; ask in several requests"),
        ))
    }
}

/// What every answer to a request has in common. What the request leaves open is as the model's makers recommend, and
/// else as the model has it, with nothing left out.
pub(crate) fn config(fields: &Fields<'_>, served: &Served) -> Result<GenerationConfig, ApiError> {
    let max_tokens = match most_tokens(fields, "max_completion_tokens")? {
        Some(most) => Some(most),
        None => most_tokens(fields, "max_tokens")?,
    };
    let stop: Vec<String> = fields.texts("stop")?.into_iter().map(str::to_owned).collect();
    if stop.len() > MOST_STOPS {
        return Err(fields.wrong("stop", format!("{} texts are more than {MOST_STOPS}", stop.len())));
    }
    if stop.iter().any(String::is_empty) {
        return Err(fields.wrong("stop", "an empty text would stop everything"));
    }
    Ok(GenerationConfig {
        max_tokens,
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

/// How long an answer may get by a field; as long as fits, where that says nothing.
pub(crate) fn most_tokens(fields: &Fields<'_>, field: &str) -> Result<Option<usize>, ApiError> {
    if fields.is_unlimited(field) {
        return Ok(None);
    }
    Ok(fields.whole(field, 1, u64::from(u32::MAX))?.map(|most| most as usize))
}

fn sampler(fields: &Fields<'_>, makers: Option<&Value>) -> Result<SamplerConfig, ApiError> {
    let unasked = SamplerConfig { temperature: 1.0, ..SamplerConfig::default() }.recommended_by(makers);
    let wished = |name, least, most, unasked| -> Result<f32, ApiError> {
        Ok(fields.number(name, least, most)?.map_or(unasked, |number| number as f32))
    };
    let top_k = match fields.is_unlimited("top_k") {
        true => Some(0),
        false => fields.whole("top_k", 0, u64::from(u32::MAX))?,
    };
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

/// The field that asks for a form of the answer: OpenAI's, or one of those that clients of llama.cpp have.
pub(crate) fn form_field(fields: &Fields<'_>) -> &'static str {
    let asks = |field: &&str| fields.get(field).is_some_and(|form| form.as_str() != Some(""));
    ["grammar", "json_schema"].into_iter().find(asks).unwrap_or("response_format")
}

fn grammar(fields: &Fields<'_>) -> Result<Option<Grammar>, ApiError> {
    let gbnf = fields.text("grammar")?.filter(|text| !text.is_empty());
    let all = [
        ("response_format", response_format(fields)?),
        ("json_schema", schema(fields, "json_schema")?),
        ("grammar", gbnf.map(|text| Grammar::Gbnf(text.to_owned()))),
    ];
    let mut asked = all.into_iter().filter_map(|(field, grammar)| Some((field, grammar?)));
    match (asked.next(), asked.next()) {
        (_, Some((field, _))) => Err(fields.wrong(field, "an answer has one form; leave out the other")),
        (asked, None) => Ok(asked.map(|(_, grammar)| grammar)),
    }
}

fn response_format(fields: &Fields<'_>) -> Result<Option<Grammar>, ApiError> {
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
            schema(about, "schema")?.map(Some).ok_or_else(|| about.wrong("schema", "is missing"))
        }
        other => Err(format.wrong("type", format!("{other:?} is none of text, json_object and json_schema"))),
    }
}

fn schema(fields: &Fields<'_>, field: &str) -> Result<Option<Grammar>, ApiError> {
    match fields.get(field) {
        Some(schema @ (Value::Object(_) | Value::Bool(true))) => {
            Ok(Some(Grammar::JsonSchema(schema.clone())))
        }
        Some(_) => Err(fields.wrong(field, "expected an object")),
        None => Ok(None),
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
    fn minus_one_is_no_limit() {
        let body = json!({"max_tokens": -1, "top_k": -1});
        assert_eq!(most_tokens(&Fields::of(&body).unwrap(), "max_tokens").unwrap(), None);
        assert_eq!(sampled(body, Some(json!({"top_k": 20}))).unwrap().top_k, 0);
    }

    #[test]
    fn a_form_may_be_asked_for_as_of_llama_cpp() {
        let asked = |body: Value| {
            let fields = Fields::of(&body).unwrap();
            (grammar(&fields).unwrap(), form_field(&fields))
        };
        let gbnf = "root ::= \"yes\"";
        assert_eq!(asked(json!({"grammar": gbnf})), (Some(Grammar::Gbnf(gbnf.into())), "grammar"));
        let schema = Grammar::JsonSchema(json!({"type": "null"}));
        assert_eq!(
            asked(json!({"json_schema": {"type": "null"}, "grammar": ""})),
            (Some(schema), "json_schema")
        );
        assert_eq!(asked(json!({"response_format": {"type": "text"}})), (None, "response_format"));
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
        named(json!({"top_k": -2}), "top_k");
        named(json!({"json_schema": 1}), "json_schema");
        named(json!({"grammar": "root ::= \"a\"", "response_format": {"type": "json_object"}}), "grammar");
        named(json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema");
        named(
            json!({"response_format": {"type": "json_schema", "json_schema": {}}}),
            "response_format.json_schema.schema",
        );
    }
}
