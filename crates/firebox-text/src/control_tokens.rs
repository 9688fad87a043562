//! Protection against control tokens spelled out in untrusted text.

use serde_json::Value;
use std::collections::{BTreeSet, HashMap};
use std::ops::{Bound, Range};

/// Marks around a spelling that is to be encoded as plain text, from the message up to the rendered prompt. They are private-use
/// characters: no vocabulary spells control tokens with them, and those in messages are removed first.
const OPEN: char = '\u{E0F0}';
const CLOSE: char = '\u{E0F1}';

/// Returns whether a character is such a mark. Filters that escape characters must leave marks unchanged.
pub(crate) fn is_mark(character: char) -> bool {
    matches!(character, OPEN | CLOSE)
}

/// The spellings that must not become control tokens when they occur in untrusted text.
#[derive(Debug, Default)]
pub(crate) struct ControlTokens {
    by_first: HashMap<char, Family>,
    /// Bytes of the longest spelling.
    longest: usize,
}

/// Spellings with a common first character. Gemma has thousands.
#[derive(Debug, Default)]
struct Family {
    spellings: BTreeSet<String>,
    /// Their lengths in bytes, longest first.
    lengths: Vec<usize>,
}

impl ControlTokens {
    pub fn new<'a>(tokens: impl Iterator<Item = &'a str>) -> Self {
        let mut by_first: HashMap<char, Family> = HashMap::new();
        for token in tokens {
            if let Some(first) = token.chars().next() {
                by_first.entry(first).or_default().spellings.insert(token.to_owned());
            }
        }
        for family in by_first.values_mut() {
            let lengths: BTreeSet<usize> = family.spellings.iter().map(String::len).collect();
            family.lengths = lengths.into_iter().rev().collect();
        }
        let longest = by_first.values().filter_map(|family| family.lengths.first()).max();
        Self { longest: longest.copied().unwrap_or(0), by_first }
    }

    /// Marks every control token in the strings of a value, and in field names that are not plain identifiers; templates look up
    /// plain ones.
    pub fn mark(&self, value: &mut Value) {
        match value {
            Value::String(text) => *text = self.marked(text),
            Value::Array(items) => items.iter_mut().for_each(|item| self.mark(item)),
            Value::Object(fields) => {
                let marked = std::mem::take(fields).into_iter().map(|(name, mut field)| {
                    self.mark(&mut field);
                    (if is_plain(&name) { name } else { self.marked(&name) }, field)
                });
                *fields = marked.collect();
            }
            _ => {}
        }
    }

    /// Marks a message. Templates join the texts of its parts, so the end of one part must not form a token with the next either.
    pub fn mark_message(&self, message: &mut Value) {
        self.mark(message);
        let parts = message.get_mut("content").and_then(Value::as_array_mut);
        let texts = parts.into_iter().flatten().filter_map(|part| match part.get_mut("text") {
            Some(Value::String(text)) => Some(text),
            _ => None,
        });
        let mut texts: Vec<&mut String> = texts.collect();
        texts.pop();
        texts.into_iter().for_each(|text| self.close(text));
    }

    /// Inserts a mark behind a possible beginning of a token at the end of a text, before trailing white space, which templates
    /// strip.
    fn close(&self, text: &mut String) {
        let ends = [text.trim_end().len(), text.len()];
        if let Some(end) = ends.into_iter().find(|end| self.ends_within(&text[..*end])) {
            text.insert(end, CLOSE);
        }
    }

    /// Returns whether a text ends with the beginning of a token.
    fn ends_within(&self, text: &str) -> bool {
        let mut places = text.char_indices().rev().take_while(|(at, _)| text.len() - at < self.longest);
        places.any(|(at, first)| {
            let end = &text[at..];
            let next = |family: &Family| {
                let mut behind = family.spellings.range::<str, _>((Bound::Included(end), Bound::Unbounded));
                behind.next().is_some_and(|token| token.starts_with(end))
            };
            self.by_first.get(&first).is_some_and(next)
        })
    }

    pub fn marked(&self, text: &str) -> String {
        let plain = text.replace([OPEN, CLOSE], "");
        let mut marked = String::with_capacity(plain.len());
        let mut end = 0;
        for place in self.places(&plain) {
            marked.push_str(&plain[end..place.start]);
            marked.push(OPEN);
            marked.push_str(&plain[place.clone()]);
            marked.push(CLOSE);
            end = place.end;
        }
        marked.push_str(&plain[end..]);
        marked
    }

    /// The ranges of tokens in a text.
    pub fn places(&self, text: &str) -> impl Iterator<Item = Range<usize>> {
        let mut at = 0;
        std::iter::from_fn(move || {
            while let Some(first) = text[at..].chars().next() {
                let start = at;
                if let Some(token) = self.at_start(&text[start..]) {
                    at += token.len();
                    return Some(start..at);
                }
                at += first.len_utf8();
            }
            None
        })
    }

    /// The longest token that a text begins with.
    fn at_start<'t>(&self, text: &'t str) -> Option<&'t str> {
        let family = self.by_first.get(&text.chars().next()?)?;
        let mut candidates = family.lengths.iter().filter_map(|length| text.get(..*length));
        candidates.find(|candidate| family.spellings.contains(*candidate))
    }

    /// Splits a prompt that was rendered from marked messages into the texts between marks. Each is paired with whether
    /// it is the spelling of a control token that is to be encoded as plain text.
    pub fn pieces<'t>(&self, prompt: &'t str) -> impl Iterator<Item = (&'t str, bool)> {
        let mut rest = prompt;
        let mut marked = None;
        std::iter::from_fn(move || {
            loop {
                if let Some(token) = marked.take() {
                    return Some((token, true));
                }
                let end = rest.find([OPEN, CLOSE]).unwrap_or(rest.len());
                let (plain, at_mark) = rest.split_at(end);
                let mark = at_mark.chars().next();
                rest = &at_mark[mark.map_or(0, char::len_utf8)..];
                // A template that slices strings can leave a single mark, which still separates its two sides.
                marked = self
                    .at_start(rest)
                    .filter(|token| mark == Some(OPEN) && rest[token.len()..].starts_with(CLOSE));
                if let Some(token) = marked {
                    rest = &rest[token.len() + CLOSE.len_utf8()..];
                }
                if !plain.is_empty() {
                    return Some((plain, false));
                }
                mark?;
            }
        })
    }
}

