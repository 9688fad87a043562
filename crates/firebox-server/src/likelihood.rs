//! Log-probabilities, in the two forms that OpenAI's API has for them.

use firebox_runtime::LogProbabilities;
use firebox_text::Tokenizer;
use serde_json::{Map, Value, json};

/// What an impossible token has: JSON knows no infinity.
const LEAST: f32 = -9999.0;

fn shown(logprob: f32) -> f32 {
    logprob.max(LEAST)
}

/// A token as text, as far as it is text by itself.
fn spelled(tokenizer: &Tokenizer, token: u32) -> String {
    match tokenizer.token_bytes(token) {
        Some(bytes) if !bytes.is_empty() => String::from_utf8_lossy(bytes).into_owned(),
        _ => tokenizer.id_to_token(token).unwrap_or_default().to_owned(),
    }
}

fn one(tokenizer: &Tokenizer, token: u32, logprob: f32) -> Map<String, Value> {
    let bytes = tokenizer.token_bytes(token).unwrap_or_default();
    let mut fields = Map::new();
    fields.insert("token".into(), spelled(tokenizer, token).into());
    fields.insert("logprob".into(), json!(shown(logprob)));
    fields.insert("bytes".into(), json!(bytes));
    fields
}

/// A token of a chat.
pub(crate) fn of_chat(tokenizer: &Tokenizer, token: u32, found: &LogProbabilities) -> Value {
    let mut fields = one(tokenizer, token, found.token);
    let likeliest =
        found.likeliest.iter().map(|&(token, logprob)| Value::Object(one(tokenizer, token, logprob)));
    fields.insert("top_logprobs".into(), likeliest.collect());
    Value::Object(fields)
}

/// Tokens of a completion, in lists of equal length.
#[derive(Debug, Default)]
pub(crate) struct OfCompletion {
    tokens: Vec<Value>,
    logprobs: Vec<Value>,
    likeliest: Vec<Value>,
    offsets: Vec<Value>,
}

impl OfCompletion {
    /// Goes on by a token, at so many characters of the text.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32, found: &LogProbabilities, offset: usize) {
        self.tokens.push(spelled(tokenizer, token).into());
        self.logprobs.push(json!(shown(found.token)));
        let mut likeliest = Map::new();
        for &(token, logprob) in &found.likeliest {
            // Of tokens that are spelled alike the likeliest comes first.
            likeliest.entry(spelled(tokenizer, token)).or_insert_with(|| json!(shown(logprob)));
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
