//! Log-probabilities in the two formats of OpenAI's API.

use firebox_runtime::LogProbabilities;
use firebox_text::Tokenizer;
use serde_json::{Map, Value, json};

/// Reported for impossible tokens: JSON has no infinity.
const MIN_LOGPROB: f32 = -9999.0;

fn finite(logprob: f32) -> f32 {
    logprob.max(MIN_LOGPROB)
}

/// Returns a token's text, lossy where it is no text by itself.
fn token_text(tokenizer: &Tokenizer, token: u32) -> String {
    match tokenizer.token_bytes(token) {
        Some(bytes) if !bytes.is_empty() => String::from_utf8_lossy(bytes).into_owned(),
        _ => tokenizer.id_to_token(token).unwrap_or_default().to_owned(),
    }
}

fn token_fields(tokenizer: &Tokenizer, token: u32, logprob: f32) -> Map<String, Value> {
    let bytes = tokenizer.token_bytes(token).unwrap_or_default();
    let mut fields = Map::new();
    fields.insert("token".into(), token_text(tokenizer, token).into());
    fields.insert("logprob".into(), json!(finite(logprob)));
    fields.insert("bytes".into(), json!(bytes));
    fields
}

/// Formats a token of a chat completion.
pub(crate) fn chat_logprob(tokenizer: &Tokenizer, token: u32, found: &LogProbabilities) -> Value {
    let mut fields = token_fields(tokenizer, token, found.token);
    let likeliest = found
        .likeliest
        .iter()
        .map(|&(token, logprob)| Value::Object(token_fields(tokenizer, token, logprob)));
    fields.insert("top_logprobs".into(), likeliest.collect());
    Value::Object(fields)
}

/// Tokens of a text completion, in lists of equal length.
#[derive(Debug, Default)]
pub(crate) struct CompletionLogprobs {
    tokens: Vec<Value>,
    logprobs: Vec<Value>,
    likeliest: Vec<Value>,
    offsets: Vec<Value>,
}

impl CompletionLogprobs {
    /// Appends a token that starts at `offset` characters of the text.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32, found: &LogProbabilities, offset: usize) {
        self.tokens.push(token_text(tokenizer, token).into());
        self.logprobs.push(json!(finite(found.token)));
        let mut likeliest = Map::new();
        for &(token, logprob) in &found.likeliest {
            // Keep the likeliest of tokens with the same text.
            likeliest.entry(token_text(tokenizer, token)).or_insert_with(|| json!(finite(logprob)));
        }
        self.likeliest.push(Value::Object(likeliest));
        self.offsets.push(offset.into());
    }

    pub fn value(self) -> Value {
        json!({
            "tokens": self.tokens,
            "token_logprobs": self.logprobs,
            "top_logprobs": self.likeliest,
            "text_offset": self.offsets,
        })
    }
}
