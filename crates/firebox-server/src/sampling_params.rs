//! Reads the sampling parameters of requests: length, sampling, stops and output format.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use firebox_runtime::{GenerationConfig, Grammar, SamplerConfig};
use serde_json::Value;

use crate::error::ApiError;
use crate::json_fields::JsonFields;
use crate::served_model::ServedModel;

/// Choices of one request, which limits its share of a queue.
const MAX_CHOICES: u64 = 64;
const MAX_STOPS: usize = 16;
/// Longer bias maps would cover much of a vocabulary.
const MAX_BIASES: usize = 4096;

/// How many choices to generate, and how to return them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ResponseOptions {
    /// Choices for every prompt.
    pub choices: usize,
    pub stream: bool,
    /// True if a stream ends with the token counts.
    pub include_usage: bool,
    /// Whether to draft by lookup; `None` leaves it to the server.
    pub lookup: Option<bool>,
}

impl ResponseOptions {
    pub fn new(fields: &JsonFields<'_>) -> Result<Self, ApiError> {
        let options = fields.object("stream_options")?;
        let usage = options.map(|options| options.boolean("include_usage")).transpose()?.flatten();
        Ok(Self {
            choices: fields.integer("n", 1, MAX_CHOICES)?.unwrap_or(1) as usize,
            stream: fields.boolean("stream")?.unwrap_or(false),
            include_usage: usage.unwrap_or(false),
            lookup: lookup(fields)?,
        })
    }

    /// Rejects more choices than a request may have, or than can run and wait at once.
    pub fn check_count(&self, prompts: usize, at_once: usize) -> Result<(), ApiError> {
        let all = prompts.saturating_mul(self.choices);
        let most = at_once.min(MAX_CHOICES as usize);
        if all <= most {
            return Ok(());
        }
        Err(ApiError::field("n", format!("{all} answers in total exceed {most}; send several requests")))
    }
}

/// Reads `speculation.lookup`: whether to draft by lookup.
pub(crate) fn lookup(fields: &JsonFields<'_>) -> Result<Option<bool>, ApiError> {
    Ok(fields.object("speculation")?.map(|options| options.boolean("lookup")).transpose()?.flatten())
}

/// Reads the settings common to all choices. Defaults are the model maker's recommendations, else OpenAI's.
pub(crate) fn generation_config(
    fields: &JsonFields<'_>,
    served: &ServedModel,
) -> Result<GenerationConfig, ApiError> {
    let max_tokens = match max_tokens(fields, "max_completion_tokens")? {
        Some(most) => Some(most),
        None => max_tokens(fields, "max_tokens")?,
    };
    let stop: Vec<String> = fields.strings("stop")?.into_iter().map(str::to_owned).collect();
    if stop.len() > MAX_STOPS {
        return Err(fields.error("stop", format!("{} texts are more than {MAX_STOPS}", stop.len())));
    }
    if stop.iter().any(String::is_empty) {
        return Err(fields.error("stop", "a stop text is empty"));
    }
    let makers = served.model.checkpoint().text().generation_config.as_ref();
    let mut config = GenerationConfig::new()
        .with_context(served.require_context()?)
        .with_end_tokens(served.model.end_tokens())
        .with_ignore_end(fields.boolean("ignore_eos")?.unwrap_or(false))
        .with_loop_guard(fields.boolean("loop_guard")?.unwrap_or(false));
    config.max_tokens = max_tokens;
    config.stop = stop;
    config.grammar = grammar(fields)?;
    config.sampler = sampler(fields, makers)?;
    Ok(config)
}

/// Reads the maximum length of an answer; `None` means as long as fits.
pub(crate) fn max_tokens(fields: &JsonFields<'_>, field: &str) -> Result<Option<usize>, ApiError> {
    if fields.is_minus_one(field) {
        return Ok(None);
    }
    Ok(fields.integer(field, 1, u64::from(u32::MAX))?.map(|most| most as usize))
}

fn sampler(fields: &JsonFields<'_>, makers: Option<&Value>) -> Result<SamplerConfig, ApiError> {
    let mut config = SamplerConfig::default().with_temperature(1.0).recommended_by(makers);
    let setting = |name, least, most, default| -> Result<f32, ApiError> {
        Ok(fields.number(name, least, most)?.map_or(default, |number| number as f32))
    };
    let top_k = match fields.is_minus_one("top_k") {
        true => Some(0),
        false => fields.integer("top_k", 0, u64::from(u32::MAX))?,
    };
    config.temperature = setting("temperature", 0.0, 100.0, config.temperature)?;
    config.top_k = top_k.map_or(config.top_k, |k| k as usize);
    config.top_p = setting("top_p", 0.0, 1.0, config.top_p)?;
    config.min_p = setting("min_p", 0.0, 1.0, config.min_p)?;
    config.typical_p = setting("typical_p", 0.0, 1.0, config.typical_p)?;
    config.repetition_penalty = setting("repetition_penalty", 0.01, 100.0, config.repetition_penalty)?;
    config.presence_penalty = setting("presence_penalty", -2.0, 2.0, config.presence_penalty)?;
    config.frequency_penalty = setting("frequency_penalty", -2.0, 2.0, config.frequency_penalty)?;
    config.logit_bias = biases(fields)?;
    config.seed = seed(fields)?;
    Ok(config)
}

