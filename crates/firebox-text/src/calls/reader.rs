use serde_json::Value;

use super::json::{Extent, JsonEnd};
use super::markup;
use super::syntax::{ARGUMENTS, CALL_ID, CallSyntax, FENCE, LISTED, TAG_END};
use super::tools::{Tools, function_call};
use crate::message::FunctionCall;

/// The longest name a tool can have before its arguments. A name beyond it is none.
const LONGEST_NAME: usize = 256;
/// What stands behind an opening fence where calls are within.
const FENCED: [&str; 6] = ["", "json", "tool_call", "tool_calls", "tool_code", "tool"];

/// What a model said: a part of its text, or a call of a tool.
#[derive(Debug, Clone, PartialEq)]
pub enum AnswerPart {
    /// Text.
    Text(String),
    /// A call, its arguments as a JSON text.
    Call(FunctionCall),
}

/// Reads calls of tools out of text that comes in pieces.
///
/// Text is handed on as soon as it can no longer be part of a call. What looks like one and is none is text. However the
/// text is cut into pieces, the same calls and the same text come out, and where there are no calls the text is what went
/// in; next to a call, whitespace is left out.
///
/// ```
/// use firebox_text::{CallReader, CallSyntax, AnswerPart};
///
/// let mut reader = CallReader::new(CallSyntax::Tagged, &[]);
/// assert_eq!(reader.push("Let me look.\n<tool_"), [AnswerPart::Text("Let me look.".into())]);
/// assert_eq!(reader.push("call>{\"name\": \"look\""), []);
/// let AnswerPart::Call(call) = &reader.push(", \"arguments\": {\"at\": 1}}")[0] else { panic!() };
/// assert_eq!((call.name.as_str(), call.arguments.as_str()), ("look", Some("{\"at\":1}")));
/// assert_eq!(reader.push("\n</tool_call>"), []);
/// assert_eq!(reader.finish(), []);
/// ```
#[derive(Debug, Clone)]
pub struct CallReader {
    syntax: CallSyntax,
    tools: Tools,
    /// What is neither text nor a call so far.
    held: String,
    state: State,
    /// Whitespace that is left out if a call or the end comes next.
    space: String,
    /// Whether there was text since the last call, or since the beginning.
    spoke: bool,
    called: bool,
    out: Vec<AnswerPart>,
}

/// Where in a text a call may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Region {
    Tag,
    Bare,
    List,
    Fence,
}

#[derive(Debug, Clone)]
enum State {
    Saying,
    /// `held` begins with what opened it, so many bytes.
    Within {
        region: Region,
        opened: usize,
    },
    /// `held` has a value at this place.
    Value {
        region: Region,
        at: usize,
        end: JsonEnd,
    },
    /// `held` has a name of a tool at this place, and its arguments follow.
    Named {
        at: usize,
    },
    /// Between a call and what closes it, if anything does.
    Closing(&'static str),
    /// In a fence around something else.
    Foreign,
}

/// Whether there is more to do with what is held.
enum Step {
    Again,
    Wait,
}

impl CallReader {
    /// Reads what is written in a syntax, by a model that was told of these tools in the form of OpenAI's API.
    pub fn new(syntax: CallSyntax, tools: &[Value]) -> Self {
        Self {
            syntax,
            tools: Tools::new(tools),
            held: String::new(),
            state: State::Saying,
            space: String::new(),
            spoke: false,
            called: false,
            out: Vec::new(),
        }
    }

    /// Takes the next piece of text, and returns what is certain now.
    pub fn push(&mut self, piece: &str) -> Vec<AnswerPart> {
        self.held.push_str(piece);
        while let Step::Again = self.step() {}
        std::mem::take(&mut self.out)
    }

    /// Ends the text: returns what was held back. A call that did not come to its end is text.
    pub fn finish(&mut self) -> Vec<AnswerPart> {
        match self.state.clone() {
            State::Within { region: Region::Tag, opened } => {
                if let Some(call) = markup::call(&self.held[opened..], &self.tools)
                    && self.held[opened..].contains("</function>")
                {
                    self.called(self.held.len(), vec![call], State::Saying);
                }
            }
            State::Closing(_) if self.held.trim().is_empty() => self.held.clear(),
            _ => {}
        }
        let rest = std::mem::take(&mut self.held);
        self.say(&rest);
        self.state = State::Saying;
        let space = std::mem::take(&mut self.space);
        if !space.is_empty() && (self.spoke || !self.called) {
            self.hand_on(space);
        }
        std::mem::take(&mut self.out)
    }

    fn step(&mut self) -> Step {
        match self.state.clone() {
            State::Saying => self.saying(),
            State::Within { region, opened } => self.within(region, opened),
            State::Value { region, at, mut end } => {
                let extent = end.look(&self.held[at..]);
                match extent {
                    Extent::More => {
                        self.state = State::Value { region, at, end };
                        Step::Wait
                    }
                    Extent::Ends(length) => self.value(region, at, at + length),
                    Extent::Broken(length) => self.no_call(region, at + length),
                }
            }
            State::Named { at } => self.named(at),
            State::Closing(mark) => self.closing(mark),
            State::Foreign => self.foreign(),
        }
    }

    /// Looks for what opens a call.
    fn saying(&mut self) -> Step {
        if !self.spoke && self.syntax.is_bare() {
            let start = self.held.len() - self.held.trim_start().len();
            match self.held[start..].chars().next() {
                None => {
                    self.say_to(start);
                    return Step::Wait;
                }
                Some('{' | '[') => {
                    self.say_to(start);
                    self.state = State::Within { region: Region::Bare, opened: 0 };
                    return Step::Again;
                }
                Some(_) => {}
            }
        }
        for (at, _) in self.held.char_indices() {
            let rest = &self.held[at..];
            for &(mark, region) in self.syntax.marks() {
                if rest.starts_with(mark) {
                    self.say_to(at);
                    self.state = State::Within { region, opened: mark.len() };
                    return Step::Again;
                }
                if mark.starts_with(rest) {
                    self.say_to(at);
                    return Step::Wait;
                }
            }
        }
        self.say_to(self.held.len());
        Step::Wait
    }

