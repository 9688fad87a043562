//! Separates thoughts and tool calls from the text of an answer.

use firebox_runtime::Piece;
use firebox_text::{AnswerPart, AnswerReader, Tokenizer};
use serde_json::{Value, json};

/// Length of call ids that templates such as Mistral's require.
const SHORT_ID_CHARS: usize = 9;

/// How to read an answer. By default, all of it is text.
#[derive(Debug, Clone, Default)]
pub(crate) struct AnswerFormat {
    /// Takes out thoughts and calls.
    pub reader: AnswerReader,
    /// The text that opens a call, if the prompt ended with it.
    pub opening: Option<String>,
    /// True if an answer may have several calls.
    pub parallel: bool,
    /// True if the model's template requires short ids of calls.
    pub has_short_ids: bool,
}

/// A part of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum OutputPart {
    Thought(String),
    Text(String),
    /// The start of a call, without arguments.
    CallStart(ToolCall),
    /// The next piece of the open call's arguments.
    Arguments {
        /// Index of the call in the answer.
        index: usize,
        piece: String,
    },
    /// The complete call.
    CallEnd(ToolCall),
}

/// A tool call.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ToolCall {
    /// Index in the answer.
    pub index: usize,
    pub id: String,
    pub name: String,
    /// The arguments as JSON, empty until the call ends.
    pub arguments: String,
}

impl ToolCall {
    pub fn value(&self) -> Value {
        let function = json!({ "name": self.name, "arguments": self.arguments });
        json!({ "id": self.id, "type": "function", "function": function })
    }

    /// Formats the start of a call for streams.
    pub fn start_value(&self) -> Value {
        let mut value = json!({ "index": self.index });
        if let (Value::Object(fields), Value::Object(call)) = (&mut value, self.value()) {
            fields.extend(call);
        }
        value
    }
}

/// Splits an answer into thoughts, text and tool calls.
#[derive(Debug, Default)]
pub(crate) struct AnswerParser {
    format: AnswerFormat,
    thought_tokens: usize,
    /// Calls that have started.
    call_count: usize,
    /// The open call, if it is reported.
    open_call: Option<ToolCall>,
    /// Parts from the opening in the prompt.
    prefix_parts: Vec<OutputPart>,
}

impl AnswerParser {
    pub fn new(format: &AnswerFormat) -> Self {
        let mut parser = Self { format: format.clone(), ..Self::default() };
        // The prompt may contain the whole start of a call.
        if let Some(opening) = &format.opening {
            let parts = parser.format.reader.push(opening);
            parser.prefix_parts = parser.convert(parts);
        }
        parser
    }

    /// Returns the number of calls.
    pub fn calls(&self) -> usize {
        self.call_count
    }

    /// Returns the number of tokens that thoughts and their marks took.
    pub fn thought_tokens(&self) -> usize {
        self.thought_tokens
    }

    /// Adds a piece of the answer. Control tokens that mark thoughts and calls are absent from its text.
    pub fn push(&mut self, piece: &Piece, tokenizer: Option<&Tokenizer>) -> Vec<OutputPart> {
        let reader = &mut self.format.reader;
        let was_thinking = reader.is_thinking();
        let answer_parts = match tokenizer {
            Some(tokenizer) => reader.push_token(&piece.text, piece.token, tokenizer),
            None => reader.push(&piece.text),
        };
        if piece.token.is_some() && (was_thinking || reader.is_thinking()) {
            self.thought_tokens += 1;
        }
        let mut parts = std::mem::take(&mut self.prefix_parts);
        parts.extend(self.convert(answer_parts));
        parts
    }

    /// Ends the answer.
    pub fn finish(&mut self) -> Vec<OutputPart> {
        let answer_parts = self.format.reader.finish();
        let mut parts = std::mem::take(&mut self.prefix_parts);
        parts.extend(self.convert(answer_parts));
        parts
    }

