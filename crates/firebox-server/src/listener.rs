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
    /// Whether the prompt ended with what opens a call.
    pub opened: bool,
    /// Whether an answer may have several calls.
    pub parallel: bool,
}

/// What an answer says.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Heard {
    Text(String),
    Call(Call),
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Call {
    /// Among the calls of the answer.
    pub index: usize,
    pub id: String,
    pub name: String,
    /// A JSON text.
    pub arguments: String,
}

impl Call {
    pub fn value(&self) -> Value {
        let function = json!({ "name": self.name, "arguments": self.arguments });
        json!({ "id": self.id, "type": "function", "function": function })
    }

    /// As streams have it, with its place.
    pub fn part(&self) -> Value {
        let function = json!({ "name": self.name, "arguments": self.arguments });
        json!({ "index": self.index, "id": self.id, "type": "function", "function": function })
    }
}

/// Listens to one answer. Without tools all of it is text.
#[derive(Debug, Default)]
pub(crate) struct Listener {
    calls: Option<(CallReader, Listening)>,
    heard: usize,
}

impl Listener {
    pub fn new(listening: Option<&Listening>) -> Self {
        let calls = listening.map(|listening| {
            let mut reader = CallReader::new(listening.syntax, &listening.tools);
            if listening.opened {
                reader.push(listening.syntax.opening());
            }
            (reader, listening.clone())
        });
        Self { calls, heard: 0 }
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
        let mut parts = Vec::new();
        if let (Some(token), Some(tokenizer)) = (piece.token, tokenizer)
            && tokenizer.is_special(token)
            && let Some(name) = tokenizer.id_to_token(token)
            && listening.syntax.control().contains(&name)
        {
            parts = reader.push(name);
        }
        parts.extend(reader.push(&piece.text));
        self.take(parts)
    }

    /// Takes the end.
    pub fn end(&mut self) -> Vec<Heard> {
        let parts = self.calls.as_mut().map(|(reader, _)| reader.finish()).unwrap_or_default();
        self.take(parts)
    }

    fn take(&mut self, parts: Vec<AnswerPart>) -> Vec<Heard> {
        let mut heard = Vec::new();
        let Some((_, listening)) = &self.calls else { return heard };
        for part in parts {
            match part {
                AnswerPart::Text(part) => heard.extend(text(&part)),
                AnswerPart::Call(_) if self.heard > 0 && !listening.parallel => {}
                AnswerPart::Call(call) => {
                    let id = match listening.syntax {
                        CallSyntax::Listed => crate::unique()[..SHORT_ID].to_owned(),
                        _ => format!("call_{}", crate::unique()),
                    };
                    let arguments = call.arguments.as_str().unwrap_or_default().to_owned();
                    heard.push(Heard::Call(Call { index: self.heard, id, name: call.name, arguments }));
                    self.heard += 1;
                }
            }
        }
        heard
    }
}

fn text(text: &str) -> Vec<Heard> {
    if text.is_empty() { Vec::new() } else { vec![Heard::Text(text.to_owned())] }
}