fn seed(fields: &JsonFields<'_>) -> Result<u64, ApiError> {
    match fields.get("seed") {
        None => Ok(RandomState::new().build_hasher().finish()),
        Some(value) => match (value.as_u64(), value.as_i64()) {
            (Some(seed), _) => Ok(seed),
            // Negative seeds are valid.
            (None, Some(seed)) => Ok(seed as u64),
            (None, None) => Err(fields.error("seed", "expected a whole number")),
        },
    }
}

fn biases(fields: &JsonFields<'_>) -> Result<HashMap<u32, f32>, ApiError> {
    let Some(biases) = fields.object("logit_bias")? else { return Ok(HashMap::new()) };
    if biases.map().len() > MAX_BIASES {
        return Err(fields.error("logit_bias", format!("more than {MAX_BIASES} tokens")));
    }
    let of = |token: &String| {
        let id =
            token.parse().map_err(|_| fields.error("logit_bias", format!("{token:?} is not a token id")))?;
        let bias = biases.number(token, -100.0, 100.0)?.unwrap_or(0.0);
        Ok((id, bias as f32))
    };
    biases.map().keys().map(of).collect()
}

/// Returns the field that gives a grammar: OpenAI's `response_format`, or one of llama.cpp's.
pub(crate) fn grammar_field(fields: &JsonFields<'_>) -> &'static str {
    let asks = |field: &&str| fields.get(field).is_some_and(|form| form.as_str() != Some(""));
    ["grammar", "json_schema"].into_iter().find(asks).unwrap_or("response_format")
}

fn grammar(fields: &JsonFields<'_>) -> Result<Option<Grammar>, ApiError> {
    let gbnf = fields.string("grammar")?.filter(|text| !text.is_empty());
    let all = [
        ("response_format", response_format(fields)?),
        ("json_schema", schema(fields, "json_schema")?),
        ("grammar", gbnf.map(|text| Grammar::Gbnf(text.to_owned()))),
    ];
    let mut asked = all.into_iter().filter_map(|(field, grammar)| Some((field, grammar?)));
    match (asked.next(), asked.next()) {
        (_, Some((field, _))) => Err(fields.error(field, "only one output format may be given")),
        (asked, None) => Ok(asked.map(|(_, grammar)| grammar)),
    }
}

fn response_format(fields: &JsonFields<'_>) -> Result<Option<Grammar>, ApiError> {
    let Some(format) = fields.object("response_format")? else { return Ok(None) };
    if format.string("type")? != Some("json_schema") {
        return grammar_of_format(&format, &format);
    }
    let about = format.object("json_schema")?;
    grammar_of_format(&format, &about.ok_or_else(|| format.error("json_schema", "is missing"))?)
}

/// Reads an output format; `about` is the object with its schema.
pub(crate) fn grammar_of_format(
    format: &JsonFields<'_>,
    about: &JsonFields<'_>,
) -> Result<Option<Grammar>, ApiError> {
    match format.required_string("type")? {
        "text" => Ok(None),
        "json_object" => Ok(Some(Grammar::JsonObject)),
        "json_schema" => {
            about.string("name")?;
            about.boolean("strict")?;
            schema(about, "schema")?.map(Some).ok_or_else(|| about.error("schema", "is missing"))
        }
        other => Err(format.error("type", format!("{other:?} is none of text, json_object and json_schema"))),
    }
}

fn schema(fields: &JsonFields<'_>, field: &str) -> Result<Option<Grammar>, ApiError> {
    match fields.get(field) {
        Some(schema @ (Value::Object(_) | Value::Bool(true))) => {
            Ok(Some(Grammar::JsonSchema(schema.clone())))
        }
        Some(_) => Err(fields.error(field, "expected an object")),
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn sampled(body: Value, makers: Option<Value>) -> Result<SamplerConfig, ApiError> {
        sampler(&JsonFields::new(&body).unwrap(), makers.as_ref())
    }

    #[test]
    fn a_request_overrides_the_makers_recommendations() {
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
    fn minus_one_means_unlimited() {
        let body = json!({"max_tokens": -1, "top_k": -1});
        assert_eq!(max_tokens(&JsonFields::new(&body).unwrap(), "max_tokens").unwrap(), None);
        assert_eq!(sampled(body, Some(json!({"top_k": 20}))).unwrap().top_k, 0);
    }

    #[test]
    fn grammars_of_llama_cpp_are_accepted() {
        let asked = |body: Value| {
            let fields = JsonFields::new(&body).unwrap();
            (grammar(&fields).unwrap(), grammar_field(&fields))
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
    fn errors_name_the_field() {
        let named = |body: Value, name: &str| {
            let fields = JsonFields::new(&body).unwrap();
            let error = sampler(&fields, None).err().or_else(|| grammar(&fields).err());
            let error = error.or_else(|| ResponseOptions::new(&fields).err()).unwrap().value();
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
        named(json!({"speculation": {"lookup": "yes"}}), "speculation.lookup");
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