    fn convert(&mut self, answer_parts: Vec<AnswerPart>) -> Vec<OutputPart> {
        let mut parts = Vec::new();
        for part in answer_parts {
            match part {
                AnswerPart::Thought(thought) => parts.push(OutputPart::Thought(thought)),
                AnswerPart::Text(text) => parts.push(OutputPart::Text(text)),
                AnswerPart::CallStart(_) if self.call_count > 0 && !self.format.parallel => {}
                AnswerPart::CallStart(name) => {
                    let id = match self.format.has_short_ids {
                        true => crate::ids::random_id()[..SHORT_ID_CHARS].to_owned(),
                        false => format!("call_{}", crate::ids::random_id()),
                    };
                    let call = ToolCall { index: self.call_count, id, name, arguments: String::new() };
                    self.call_count += 1;
                    parts.push(OutputPart::CallStart(call.clone()));
                    self.open_call = Some(call);
                }
                AnswerPart::Arguments(piece) => {
                    let Some(call) = &self.open_call else { continue };
                    parts.push(OutputPart::Arguments { index: call.index, piece });
                }
                AnswerPart::Call(whole) => {
                    let Some(mut call) = self.open_call.take() else { continue };
                    call.arguments = whole.arguments.as_str().unwrap_or_default().to_owned();
                    parts.push(OutputPart::CallEnd(call));
                }
            }
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use firebox_text::{
        CallReader, CallSyntax, GgufVocabulary, TextAssets, ThoughtMarks, ThoughtReader, TokenizerSource,
    };

    use super::*;

    fn format(syntax: CallSyntax, tools: &[Value]) -> AnswerFormat {
        let reader = AnswerReader::new(None, Some(CallReader::new(syntax, tools)));
        AnswerFormat { reader, parallel: true, ..AnswerFormat::default() }
    }

    fn hear(syntax: CallSyntax, opening: Option<&str>, parallel: bool, pieces: &[&str]) -> Vec<OutputPart> {
        let tools = vec![json!({"type": "function", "function": {"name": "noop"}})];
        let opening = opening.map(str::to_owned);
        let mut parser = AnswerParser::new(&AnswerFormat { opening, parallel, ..format(syntax, &tools) });
        let mut parts = Vec::new();
        for text in pieces {
            let piece = Piece { token: None, text: (*text).to_owned(), logprobs: None };
            parts.extend(parser.push(&piece, None));
        }
        parts.extend(parser.finish());
        parts
    }

    #[test]
    fn a_call_continues_the_opening_of_the_prompt() {
        for syntax in [CallSyntax::Separated, CallSyntax::SeparatedFence, CallSyntax::Channels] {
            let parts = hear(syntax, Some(&syntax.opening(Some("noop"))), true, &["{", "\"a\": 1}"]);
            let OutputPart::CallStart(prefix_parts) = &parts[0] else { panic!("{parts:?}") };
            assert_eq!(
                (prefix_parts.index, prefix_parts.name.as_str(), prefix_parts.arguments.as_str()),
                (0, "noop", "")
            );
            let Some(OutputPart::CallEnd(ended)) = parts.last() else { panic!("{parts:?}") };
            assert_eq!((&ended.id, ended.arguments.as_str()), (&prefix_parts.id, "{\"a\": 1}"));
        }
    }

    #[test]
    fn parallel_calls_can_be_disabled() {
        let call = "<tool_call>{\"name\": \"noop\", \"arguments\": {}}</tool_call>";
        for (parallel, expected) in [(true, 2), (false, 1)] {
            let parts = hear(CallSyntax::Tagged, None, parallel, &[call, call]);
            assert_eq!(parts.len(), expected * 3, "{parts:?}");
        }
    }

    #[test]
    fn text_precedes_the_control_token() {
        let vocabulary = GgufVocabulary {
            model: "gpt2".into(),
            tokens: ["E", "<tool_call>"].map(String::from).to_vec(),
            token_types: vec![1, 3],
            ..GgufVocabulary::default()
        };
        let source = Some(TokenizerSource::Gguf(vocabulary));
        let assets = TextAssets { tokenizer: source, ..TextAssets::default() };
        let tokenizer = Tokenizer::new(&assets, &Value::Null).unwrap();
        let mut parser = AnswerParser::new(&format(CallSyntax::Tagged, &[]));
        let piece = Piece { token: Some(1), text: "E".into(), logprobs: None };
        assert_eq!(parser.push(&piece, Some(&tokenizer)), [OutputPart::Text("E".into())]);
    }

    #[test]
    fn tokens_of_thoughts_are_counted() {
        let thoughts = ThoughtReader::new(ThoughtMarks::ALL[0], false);
        let reader = AnswerReader::new(Some(thoughts), None);
        let mut parser = AnswerParser::new(&AnswerFormat { reader, ..AnswerFormat::default() });
        let mut parts = Vec::new();
        for (token, text) in ["<think>", "a", " ", "b", "</think>", "\n", "c"].into_iter().enumerate() {
            let piece = Piece { token: u32::try_from(token).ok(), text: text.into(), logprobs: None };
            parts.extend(parser.push(&piece, None));
        }
        let [thought, more, text] = ["a", " b", "c"].map(String::from);
        assert_eq!(parts, [OutputPart::Thought(thought), OutputPart::Thought(more), OutputPart::Text(text)]);
        assert_eq!(parser.thought_tokens(), 5);
    }
}
