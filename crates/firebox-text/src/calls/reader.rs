use serde_json::Value;

use super::channels::ChannelReader;
use super::marked::MarkedReader;
use super::syntax::CallSyntax;
use super::tools::Tools;
use crate::message::FunctionCall;

/// The longest name a tool can have before its arguments. A name beyond it is none.
pub(super) const LONGEST_NAME: usize = 256;

/// What a model said: a part of its text, or of a call of a tool.
#[derive(Debug, Clone, PartialEq)]
pub enum AnswerPart {
    /// Text.
    Text(String),
    /// A call of the tool of this name begins.
    Calling(String),
    /// What comes next of the arguments of the call that has begun. All of it together is one JSON text.
    Arguments(String),
    /// The call that has begun has come to its end: all of it, its arguments as a JSON text.
    Call(FunctionCall),
}

/// Reads calls of tools out of text that comes in pieces.
///
/// Text is handed on as soon as it can no longer be part of a call, and the arguments of a call as soon as it is certain that
/// it is one: when its name and the beginning of its arguments are there. What looks like a call before that and is none
/// is text. What is wrong later on remains a call, of arguments that are no JSON, and so does what the text ends in; whoever
/// calls the tool has to look at them anyway. However the text is cut into pieces, the same calls and the same text come
/// out, and where there are no calls the text is what went in; next to a call, whitespace is left out.
///
/// What [`CallSyntax::Channels`] thinks comes as text between `<think>` and `</think>`, which is how other families write it.
///
/// ```
/// use firebox_text::{CallReader, CallSyntax, AnswerPart};
///
/// let mut reader = CallReader::new(CallSyntax::Tagged, &[]);
/// assert_eq!(reader.push("Let me look.\n<tool_"), [AnswerPart::Text("Let me look.".into())]);
/// assert_eq!(reader.push("call>{\"name\": \"look\""), []);
/// let begun = reader.push(", \"arguments\": {\"at\"");
/// assert_eq!(begun, [AnswerPart::Calling("look".into()), AnswerPart::Arguments("{\"at\"".into())]);
/// let ended = reader.push(": 1}}");
/// assert_eq!(ended[0], AnswerPart::Arguments(": 1}".into()));
/// let AnswerPart::Call(call) = &ended[1] else { panic!() };
/// assert_eq!((call.name.as_str(), call.arguments.as_str()), ("look", Some("{\"at\": 1}")));
/// assert_eq!(reader.push("\n</tool_call>"), []);
/// assert_eq!(reader.finish(), []);
/// ```
#[derive(Debug, Clone)]
pub struct CallReader(Kind);

#[derive(Debug, Clone)]
enum Kind {
    Marked(MarkedReader),
    Channels(ChannelReader),
}

impl CallReader {
    /// Reads what is written in a syntax, by a model that was told of these tools in the form of OpenAI's API.
    pub fn new(syntax: CallSyntax, tools: &[Value]) -> Self {
        let tools = Tools::new(tools);
        Self(match syntax {
            CallSyntax::Channels => Kind::Channels(ChannelReader::new(tools)),
            marked => Kind::Marked(MarkedReader::new(marked, tools)),
        })
    }

    /// Takes the next piece of text, and returns what is certain now.
    pub fn push(&mut self, piece: &str) -> Vec<AnswerPart> {
        match &mut self.0 {
            Kind::Marked(reader) => reader.push(piece),
            Kind::Channels(reader) => reader.push(piece),
        }
    }

    /// Ends the text: returns what was held back.
    pub fn finish(&mut self) -> Vec<AnswerPart> {
        match &mut self.0 {
            Kind::Marked(reader) => reader.finish(),
            Kind::Channels(reader) => reader.finish(),
        }
    }
}
