//! Keeping what people write from posing as control tokens.

use crate::error::TextError;
use crate::tokenizer::Tokenizer;
use serde_json::Value;
use std::collections::{HashMap, HashSet};

/// Stand around a spelling that is to be read as plain text, from the message it is found in to the rendered prompt.
/// Private-use characters: no vocabulary spells control tokens with them, and any in the messages are taken out first.
pub(crate) const OPEN: char = '\u{E0F0}';
pub(crate) const CLOSE: char = '\u{E0F1}';

/// The spellings that must not be taken for tokens when they come from outside.
#[derive(Debug, Default)]
pub(crate) struct ControlTokens {
    /// By first character.
    spellings: HashMap<char, Spellings>,
}

/// Some vocabularies have thousands that begin with the same character: they are looked up, not gone through.
#[derive(Debug, Default)]
struct Spellings {
    all: HashSet<String>,
    /// How many bytes they have, the most first.
    lengths: Vec<usize>,
}

impl ControlTokens {
    pub fn new<'a>(tokens: impl Iterator<Item = &'a str>) -> Self {
        let mut spellings: HashMap<char, Spellings> = HashMap::new();
        for token in tokens {
            if let Some(first) = token.chars().next() {
                spellings.entry(first).or_default().all.insert(token.to_owned());
            }
        }
        for Spellings { all, lengths } in spellings.values_mut() {
            lengths.extend(all.iter().map(String::len).collect::<HashSet<_>>());
            lengths.sort_unstable_by(|one, other| other.cmp(one));
        }
        Self { spellings }
    }

    /// Marks every control token in the strings of a value, names of fields included: none that a template looks up is
    /// spelled like one.
    pub fn mark(&self, value: &mut Value) {
        match value {
            Value::String(text) => *text = self.marked(text),
            Value::Array(items) => items.iter_mut().for_each(|item| self.mark(item)),
            Value::Object(fields) => {
                let marked = std::mem::take(fields).into_iter().map(|(name, mut field)| {
                    self.mark(&mut field);
                    (self.marked(&name), field)
                });
                *fields = marked.collect();
            }
            _ => {}
        }
    }

    /// The same for a message. Templates write what it says in parts one behind the other, and so no part may end in what
    /// the next one makes a control token.
    pub fn mark_message(&self, message: &mut Value) {
        self.mark(message);
        let parts = message.get_mut("content").and_then(Value::as_array_mut);
        let Some((_, parts)) = parts.and_then(|parts| parts.split_last_mut()) else { return };
        for part in parts {
            if let Some(Value::String(text)) = part.get_mut("text") {
                // Some templates trim it.
                let end = text.trim_end().len();
                if self.ends_in_a_beginning(&text[..end]) {
                    text.insert(end, CLOSE);
                }
            }
        }
    }

    fn ends_in_a_beginning(&self, text: &str) -> bool {
        let longest = self.spellings.values().filter_map(|spellings| spellings.lengths.first()).max();
        let most = longest.copied().unwrap_or_default();
        let tails = text.char_indices().rev().take_while(|(at, _)| text.len() - at < most);
        tails.map(|(at, first)| (&text[at..], first)).any(|(tail, first)| {
            let spellings = self.spellings.get(&first);
            spellings.is_some_and(|spellings| spellings.all.iter().any(|token| token.starts_with(tail)))
        })
    }

    pub fn marked(&self, text: &str) -> String {
        let plain = text.replace([OPEN, CLOSE], "");
        let mut marked = String::with_capacity(plain.len());
        let mut rest = plain.as_str();
        while let Some(first) = rest.chars().next() {
            if let Some(token) = self.at_start(rest) {
                marked.push(OPEN);
                marked.push_str(token);
                marked.push(CLOSE);
                rest = &rest[token.len()..];
            } else {
                marked.push(first);
                rest = &rest[first.len_utf8()..];
            }
        }
        marked
    }

    fn at_start(&self, text: &str) -> Option<&str> {
        let Spellings { all, lengths } = self.spellings.get(&text.chars().next()?)?;
        lengths.iter().find_map(|length| all.get(text.get(..*length)?)).map(String::as_str)
    }

    /// Ids of a prompt rendered from marked messages, or of a part of one that others have begun.
    pub fn encode(&self, tokenizer: &Tokenizer, prompt: &str, begun: bool) -> Result<Vec<u32>, TextError> {
        let mut ids = Vec::new();
        let mut rest = prompt;
        let mut begun = begun;
        while !rest.is_empty() {
            let end = rest.find([OPEN, CLOSE]).unwrap_or(rest.len());
            let (plain, at_mark) = rest.split_at(end);
            if !plain.is_empty() {
                ids.extend(piece(tokenizer, plain, begun, false)?);
                begun = true;
            }
            let Some(mark) = at_mark.chars().next() else { break };
            rest = &at_mark[mark.len_utf8()..];
            // A template that cuts strings can leave a mark on its own. It still keeps its two sides apart.
            let token =
                self.at_start(rest).filter(|token| mark == OPEN && rest[token.len()..].starts_with(CLOSE));
            if let Some(token) = token {
                ids.extend(piece(tokenizer, token, begun, true)?);
                begun = true;
                rest = &rest[token.len() + CLOSE.len_utf8()..];
            }
        }
        Ok(ids)
    }
}

/// Ids of one piece of a prompt. SentencePiece puts a space before every text, so a piece that is not the first is
/// encoded after a line break, and the ids of the line break are taken off again.
fn piece(tokenizer: &Tokenizer, text: &str, begun: bool, literal: bool) -> Result<Vec<u32>, TextError> {
    let encode = |text: &str| match literal {
        true => tokenizer.encode_literal(text, false),
        false => tokenizer.encode(text, false),
    };
    if begun {
        let line_break = encode("\n")?;
        let mut ids = encode(&format!("\n{text}"))?;
        if !line_break.is_empty() && ids.starts_with(&line_break) {
            return Ok(ids.split_off(line_break.len()));
        }
    }
    encode(text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::ControlTokens;

    #[test]
    fn longest_spelling_is_marked_and_old_marks_are_dropped() {
        let control = ControlTokens::new(["<|a|>", "<|a|>b", "[X]"].into_iter());
        assert_eq!(control.marked("1<|a|>b<|a|>[X"), "1\u{e0f0}<|a|>b\u{e0f1}\u{e0f0}<|a|>\u{e0f1}[X");
        assert_eq!(control.marked("\u{e0f0}[X]\u{e0f1}é"), "\u{e0f0}[X]\u{e0f1}é");
        assert_eq!(control.marked("[\u{e0f1}X]"), "\u{e0f0}[X]\u{e0f1}");
    }

    #[test]
    fn parts_and_names_make_no_control_tokens() {
        let control = ControlTokens::new(["<|a|>", "[X]"].into_iter());
        let part = |text: &str| json!({"type": "text", "text": text});
        let mut message = json!({"content": [part("1<|a"), part("|> [ \n"), part("X] <")]});
        control.mark_message(&mut message);
        let expected = [part("1<|a\u{e0f1}"), part("|> [\u{e0f1} \n"), part("X] <")];
        assert_eq!(message, json!({"content": expected}));
        let mut schema = json!({"properties": {"x<|a|>": {}, "y": {}}});
        control.mark(&mut schema);
        assert_eq!(schema, json!({"properties": {"x\u{e0f0}<|a|>\u{e0f1}": {}, "y": {}}}));
    }
}
