//! Calls with arguments in a notation of their own: Python's, as LFM2 writes it, and that of Gemma 4.

use serde_json::{Map, Value};

use super::tool_name::is_valid_tool_name;
use crate::message::FunctionCall;

/// Gemma 4's quotes.
const QUOTE: &str = "<|\"|>";
/// Values within values.
const MAX_DEPTH: usize = 64;

/// Parses a list of Python's calls: `[NAME(KEY=VALUE, …), …]`, or one without brackets.
pub(super) fn python_calls(text: &str) -> Option<Vec<FunctionCall>> {
    let mut reader = Literals { rest: text.trim() };
    let listed = reader.skip("[");
    let mut calls = Vec::new();
    while !(reader.rest.is_empty() || listed && reader.rest.starts_with(']')) {
        let name = reader.until('(')?;
        let mut arguments = Map::new();
        while !reader.skip(")") {
            let key = reader.until('=')?;
            arguments.insert(key.to_owned(), reader.value(0)?);
            if !reader.skip(",") && !reader.rest.starts_with(')') {
                return None;
            }
        }
        calls.push(call(name, arguments)?);
        if !reader.skip(",") && !reader.rest.is_empty() && !reader.rest.starts_with(']') {
            return None;
        }
    }
    let is_whole = !listed || reader.skip("]");
    (is_whole && reader.rest.is_empty() && !calls.is_empty()).then_some(calls)
}

/// Parses a call of Gemma 4: `call:NAME{KEY:VALUE,…}`.
pub(super) fn gemma_call(text: &str) -> Option<FunctionCall> {
    let mut reader = Literals { rest: text.trim().strip_prefix("call:")? };
    let braces = reader.rest.find('{')?;
    let (name, rest) = reader.rest.split_at(braces);
    reader.rest = rest;
    match reader.value(0)? {
        Value::Object(arguments) if reader.rest.is_empty() => call(name, arguments),
        _ => None,
    }
}

/// Parses a value of Python.
pub(super) fn python_value(text: &str) -> Option<Value> {
    let mut reader = Literals { rest: text.trim() };
    reader.value(0).filter(|_| reader.rest.is_empty())
}

fn call(name: &str, arguments: Map<String, Value>) -> Option<FunctionCall> {
    is_valid_tool_name(name.trim()).then(|| FunctionCall::new(name.trim(), arguments))
}

/// Reads values from the beginning of a text. No white space precedes it.
struct Literals<'t> {
    rest: &'t str,
}

impl<'t> Literals<'t> {
    /// Skips a mark and the white space behind it. Returns whether the mark was there.
    fn skip(&mut self, mark: &str) -> bool {
        let Some(rest) = self.rest.strip_prefix(mark) else { return false };
        self.rest = rest.trim_start();
        true
    }

    /// Takes the text up to a character, which is skipped.
    fn until(&mut self, end: char) -> Option<&'t str> {
        let (text, rest) = self.rest.split_once(end)?;
        self.rest = rest.trim_start();
        Some(text.trim())
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > MAX_DEPTH {
            return None;
        }
        if self.rest.starts_with(['"', '\'']) || self.rest.starts_with(QUOTE) {
            return self.text().map(Value::String);
        }
        if self.skip("[") {
            let mut values = Vec::new();
            while !self.skip("]") {
                values.push(self.value(depth + 1)?);
                if !self.skip(",") && !self.rest.starts_with(']') {
                    return None;
                }
            }
            return Some(Value::Array(values));
        }
        if self.skip("{") {
            let mut values = Map::new();
            while !self.skip("}") {
                let is_quoted = self.rest.starts_with(['"', '\'']) || self.rest.starts_with(QUOTE);
                let key = if is_quoted {
                    let key = self.text()?;
                    self.skip(":").then_some(key)?
                } else {
                    self.until(':')?.to_owned()
                };
                values.insert(key, self.value(depth + 1)?);
                if !self.skip(",") && !self.rest.starts_with('}') {
                    return None;
                }
            }
            return Some(Value::Object(values));
        }
        let end = self.rest.find([',', ')', ']', '}']).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        match word.trim() {
            "True" => Some(true.into()),
            "False" => Some(false.into()),
            "None" => Some(Value::Null),
            word => serde_json::from_str(word).ok(),
        }
    }

    fn text(&mut self) -> Option<String> {
        if let Some(rest) = self.rest.strip_prefix(QUOTE) {
            let (text, rest) = rest.split_once(QUOTE)?;
            self.rest = rest.trim_start();
            return Some(text.to_owned());
        }
        let quote = self.rest.chars().next()?;
        let mut letters = self.rest.char_indices().skip(1);
        let mut text = String::new();
        while let Some((at, letter)) = letters.next() {
            match letter {
                '\\' => match letters.next()?.1 {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'r' => text.push('\r'),
                    'u' => {
                        let digits: String = letters.by_ref().take(4).map(|(_, digit)| digit).collect();
                        text.push(char::from_u32(u32::from_str_radix(&digits, 16).ok()?)?);
                    }
                    other => text.push(other),
                },
                _ if letter == quote => {
                    self.rest = self.rest[at + 1..].trim_start();
                    return Some(text);
                }
                _ => text.push(letter),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(call: &FunctionCall) -> Value {
        json!([call.name, serde_json::from_str::<Value>(call.arguments.as_str().unwrap()).unwrap()])
    }

    #[test]
    fn values_of_python_are_read() {
        let text =
            r#"[f(a='it\'s', b="é\n\u00e9", c=-1.5, d=[1, 'x', None], e={"k": {'l': True}, 2: []}), g()]"#;
        let calls: Vec<Value> = python_calls(text).unwrap().iter().map(read).collect();
        let arguments = json!({"a": "it's", "b": "é\né", "c": -1.5, "d": [1, "x", null], "e": {"k": {"l": true}, "2": []}});
        assert_eq!(calls, [json!(["f", arguments]), json!(["g", {}])]);
        assert_eq!(python_calls("f(a=1)").unwrap().len(), 1);
        for text in
            ["", "[]", "[f(a=1", "[f(1)]", "[f(a=1)] b", "f(a=x)", "two words(a=1)", "f(a='b)", "f(a=1 b=2)"]
        {
            assert!(python_calls(text).is_none(), "{text}");
        }
        assert!(python_value(&"[".repeat(100_000)).is_none());
    }

    #[test]
    fn values_of_gemma_are_read() {
        let text = r#"call:f{a:<|"|>x, "y" {z}<|"|>,b:true,c:[<|"|>1<|"|>,2],d:{e:null,f:{}}}"#;
        let arguments = json!({"a": "x, \"y\" {z}", "b": true, "c": ["1", 2], "d": {"e": null, "f": {}}});
        assert_eq!(read(&gemma_call(text).unwrap()), json!(["f", arguments]));
        for text in ["call:f", "f{}", "call:f{a}", "call:f{a:<|\"|>x}", "call:f{} b", "call:two words{}"] {
            assert!(gemma_call(text).is_none(), "{text}");
        }
    }
}
