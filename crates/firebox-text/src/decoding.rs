//! Decoding of a token's spelling to its bytes.

use crate::error::TextError;
use serde_json::Value;

/// The character for a space in SentencePiece vocabularies.
pub(crate) const SPACE_MARK: char = '\u{2581}';

/// The conversion of token spellings to bytes, restricted to what can be done token by token.
///
/// The decoders of `tokenizer.json` operate on a whole list of tokens. Those of language models depend only on one token, on
/// whether it is the first, or on the start of the finished text. Others are rejected.
#[derive(Debug, Clone, Default)]
pub(crate) struct Decoding {
    steps: Vec<Step>,
    /// A leading character to strip from the finished text, and the most occurrences to strip.
    strip_start: Option<(char, usize)>,
    /// Tokens end in a suffix that represents a space, except at the end of the text.
    hold_trailing_space: bool,
}

#[derive(Debug, Clone)]
enum Step {
    ByteLevel,
    ByteFallback,
    Replace { from: String, to: String },
    Metaspace { mark: char, drop_first: bool },
    WordPiece { prefix: String, cleanup: bool },
    WordEnd { suffix: String },
    Strip { content: char, start: usize, stop: usize },
    SpaceBetween,
}

enum Piece {
    Text(String),
    Bytes(Vec<u8>),
}

impl Decoding {
    /// The decoding of byte-level vocabularies.
    pub fn byte_level() -> Self {
        Self { steps: vec![Step::ByteLevel], ..Self::default() }
    }

    /// The decoding of SentencePiece vocabularies. `prefixed` says that encoding adds a space before the text.
    pub fn sentencepiece(prefixed: bool) -> Self {
        Self {
            steps: vec![
                Step::Replace { from: SPACE_MARK.to_string(), to: " ".to_owned() },
                Step::ByteFallback,
            ],
            strip_start: prefixed.then_some((' ', 1)),
            hold_trailing_space: false,
        }
    }

    /// The decoding of WordPiece vocabularies.
    pub fn word_piece() -> Self {
        Self { steps: vec![Step::WordPiece { prefix: "##".to_owned(), cleanup: true }], ..Self::default() }
    }

    /// Parses the `decoder` of a `tokenizer.json`.
    pub fn from_json(decoder: Option<&Value>) -> Result<Self, TextError> {
        let mut decoding = Self::default();
        match decoder {
            None | Some(Value::Null) => decoding.steps.push(Step::SpaceBetween),
            Some(decoder) => decoding.read(decoder, &mut false)?,
        }
        Ok(decoding)
    }

    fn read(&mut self, decoder: &Value, fused: &mut bool) -> Result<(), TextError> {
        let kind = decoder.get("type").and_then(Value::as_str).unwrap_or_default();
        let unsupported = |reason| TextError::UnsupportedDecoder { decoder: kind.to_owned(), reason };
        if *fused && !matches!(kind, "Strip" | "Fuse") {
            return Err(unsupported("it follows `Fuse`, after which only the start of the text may change"));
        }
        match kind {
            "Sequence" => {
                let list = decoder.get("decoders").and_then(Value::as_array);
                let list = list.ok_or_else(|| unsupported("it has no list `decoders`"))?;
                for step in list {
                    if step.get("type").and_then(Value::as_str) == Some("Sequence") {
                        return Err(unsupported("sequences inside sequences are not read"));
                    }
                    self.read(step, fused)?;
                }
            }
            "ByteLevel" => self.steps.push(Step::ByteLevel),
            "ByteFallback" => self.steps.push(Step::ByteFallback),
            "Fuse" => *fused = true,
            "Replace" => {
                let from = decoder.get("pattern").and_then(|pattern| pattern.get("String"));
                let from = from.and_then(Value::as_str).filter(|from| !from.is_empty());
                let from = from.ok_or_else(|| unsupported("only plain strings can be replaced"))?;
                let to = decoder.get("content").and_then(Value::as_str).unwrap_or_default();
                self.steps.push(Step::Replace { from: from.to_owned(), to: to.to_owned() });
            }
            "Metaspace" => {
                let mark = char_field(decoder, "replacement").unwrap_or(SPACE_MARK);
                let prefixed = match decoder.get("prepend_scheme").and_then(Value::as_str) {
                    Some(scheme) => scheme != "never",
                    None => decoder.get("add_prefix_space").and_then(Value::as_bool).unwrap_or(true),
                };
                self.steps.push(Step::Metaspace { mark, drop_first: prefixed });
            }
            "WordPiece" => {
                let prefix = decoder.get("prefix").and_then(Value::as_str).unwrap_or("##").to_owned();
                let cleanup = decoder.get("cleanup").and_then(Value::as_bool).unwrap_or(true);
                self.steps.push(Step::WordPiece { prefix, cleanup });
            }
            "BPEDecoder" => {
                let suffix = decoder.get("suffix").and_then(Value::as_str).unwrap_or("</w>");
                if suffix.is_empty() {
                    return Err(unsupported("its suffix is empty"));
                }
                self.steps.push(Step::WordEnd { suffix: suffix.to_owned() });
                self.hold_trailing_space = true;
            }
            "Strip" => {
                let content = char_field(decoder, "content").unwrap_or(' ');
                let start = usize_field(decoder, "start");
                let stop = usize_field(decoder, "stop");
                match *fused {
                    false => self.steps.push(Step::Strip { content, start, stop }),
                    true if stop > 0 => return Err(unsupported("it strips the end of the text")),
                    true if self.strip_start.is_some() => return Err(unsupported("it stands there twice")),
                    true => self.strip_start = Some((content, start)),
                }
            }
            _ => return Err(unsupported("it is not known")),
        }
        Ok(())
    }

