//! What happens to each field of a request: it is honoured, refused, or ignored and named in the response.

use serde_json::{Map, Value};

use Treatment::{Honoured, Ignored, Refused};

/// What happens to a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Treatment {
    /// It has the effect that OpenAI's or Firebox's documentation promises.
    Honoured,
    /// The request fails, unless the field has the value that means its absence.
    Refused,
    /// It has no effect. The response names it.
    Ignored,
}

/// A field of a request.
#[derive(Debug)]
pub(crate) struct Field {
    pub name: &'static str,
    pub treatment: Treatment,
    /// The fields of an object, or of the objects of a list; empty if its content is read as a whole.
    pub fields: &'static [Field],
    /// What the field does where OpenAI's documentation does not say, or why it is refused. The table of the book has it.
    #[cfg_attr(not(test), expect(dead_code, reason = "only the test that writes the book reads it"))]
    pub remark: &'static str,
    /// The value, as JSON, of an ignored field that asks for nothing.
    neutral: Option<&'static str>,
}

/// An endpoint with the fields of its requests. Those of several lists count together.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub path: &'static str,
    fields: &'static [&'static [Field]],
}

/// Characters of the header that names ignored fields.
const MAX_NAMES_CHARS: usize = 1000;

const fn field(name: &'static str) -> Field {
    Field { name, treatment: Honoured, fields: &[], remark: "", neutral: None }
}

const fn told(name: &'static str, remark: &'static str) -> Field {
    Field { remark, ..field(name) }
}

const fn object(name: &'static str, fields: &'static [Field]) -> Field {
    Field { fields, ..field(name) }
}

const fn refused(name: &'static str, remark: &'static str) -> Field {
    Field { treatment: Refused, remark, ..field(name) }
}

const fn ignored(name: &'static str) -> Field {
    Field { treatment: Ignored, ..field(name) }
}

const fn ignored_unless(name: &'static str, neutral: &'static str) -> Field {
    Field { neutral: Some(neutral), ..ignored(name) }
}

/// Sampling parameters, which all endpoints that generate text have.
const SAMPLING: &[Field] = &[
    field("temperature"),
    told("top_k", "likeliest tokens to sample from; 0 or -1 for all"),
    field("top_p"),
    told("min_p", "least probability, as a share of the likeliest token's"),
    told("typical_p", "share of the typical tokens"),
    told("repetition_penalty", "divides the logits of recent tokens"),
    field("presence_penalty"),
    field("frequency_penalty"),
    field("logit_bias"),
    field("seed"),
    field("stop"),
    told("ignore_eos", "continues after the model's end token"),
    told(
        "loop_guard",
        "ends an answer that only repeats itself; sessions do unless this is false or `ignore_eos` is true",
    ),
    object("speculation", &[told("lookup", "drafts by looking up how the text continued before")]),
];

const FORMAT: &[Field] = &[
    field("type"),
    object("json_schema", &[field("name"), field("strict"), field("schema"), ignored("description")]),
];

/// The output format of chats and completions, and the number of choices.
const CHOICES: &[Field] = &[
    object("response_format", FORMAT),
    told("json_schema", "a JSON schema, as llama.cpp has it"),
    told("grammar", "a grammar in GBNF, as llama.cpp has it"),
    field("n"),
    field("stream"),
    object("stream_options", &[field("include_usage"), ignored("include_obfuscation")]),
];

const TOOLS: &[Field] = &[
    told(
        "tools",
        "functions; with `strict`, arguments always fit, whether the model or the request chose the call",
    ),
    object("tool_choice", &[field("type"), field("name"), object("function", &[field("name")])]),
    field("parallel_tool_calls"),
    told("chat_template_kwargs", "further variables of the chat template"),
    told("add_generation_prompt", "whether the prompt ends where an answer begins"),
];

/// Fields of OpenAI's service that no model sees.
const SERVICE: &[Field] = &[
    ignored("user"),
    ignored("safety_identifier"),
    ignored("prompt_cache_key"),
    ignored("prompt_cache_retention"),
    ignored_unless("service_tier", "\"auto\""),
];

