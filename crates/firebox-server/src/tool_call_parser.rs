//! Separates tool calls from the text of an answer.

use firebox_runtime::Piece;
use firebox_text::{AnswerPart, CallReader, CallSyntax, Tokenizer};
use serde_json::{Value, json};

/// Length of call ids that templates such as Mistral's require.
const SHORT_ID_CHARS: usize = 9;

/// How to recognize tool calls in an answer.
#[derive(Debug, Clone)]
pub(crate) struct ToolCallConfig {
    pub syntax: CallSyntax,
    /// The tools offered to the model.
    pub tools: Vec<Value>,
    /// The text that opens a call, if the prompt ended with it.
    pub opening: Option<String>,
    /// True if an answer may have several calls.
    pub parallel: bool,
}

/// A part of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum OutputPart {
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

/// Splits an answer into text and tool calls. Without tools, all of it is text.
#[derive(Debug, Default)]
pub(crate) struct ToolCallParser {
    calls: Option<(CallReader, ToolCallConfig)>,
    /// Calls that have started.
    call_count: usize,
    /// The open call, if it is reported.
    open_call: Option<ToolCall>,
    /// Parts from the opening in the prompt.
    prefix_parts: Vec<OutputPart>,
}

impl ToolCallParser {
    pub fn new(tool_calls: Option<&ToolCallConfig>) -> Self {
        let calls = tool_calls.map(|tool_calls| {
            let mut reader = CallReader::new(tool_calls.syntax, &tool_calls.tools);
            // The prompt may contain the whole start of a call.
            let prefix_parts = tool_calls.opening.as_deref().map(|opening| reader.push(opening));
            ((reader, tool_calls.clone()), prefix_parts.unwrap_or_default())
        });
        let (calls, prefix_parts) = calls.unzip();
        let mut parser = Self { calls, ..Self::default() };
        parser.prefix_parts = parser.convert(prefix_parts.unwrap_or_default());
        parser
    }

    /// Returns the number of calls.
    pub fn calls(&self) -> usize {
        self.call_count
    }

    /// Adds a piece of the answer. Control tokens that open calls are absent from its text.
    pub fn push(&mut self, piece: &Piece, tokenizer: Option<&Tokenizer>) -> Vec<OutputPart> {
        let Some((reader, tool_calls)) = &mut self.calls else {
            return text_part(&piece.text);
        };
        // The text precedes the control token.
        let mut answer_parts = reader.push(&piece.text);
        if let (Some(token), Some(tokenizer)) = (piece.token, tokenizer)
            && tokenizer.is_special(token)
            && let Some(name) = tokenizer.id_to_token(token)
            && tool_calls.syntax.control_tokens().contains(&name)
        {
            answer_parts.extend(reader.push(name));
        }
        let mut parts = std::mem::take(&mut self.prefix_parts);
        parts.extend(self.convert(answer_parts));
        parts
    }

    /// Ends the answer.
    pub fn finish(&mut self) -> Vec<OutputPart> {
        let answer_parts = self.calls.as_mut().map(|(reader, _)| reader.finish()).unwrap_or_default();
        let mut parts = std::mem::take(&mut self.prefix_parts);
        parts.extend(self.convert(answer_parts));
        parts
    }

    fn convert(&mut self, answer_parts: Vec<AnswerPart>) -> Vec<OutputPart> {
        let mut parts = Vec::new();
        let Some((_, tool_calls)) = &self.calls else { return parts };
        for part in answer_parts {
            match part {
                AnswerPart::Text(text) => parts.extend(text_part(&text)),
                AnswerPart::CallStart(_) if self.call_count > 0 && !tool_calls.parallel => {}
                AnswerPart::CallStart(name) => {
                    let id = match tool_calls.syntax {
                        CallSyntax::Listed => crate::ids::random_id()[..SHORT_ID_CHARS].to_owned(),
                        _ => format!("call_{}", crate::ids::random_id()),
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

fn text_part(text: &str) -> Vec<OutputPart> {
    if text.is_empty() { Vec::new() } else { vec![OutputPart::Text(text.to_owned())] }
}

#[cfg(test)]
mod tests {
    use firebox_text::{GgufVocabulary, TextAssets, TokenizerSource};

    use super::*;

    fn hear(syntax: CallSyntax, opening: Option<&str>, parallel: bool, pieces: &[&str]) -> Vec<OutputPart> {
        let tools = vec![json!({"type": "function", "function": {"name": "noop"}})];
        let opening = opening.map(str::to_owned);
        let mut parser = ToolCallParser::new(Some(&ToolCallConfig { syntax, tools, opening, parallel }));
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
        let (syntax, tools) = (CallSyntax::Tagged, Vec::new());
        let mut parser =
            ToolCallParser::new(Some(&ToolCallConfig { syntax, tools, opening: None, parallel: true }));
        let piece = Piece { token: Some(1), text: "E".into(), logprobs: None };
        assert_eq!(parser.push(&piece, Some(&tokenizer)), [OutputPart::Text("E".into())]);
    }
}