    pub fn strip_start(&self) -> Option<(char, usize)> {
        self.strip_start
    }

    pub fn hold_trailing_space(&self) -> bool {
        self.hold_trailing_space
    }

    /// The bytes of one token. `added` tokens are spelled in plain text.
    pub fn piece(&self, token: &str, added: bool, first: bool) -> Vec<u8> {
        let mut piece = Piece::Text(token.to_owned());
        for step in &self.steps {
            if let Piece::Text(text) = piece {
                piece = step.apply(text, added, first);
            }
        }
        match piece {
            Piece::Text(text) => text.into_bytes(),
            Piece::Bytes(bytes) => bytes,
        }
    }
}

impl Step {
    fn apply(&self, text: String, added: bool, first: bool) -> Piece {
        match self {
            Step::ByteLevel if added => Piece::Text(text),
            Step::ByteLevel => match text.chars().map(byte_level_byte).collect::<Option<Vec<u8>>>() {
                Some(bytes) => Piece::Bytes(bytes),
                None => Piece::Text(text),
            },
            Step::ByteFallback => match byte_token(&text).filter(|_| !added) {
                Some(byte) => Piece::Bytes(vec![byte]),
                None => Piece::Text(text),
            },
            Step::Replace { from, to } => Piece::Text(text.replace(from.as_str(), to)),
            Step::Metaspace { mark, drop_first } if first && *drop_first => {
                Piece::Text(text.replace(*mark, ""))
            }
            Step::Metaspace { mark, .. } => Piece::Text(text.replace(*mark, " ")),
            Step::WordPiece { prefix, cleanup } => {
                let joined = match text.strip_prefix(prefix.as_str()) {
                    _ if first => text,
                    Some(rest) => rest.to_owned(),
                    None => format!(" {text}"),
                };
                Piece::Text(if *cleanup { tidy_punctuation(joined) } else { joined })
            }
            Step::WordEnd { suffix } => Piece::Text(text.replace(suffix.as_str(), " ")),
            Step::Strip { content, start, stop } => {
                let leading = text.chars().take_while(|c| c == content).count().min(*start);
                let rest: String = text.chars().skip(leading).collect();
                let trailing = rest.chars().rev().take_while(|c| c == content).count().min(*stop);
                let keep = rest.chars().count() - trailing;
                Piece::Text(rest.chars().take(keep).collect())
            }
            Step::SpaceBetween if first => Piece::Text(text),
            Step::SpaceBetween => Piece::Text(format!(" {text}")),
        }
    }
}

/// The byte of a token such as `<0x0A>`.
pub(crate) fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

/// The byte that a character of a byte-level vocabulary represents.
///
/// Printable Latin-1 characters represent themselves; the other 68 bytes are mapped, in order, to U+0100 and up.
pub(crate) fn byte_level_byte(character: char) -> Option<u8> {
    match u32::from(character) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => u8::try_from(code).ok(),
        code @ 0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        code @ 0x121..=0x142 => u8::try_from(code - 0x121 + 0x7f).ok(),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// The spacing rules that BERT-style decoders apply to each token.
fn tidy_punctuation(text: String) -> String {
    const RULES: [(&str, &str); 11] = [
        (" .", "."),
        (" ?", "?"),
        (" !", "!"),
        (" ,", ","),
        (" ' ", "'"),
        (" n't", "n't"),
        (" 'm", "'m"),
        (" do not", " don't"),
        (" 's", "'s"),
        (" 've", "'ve"),
        (" 're", "'re"),
    ];
    RULES.iter().fold(text, |text, (from, to)| text.replace(from, to))
}

fn char_field(value: &Value, field: &str) -> Option<char> {
    value.get(field).and_then(Value::as_str).and_then(|text| text.chars().next())
}

fn usize_field(value: &Value, field: &str) -> usize {
    value.get(field).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::{byte_level_byte, byte_token};

    #[test]
    fn byte_level_characters_cover_every_byte_once() {
        let mut bytes: Vec<u8> = ('\0'..'\u{200}').filter_map(byte_level_byte).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(byte_level_byte('\u{120}'), Some(b' '));
        assert_eq!(byte_level_byte('\u{10a}'), Some(b'\n'));
    }

    #[test]
    fn byte_tokens_are_exactly_two_hex_digits() {
        assert_eq!(byte_token("<0x0A>"), Some(10));
        assert_eq!(byte_token("<0xff>"), Some(255));
        assert_eq!(byte_token("<0x+1>"), None);
        assert_eq!(byte_token("<0x1>"), None);
    }
}