    /// Looks what follows what opened a call.
    fn within(&mut self, region: Region, opened: usize) -> Step {
        let mut opened = opened;
        if region == Region::Fence {
            let Some(line) = self.held[opened..].find('\n') else {
                let kind = self.held[opened..].trim();
                if FENCED.iter().any(|fenced| fenced.starts_with(kind)) {
                    return Step::Wait;
                }
                return self.no_call(region, opened);
            };
            if !FENCED.contains(&self.held[opened..opened + line].trim()) {
                return self.no_call(region, opened);
            }
            opened += line + 1;
        }
        let rest = &self.held[opened..];
        let at = opened + rest.len() - rest.trim_start().len();
        match (self.held[at..].chars().next(), region) {
            (None, _) => Step::Wait,
            (Some('{' | '['), _) => {
                self.state = State::Value { region, at, end: JsonEnd::default() };
                Step::Again
            }
            (Some(_), Region::List) => {
                self.state = State::Named { at };
                Step::Again
            }
            (Some(_), Region::Tag) => {
                let Some(end) = self.held[at..].find(TAG_END) else { return Step::Wait };
                let end = at + end;
                match markup::call(&self.held[at..end], &self.tools) {
                    Some(call) => self.called(end + TAG_END.len(), vec![call], State::Saying),
                    None => self.no_call(region, end),
                }
            }
            (Some(_), Region::Bare | Region::Fence) => self.no_call(region, at),
        }
    }

    /// Looks for the arguments behind a name.
    fn named(&mut self, at: usize) -> Step {
        let rest = &self.held[at..];
        let end = rest.find(['{', '\n', '<', '`']).unwrap_or(rest.len()).min(LONGEST_NAME);
        if end == rest.len() {
            return Step::Wait;
        }
        if rest.as_bytes()[end] != b'{' || !markup::is_name(name(&rest[..end])) {
            let end = rest.ceil_char_boundary(end);
            return self.no_call(Region::List, at + end);
        }
        self.state = State::Value { region: Region::List, at: at + end, end: JsonEnd::default() };
        Step::Again
    }

    /// Looks whether a value is a call.
    fn value(&mut self, region: Region, at: usize, end: usize) -> Step {
        let Ok(value) = serde_json::from_str::<Value>(&self.held[at..end]) else {
            return self.no_call(region, end);
        };
        let before = name(self.held[..at].trim_start_matches(LISTED));
        let calls = match (region, value) {
            (Region::List, Value::Object(arguments)) if !before.is_empty() => {
                Some(vec![function_call(before, arguments)])
            }
            (region, value) => self.tools.calls(&value, matches!(region, Region::Bare | Region::Fence)),
        };
        let Some(calls) = calls else { return self.no_call(region, end) };
        let then = match region {
            Region::Tag => State::Closing(TAG_END),
            Region::Bare => State::Closing(";"),
            Region::Fence => State::Closing(FENCE),
            Region::List => State::Saying,
        };
        self.called(end, calls, then)
    }

    /// Takes up to so many bytes for calls.
    fn called(&mut self, end: usize, calls: Vec<FunctionCall>, then: State) -> Step {
        self.held.drain(..end);
        self.space.clear();
        (self.spoke, self.called) = (false, true);
        self.out.extend(calls.into_iter().map(AnswerPart::Call));
        self.state = then;
        Step::Again
    }

    /// Takes up to so many bytes for text, what opened them included.
    fn no_call(&mut self, region: Region, end: usize) -> Step {
        self.say_to(end);
        self.state = if region == Region::Fence { State::Foreign } else { State::Saying };
        Step::Again
    }

    fn closing(&mut self, mark: &'static str) -> Step {
        let rest = self.held.trim_start();
        if let Some(after) = rest.strip_prefix(mark) {
            self.held = after.to_owned();
        } else if mark.starts_with(rest) {
            return Step::Wait;
        }
        self.state = State::Saying;
        Step::Again
    }

    /// Goes on to the end of a fence.
    fn foreign(&mut self) -> Step {
        if let Some(at) = self.held.find(FENCE) {
            self.say_to(at + FENCE.len());
            self.state = State::Saying;
            return Step::Again;
        }
        let kept = self.held.trim_end_matches('`').len();
        self.say_to(kept);
        Step::Wait
    }

    /// Takes up to so many bytes of what is held for text.
    fn say_to(&mut self, end: usize) {
        let rest = self.held.split_off(end);
        let text = std::mem::replace(&mut self.held, rest);
        self.say(&text);
    }

    fn say(&mut self, text: &str) {
        let kept = text.trim_end().len();
        if kept > 0 {
            let said = std::mem::take(&mut self.space) + &text[..kept];
            self.spoke = true;
            self.hand_on(said);
        }
        self.space.push_str(&text[kept..]);
    }

    fn hand_on(&mut self, text: String) {
        match self.out.last_mut() {
            Some(AnswerPart::Text(before)) => before.push_str(&text),
            _ => self.out.push(AnswerPart::Text(text)),
        }
    }
}

/// A name of a tool without what stands between it and its arguments.
fn name(text: &str) -> &str {
    let end = [ARGUMENTS, CALL_ID].iter().filter_map(|mark| text.find(mark)).min().unwrap_or(text.len());
    text[..end].trim()
}
