use firebox_runtime::Piece;
use firebox_text::{AnswerPart, CallReader, CallSyntax, Tokenizer};
use serde_json::{Value, json};

/// Characters of the id of a call where templates want exactly so many, as Mistral's do.
const SHORT_ID: usize = 9;

/// How calls are told apart from what else an answer says.
#[derive(Debug, Clone)]
pub(crate) struct Listening {
    pub syntax: CallSyntax,
    /// Those the model was told of.
    pub tools: Vec<Value>,
    /// What opens a call, if the prompt ended with it.
    pub opening: Option<String>,
    /// Whether an answer may have several calls.
    pub parallel: bool,
}

/// What an answer says.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Heard {
    Text(String),
    /// A call that begins, without arguments so far.
    Calling(Call),
    /// What comes next of the arguments of the call that has begun.
    Arguments {
        /// The call's, among those of the answer.
        index: usize,
        piece: String,
    },
    /// The call that has begun, as a whole.
    Call(Call),
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Call {
    /// Among the calls of the answer.
    pub index: usize,
    pub id: String,
    pub name: String,
    /// A JSON text; nothing before its end has come.
    pub arguments: String,
}

impl Call {
    pub fn value(&self) -> Value {
        let function = json!({ "name": self.name, "arguments": self.arguments });
        json!({ "id": self.id, "type": "function", "function": function })
    }

    /// As streams have its beginning, with its place.
    pub fn beginning(&self) -> Value {
        let mut value = json!({ "index": self.index });
        if let (Value::Object(fields), Value::Object(call)) = (&mut value, self.value()) {
            fields.extend(call);
        }
        value
    }
}

/// Listens to one answer. Without tools all of it is text.
#[derive(Debug, Default)]
pub(crate) struct Listener {
    calls: Option<(CallReader, Listening)>,
    /// How many calls have begun.
    heard: usize,
    /// The call that has begun, if it is handed on.
    calling: Option<Call>,
    /// What the prompt said of the answer.
    begun: Vec<Heard>,
}

impl Listener {
    pub fn new(listening: Option<&Listening>) -> Self {
        let calls = listening.map(|listening| {
            let mut reader = CallReader::new(listening.syntax, &listening.tools);
            // It may be all that there is to the beginning of a call.
            let begun = listening.opening.as_deref().map(|opening| reader.push(opening));
            ((reader, listening.clone()), begun.unwrap_or_default())
        });
        let (calls, begun) = calls.unzip();
        let mut listener = Self { calls, ..Self::default() };
        listener.begun = listener.take(begun.unwrap_or_default());
        listener
    }

    /// How many calls there were.
    pub fn calls(&self) -> usize {
        self.heard
    }

    /// Takes what the engine says next. Control tokens that open calls leave no trace in its text.
    pub fn hear(&mut self, piece: &Piece, tokenizer: Option<&Tokenizer>) -> Vec<Heard> {
        let Some((reader, listening)) = &mut self.calls else {
            return text(&piece.text);
        };
        // What comes with a control token was held back before it.
        let mut parts = reader.push(&piece.text);
        if let (Some(token), Some(tokenizer)) = (piece.token, tokenizer)
            && tokenizer.is_special(token)
            && let Some(name) = tokenizer.id_to_token(token)
            && listening.syntax.control().contains(&name)
        {
            parts.extend(reader.push(name));
        }
        let mut heard = std::mem::take(&mut self.begun);
        heard.extend(self.take(parts));
        heard
    }

    /// Takes the end.
    pub fn end(&mut self) -> Vec<Heard> {
        let parts = self.calls.as_mut().map(|(reader, _)| reader.finish()).unwrap_or_default();
        let mut heard = std::mem::take(&mut self.begun);
        heard.extend(self.take(parts));
        heard
    }

    fn take(&mut self, parts: Vec<AnswerPart>) -> Vec<Heard> {
        let mut heard = Vec::new();
        let Some((_, listening)) = &self.calls else { return heard };
        for part in parts {
            match part {
                AnswerPart::Text(part) => heard.extend(text(&part)),
                AnswerPart::Calling(_) if self.heard > 0 && !listening.parallel => {}
                AnswerPart::Calling(name) => {
                    let id = match listening.syntax {
                        CallSyntax::Listed => crate::unique()[..SHORT_ID].to_owned(),
                        _ => format!("call_{}", crate::unique()),
                    };
                    let call = Call { index: self.heard, id, name, arguments: String::new() };
                    self.heard += 1;
                    heard.push(Heard::Calling(call.clone()));
                    self.calling = Some(call);
                }
                AnswerPart::Arguments(piece) => {
                    let Some(call) = &self.calling else { continue };
                    heard.push(Heard::Arguments { index: call.index, piece });
                }
                AnswerPart::Call(whole) => {
                    let Some(mut call) = self.calling.take() else { continue };
                    call.arguments = whole.arguments.as_str().unwrap_or_default().to_owned();
                    heard.push(Heard::Call(call));
                }
            }
        }
        heard
    }
}

fn text(text: &str) -> Vec<Heard> {
    if text.is_empty() { Vec::new() } else { vec![Heard::Text(text.to_owned())] }
}

#[cfg(test)]
mod tests {
    use firebox_text::{GgufVocabulary, TextAssets, TokenizerSource};

    use super::*;

    fn hear(syntax: CallSyntax, opening: Option<&str>, parallel: bool, pieces: &[&str]) -> Vec<Heard> {
        let tools = vec![json!({"type": "function", "function": {"name": "noop"}})];
        let opening = opening.map(str::to_owned);
        let mut listener = Listener::new(Some(&Listening { syntax, tools, opening, parallel }));
        let mut heard = Vec::new();
        for text in pieces {
            let piece = Piece { token: None, text: (*text).to_owned(), logprobs: None };
            heard.extend(listener.hear(&piece, None));
        }
        heard.extend(listener.end());
        heard
    }

    #[test]
    fn a_call_begins_with_what_the_prompt_said() {
        for syntax in [CallSyntax::Separated, CallSyntax::SeparatedFence, CallSyntax::Channels] {
            let heard = hear(syntax, Some(&syntax.opening(Some("noop"))), true, &["{", "\"a\": 1}"]);
            let Heard::Calling(begun) = &heard[0] else { panic!("{heard:?}") };
            assert_eq!((begun.index, begun.name.as_str(), begun.arguments.as_str()), (0, "noop", ""));
            let Some(Heard::Call(ended)) = heard.last() else { panic!("{heard:?}") };
            assert_eq!((&ended.id, ended.arguments.as_str()), (&begun.id, "{\"a\": 1}"));
        }
    }

    #[test]
    fn one_call_is_one_call() {
        let call = "<tool_call>{\"name\": \"noop\", \"arguments\": {}}</tool_call>";
        for (parallel, expected) in [(true, 2), (false, 1)] {
            let heard = hear(CallSyntax::Tagged, None, parallel, &[call, call]);
            assert_eq!(heard.len(), expected * 3, "{heard:?}");
        }
    }

    #[test]
    fn a_mark_overtakes_no_text() {
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
        let mut listener = Listener::new(Some(&Listening { syntax, tools, opening: None, parallel: true }));
        let piece = Piece { token: Some(1), text: "E".into(), logprobs: None };
        assert_eq!(listener.hear(&piece, Some(&tokenizer)), [Heard::Text("E".into())]);
    }
}