const CHAT: &[Field] = &[
    field("model"),
    told("messages", "all that a message has reaches the chat template"),
    field("max_completion_tokens"),
    field("max_tokens"),
    field("logprobs"),
    field("top_logprobs"),
    told("reasoning_effort", "reaches the chat template, and is refused if that does not use it"),
    refused("functions", "obsolete; use `tools`"),
    refused("function_call", "obsolete; use `tool_choice`"),
    ignored_unless("store", "false"),
    ignored("metadata"),
    ignored("verbosity"),
    ignored("prediction"),
    ignored("modalities"),
    ignored("audio"),
    ignored("web_search_options"),
];

const COMPLETIONS: &[Field] = &[
    field("model"),
    field("prompt"),
    field("max_tokens"),
    field("max_completion_tokens"),
    field("logprobs"),
    refused("echo", "unless false"),
    refused("suffix", "unless empty"),
    refused("best_of", "unless 1"),
];

const RESPONSE_FORMAT: &[Field] =
    &[field("type"), field("name"), field("strict"), field("schema"), ignored("description")];

const RESPONSES: &[Field] = &[
    field("model"),
    told("input", "texts, reasoning, calls and their outputs"),
    field("instructions"),
    field("max_output_tokens"),
    field("top_logprobs"),
    told("include", "`message.output_text.logprobs`; there is nothing to include for the other values"),
    object(
        "reasoning",
        &[told("effort", "as `reasoning_effort` of chats"), ignored("summary"), ignored("generate_summary")],
    ),
    object("text", &[object("format", RESPONSE_FORMAT), ignored("verbosity")]),
    told("metadata", "returned unchanged"),
    field("stream"),
    refused("previous_response_id", "responses are not stored"),
    refused("conversation", "responses are not stored"),
    refused("prompt", "responses are not stored"),
    refused("background", "unless false"),
    refused("max_tokens", "a field of chats; use `max_output_tokens`"),
    refused("max_completion_tokens", "a field of chats; use `max_output_tokens`"),
    refused("response_format", "a field of chats; use `text.format`"),
    refused("json_schema", "a field of chats; use `text.format`"),
    refused("grammar", "a field of chats; use `text.format`"),
    ignored_unless("store", "false"),
    ignored_unless("truncation", "\"disabled\""),
    ignored("max_tool_calls"),
    ignored("stream_options"),
];

const EMBEDDINGS: &[Field] = &[
    field("model"),
    field("input"),
    field("encoding_format"),
    told("dimensions", "as many of the first numbers of every vector, scaled to length one"),
];

const RERANK: &[Field] = &[
    field("model"),
    field("query"),
    object("documents", &[field("text")]),
    field("top_n"),
    field("return_documents"),
];

/// All endpoints whose fields are checked.
pub(crate) const ENDPOINTS: [Endpoint; 6] = [
    Endpoint { path: "/v1/chat/completions", fields: &[CHAT, SAMPLING, CHOICES, TOOLS, SERVICE] },
    Endpoint { path: "/v1/completions", fields: &[COMPLETIONS, SAMPLING, CHOICES, SERVICE] },
    Endpoint { path: "/v1/responses", fields: &[RESPONSES, SAMPLING, TOOLS, SERVICE] },
    Endpoint { path: "/v1/embeddings", fields: &[EMBEDDINGS, SERVICE] },
    Endpoint { path: "/v1/rerank", fields: &[RERANK, SERVICE] },
    Endpoint { path: "/rerank", fields: &[RERANK, SERVICE] },
];

impl Endpoint {
    /// Finds the endpoint of a path.
    pub fn at(path: &str) -> Option<&'static Self> {
        ENDPOINTS.iter().find(|endpoint| endpoint.path == path)
    }

    pub fn fields(&self) -> impl Iterator<Item = &'static Field> + use<> {
        self.fields.iter().copied().flatten()
    }

    /// Returns the names of the fields of a body that have no effect, as a header can have them; `None` if all have one.
    pub fn ignored(&self, body: &Value) -> Option<String> {
        let mut names = IgnoredNames::default();
        if let Value::Object(fields) = body {
            names.add(fields, "", &|name| self.fields().find(|field| field.name == name));
        }
        (!names.0.is_empty()).then_some(names.0)
    }
}