fn is_plain(name: &str) -> bool {
    name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

#[cfg(test)]
mod tests {
    use super::ControlTokens;
    use proptest::prelude::*;
    use serde_json::json;

    proptest! {
        #[test]
        fn tokens_are_found_as_by_trying_all(
            tokens in proptest::collection::vec("[<é][a>é]{0,3}", 0..12),
            text in "[<a>é ]{0,8}",
        ) {
            let control = ControlTokens::new(tokens.iter().map(String::as_str));
            let starting = tokens.iter().filter(|token| text.starts_with(*token)).max_by_key(|token| token.len());
            prop_assert_eq!(control.at_start(&text), starting.map(String::as_str));
            let is_suffix = |part: &&str| !part.is_empty() && text.ends_with(part);
            let within = tokens.iter().any(|token| {
                let mut parts = token.char_indices().map(|(end, _)| &token[..end]);
                parts.any(|part| is_suffix(&part))
            });
            // A complete token at the end is marked before this check.
            prop_assume!(!tokens.iter().any(|token| text.ends_with(token.as_str())));
            prop_assert_eq!(control.ends_within(&text), within);
        }
    }

    #[test]
    fn parts_and_names_are_marked() {
        let control = ControlTokens::new(["<|a|>", "tool", " x"].into_iter());
        let mut message = json!({"tool": "tool", "<|a|>é": {"no <": 1}, "content": [
            {"text": "b<|a \n"}, {"image": "<"}, {"text": "c "}, {"text": "<|"}, {"text": "<"},
        ]});
        control.mark_message(&mut message);
        let expected = json!({"tool": "\u{e0f0}tool\u{e0f1}", "\u{e0f0}<|a|>\u{e0f1}é": {"no <": 1}, "content": [
            {"text": "b<|a\u{e0f1} \n"}, {"image": "<"}, {"text": "c \u{e0f1}"}, {"text": "<|\u{e0f1}"}, {"text": "<"},
        ]});
        assert_eq!(message, expected);
    }

    #[test]
    fn longest_spelling_is_marked_and_old_marks_are_dropped() {
        let control = ControlTokens::new(["<|a|>", "<|a|>b", "[X]"].into_iter());
        assert_eq!(control.marked("1<|a|>b<|a|>[X"), "1\u{e0f0}<|a|>b\u{e0f1}\u{e0f0}<|a|>\u{e0f1}[X");
        assert_eq!(control.marked("\u{e0f0}[X]\u{e0f1}é"), "\u{e0f0}[X]\u{e0f1}é");
        assert_eq!(control.marked("[\u{e0f1}X]"), "\u{e0f0}[X]\u{e0f1}");
    }
}
