//! The reader of tool calls.

use serde_json::Value;

use super::answer_part::AnswerPart;
use super::channel_reader::ChannelReader;
use super::declared_tools::Tools;
use super::marker_reader::MarkerReader;
use super::syntax::CallSyntax;

/// Reads tool calls in a stream of text.
///
/// Text is returned as soon as it cannot be part of a call, and the arguments of a call as soon as it is certain that it is one:
/// once its name and the beginning of its arguments have arrived. Until then, text that turns out not to be a call is returned as
/// text. Later errors leave it a call whose arguments are invalid JSON, and so does the end of the text; callers validate
/// arguments anyway. Results do not depend on how the text is split, and text without calls is returned unchanged; white space
/// next to a call is dropped.
///
/// In [`CallSyntax::Channels`], thoughts have a channel and are returned as such; those of other families have
/// [marks](crate::ThoughtMarks).
///
/// ```
/// use firebox_text::{CallReader, CallSyntax, AnswerPart};
///
/// let mut reader = CallReader::new(CallSyntax::Tagged, &[]);
/// assert_eq!(reader.push("Let me look.\n<tool_"), [AnswerPart::Text("Let me look.".into())]);
/// assert_eq!(reader.push("call>{\"name\": \"look\""), []);
/// let begun = reader.push(", \"arguments\": {\"at\"");
/// assert_eq!(begun, [AnswerPart::CallStart("look".into()), AnswerPart::Arguments("{\"at\"".into())]);
/// let ended = reader.push(": 1}}");
/// assert_eq!(ended[0], AnswerPart::Arguments(": 1}".into()));
/// let AnswerPart::Call(call) = &ended[1] else { panic!() };
/// assert_eq!((call.name.as_str(), call.arguments.as_str()), ("look", Some("{\"at\": 1}")));
/// assert_eq!(reader.push("\n</tool_call>"), []);
/// assert_eq!(reader.finish(), []);
/// ```
#[derive(Debug, Clone)]
pub struct CallReader {
    syntax: CallSyntax,
    kind: Kind,
}

#[derive(Debug, Clone)]
enum Kind {
    Marked(MarkerReader),
    Channels(ChannelReader),
}

impl CallReader {
    /// A reader for a syntax and the declared tools, in the form of OpenAI's API.
    pub fn new(syntax: CallSyntax, tools: &[Value]) -> Self {
        let tools = Tools::new(tools);
        let kind = match syntax {
            CallSyntax::Channels => Kind::Channels(ChannelReader::new(tools)),
            marked => Kind::Marked(MarkerReader::new(marked, tools)),
        };
        Self { syntax, kind }
    }

    /// The syntax that it reads.
    pub fn syntax(&self) -> CallSyntax {
        self.syntax
    }

    /// Returns whether the answer goes on with thoughts.
    pub fn is_thinking(&self) -> bool {
        matches!(&self.kind, Kind::Channels(reader) if reader.is_thinking())
    }

    /// Adds a piece of text, and returns the parts that are certain now.
    pub fn push(&mut self, piece: &str) -> Vec<AnswerPart> {
        match &mut self.kind {
            Kind::Marked(reader) => reader.push(piece),
            Kind::Channels(reader) => reader.push(piece),
        }
    }

    /// Ends the text: returns what was held back.
    pub fn finish(&mut self) -> Vec<AnswerPart> {
        match &mut self.kind {
            Kind::Marked(reader) => reader.finish(),
            Kind::Channels(reader) => reader.finish(),
        }
    }
}