/// Names of ignored fields, separated by commas.
#[derive(Debug, Default)]
struct IgnoredNames(String);

impl IgnoredNames {
    fn add(
        &mut self,
        given: &Map<String, Value>,
        within: &str,
        known: &dyn Fn(&str) -> Option<&'static Field>,
    ) {
        for (name, value) in given {
            // `null` counts as absent.
            if value.is_null() || self.0.len() >= MAX_NAMES_CHARS {
                continue;
            }
            let Some(field) =
                known(name).filter(|field| field.treatment != Ignored || field.is_neutral(value))
            else {
                self.push(within, name);
                continue;
            };
            if !field.fields.is_empty() {
                self.add_within(field, value, &format!("{within}{name}"));
            }
        }
    }

    fn add_within(&mut self, field: &'static Field, value: &Value, name: &str) {
        let known = |name: &str| field.fields.iter().find(|field| field.name == name);
        match value {
            Value::Object(given) => self.add(given, &format!("{name}."), &known),
            Value::Array(values) => {
                let within = format!("{name}[].");
                for given in values.iter().filter_map(Value::as_object) {
                    self.add(given, &within, &known);
                }
            }
            _ => {}
        }
    }

    fn push(&mut self, within: &str, name: &str) {
        // A header has printable ASCII alone, and a comma separates.
        let plain = |letter: char| if letter.is_ascii_graphic() && letter != ',' { letter } else { '?' };
        let name: String = within.chars().chain(name.chars().take(64)).map(plain).collect();
        if self.0.split(", ").any(|known| known == name) {
            return;
        }
        if !self.0.is_empty() {
            self.0.push_str(", ");
        }
        self.0.push_str(&name);
    }
}

impl Field {
    fn is_neutral(&self, value: &Value) -> bool {
        let neutral = self.neutral.and_then(|neutral| serde_json::from_str::<Value>(neutral).ok());
        neutral.is_some_and(|neutral| neutral == *value)
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    /// Returns the rows of fields, and of those within them.
    fn rows(fields: impl Iterator<Item = &'static Field>, within: &str, text: &mut String) {
        for field in fields {
            let treatment = match field.treatment {
                Honoured => "honoured",
                Refused => "refused",
                Ignored => "ignored",
            };
            let remark = match field.neutral {
                Some(neutral) => format!("unless `{neutral}`"),
                None => field.remark.to_owned(),
            };
            writeln!(text, "| `{within}{}` | {treatment} | {remark} |", field.name).unwrap();
            rows(field.fields.iter(), &format!("{within}{}.", field.name), text);
        }
    }

    #[test]
    fn the_table_of_the_book_is_up_to_date() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/book/src/fields.md");
        let written = std::fs::read_to_string(path).unwrap();
        let head = written.split("\n## ").next().unwrap();
        let mut text = head.trim_end().to_owned() + "\n";
        for endpoint in ENDPOINTS.iter().filter(|endpoint| endpoint.path != "/rerank") {
            write!(text, "\n## `{}`\n\n| field | is | |\n|---|---|---|\n", endpoint.path).unwrap();
            rows(endpoint.fields(), "", &mut text);
        }
        text = text.replace(" |  |\n", " | |\n");
        if std::env::var_os("FIREBOX_WRITE_FIELDS").is_some() {
            std::fs::write(path, &text).unwrap();
        }
        let written = std::fs::read_to_string(path).unwrap();
        assert!(written == text, "run this test with FIREBOX_WRITE_FIELDS=1 to write {path}");
    }

    #[test]
    fn a_field_is_listed_once() {
        for endpoint in &ENDPOINTS {
            let mut names: Vec<&str> = endpoint.fields().map(|field| field.name).collect();
            let count = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), count, "{}", endpoint.path);
        }
    }
}
