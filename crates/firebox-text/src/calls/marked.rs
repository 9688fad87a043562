use serde_json::Value;

use super::head::{Head, begins_object, head};
use super::json::{Extent, JsonEnd};
use super::markup;
use super::markup::can_be_called;
use super::reader::{AnswerPart, LONGEST_NAME};
use super::said::Said;
use super::syntax::{
    ARGUMENTS, CALL_BEGIN, CALL_END, CALL_ID, CALLS_BEGIN, CALLS_END, CallSyntax, FENCE, FUNCTIONS_END,
    SEPARATOR, TAG_END,
};
use super::tools::Tools;
use crate::message::FunctionCall;

/// What stands behind an opening fence where calls are within.
const FENCED: [&str; 6] = ["", "json", "tool_call", "tool_calls", "tool_code", "tool"];
/// The longest that may stand between what opens a call of DeepSeek's and its arguments: a name, and marks around it.
const LONGEST_HEADER: usize = LONGEST_NAME + 64;

/// Reads what is text up to a mark that opens calls.
#[derive(Debug, Clone)]
pub(super) struct MarkedReader {
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
    said: Said,
}

/// Where in a text a call may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Region {
    Tag,
    Bare,
    List,
    Functions,
    Separated,
    Fence,
}

impl Region {
    /// Whether only tools that are there are called, because much else looks like a call.
    fn is_strict(self) -> bool {
        matches!(self, Self::Bare | Self::Fence)
    }

    /// What may stand behind a call, in this order.
    fn closing(self) -> &'static [&'static str] {
        match self {
            Self::Tag => &[TAG_END],
            Self::Bare => &[";"],
            Self::List => &[],
            Self::Functions => &[FUNCTIONS_END],
            Self::Separated => &[FENCE, CALL_END, CALLS_END],
            Self::Fence => &[FENCE],
        }
    }

    /// What comes behind a call in it.
    fn behind(self, listed: bool) -> State {
        if listed { State::Next { region: self } } else { State::Closing(self.closing()) }
    }
}

#[derive(Debug, Clone)]
enum State {
    Saying,
    /// `held` begins with what opened it, so many bytes.
    Within {
        region: Region,
        opened: usize,
    },
    /// `held` has a value at this place that may be a call, or several.
    Value {
        region: Region,
        at: usize,
        end: JsonEnd,
        listed: bool,
    },
    /// `held` has a name of a tool at this place, and its arguments follow.
    Named {
        at: usize,
    },
    /// `held` begins with what comes next of the arguments of a call, which is in so many objects.
    Arguments {
        region: Region,
        end: JsonEnd,
        objects: usize,
        listed: bool,
    },
    /// Behind the arguments, in what objects they are in.
    Behind {
        region: Region,
        end: JsonEnd,
        listed: bool,
    },
    /// In a list, behind one of its calls.
    Next {
        region: Region,
    },
    /// Between a call and what closes it, if anything does.
    Closing(&'static [&'static str]),
    /// In a fence around something else.
    Foreign,
}

/// Whether there is more to do with what is held.
enum Step {
    Again,
    Wait,
}

impl MarkedReader {
    pub fn new(syntax: CallSyntax, tools: Tools) -> Self {
        Self {
            syntax,
            tools,
            held: String::new(),
            state: State::Saying,
            space: String::new(),
            spoke: false,
            called: false,
            said: Said::default(),
        }
    }

    pub fn push(&mut self, piece: &str) -> Vec<AnswerPart> {
        self.held.push_str(piece);
        while let Step::Again = self.step() {}
        self.said.take()
    }

    pub fn finish(&mut self) -> Vec<AnswerPart> {
        match self.state.clone() {
            State::Within { region: Region::Tag, opened } => {
                if let Some(call) = markup::call(&self.held[opened..], &self.tools)
                    && self.held[opened..].contains("</function>")
                {
                    self.called(self.held.len(), &[call], State::Saying);
                }
            }
            State::Arguments { .. } => self.said.end(),
            State::Next { .. } if matches!(self.held.trim(), "" | ",") => self.held.clear(),
            State::Closing(_) if self.held.trim().is_empty() => self.held.clear(),
            _ => {}
        }
        let rest = std::mem::take(&mut self.held);
        self.say(&rest);
        self.state = State::Saying;
        let space = std::mem::take(&mut self.space);
        if self.spoke || !self.called {
            self.said.text(&space);
        }
        self.said.take()
    }

    fn step(&mut self) -> Step {
        match self.state.clone() {
            State::Saying => self.saying(),
            State::Within { region: Region::Separated, opened } => self.separated(opened),
            State::Within { region, opened } => self.within(region, opened),
            State::Value { region, at, mut end, listed } => match end.look(&self.held[at..]) {
                Extent::More => {
                    self.state = State::Value { region, at, end, listed };
                    Step::Wait
                }
                Extent::Ends(length) => self.value(region, at, at + length, listed),
                Extent::Broken(length) => self.no_call(region, at + length),
            },
            State::Named { at } => self.named(at),
            State::Arguments { region, mut end, objects, listed } => {
                let (piece, is_over) = self.passed(&mut end);
                self.said.arguments(&piece);
                if !is_over {
                    self.state = State::Arguments { region, end, objects, listed };
                    return Step::Wait;
                }
                self.said.end();
                self.state = match objects {
                    0 => region.behind(listed),
                    _ => State::Behind { region, end: JsonEnd::within(objects), listed },
                };
                Step::Again
            }
            State::Behind { region, mut end, listed } => {
                if !self.passed(&mut end).1 {
                    self.state = State::Behind { region, end, listed };
                    return Step::Wait;
                }
                self.state = region.behind(listed);
                Step::Again
            }
            State::Next { region } => self.next(region),
            State::Closing(marks) => self.closing(marks),
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
            }
            if self.syntax.marks().iter().any(|(mark, _)| mark.starts_with(rest)) {
                self.say_to(at);
                return Step::Wait;
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
        let at = self.past_space(opened);
        match (self.held[at..].chars().next(), region) {
            (None, _) => Step::Wait,
            (Some('{'), _) => self.object(region, at, at, false),
            (Some('['), _) => {
                let first = self.past_space(at + 1);
                match self.held[first..].chars().next() {
                    None => Step::Wait,
                    Some('{') => self.object(region, at, first, true),
                    Some(_) => self.whole(region, at, false),
                }
            }
            (Some(_), Region::List) => {
                self.state = State::Named { at };
                Step::Again
            }
            (Some(_), Region::Tag) => {
                let Some(end) = self.held[at..].find(TAG_END) else { return Step::Wait };
                let end = at + end;
                match markup::call(&self.held[at..end], &self.tools) {
                    Some(call) => self.called(end + TAG_END.len(), &[call], State::Saying),
                    None => self.no_call(region, end),
                }
            }
            (Some(_), _) => self.no_call(region, at),
        }
    }

    /// Looks whether an object is a call, or failing that, whether the value is that the object is the first of.
    fn object(&mut self, region: Region, value: usize, object: usize, listed: bool) -> Step {
        match head(&self.held[object..]) {
            Head::More => Step::Wait,
            Head::Call { name, at, objects } if !region.is_strict() || self.tools.has(&name) => {
                self.begin(object + at, &name);
                self.state = State::Arguments { region, end: JsonEnd::default(), objects, listed };
                Step::Again
            }
            Head::Call { .. } | Head::Whole => self.whole(region, value, listed && value == object),
        }
    }

    /// Waits for all of a value.
    fn whole(&mut self, region: Region, at: usize, listed: bool) -> Step {
        self.state = State::Value { region, at, end: JsonEnd::default(), listed };
        Step::Again
    }

    /// Looks for the arguments behind a name.
    fn named(&mut self, at: usize) -> Step {
        let rest = &self.held[at..];
        let end = rest.find(['{', '\n', '<', '`']).unwrap_or(rest.len()).min(LONGEST_NAME);
        if end == rest.len() {
            return Step::Wait;
        }
        if rest.as_bytes()[end] != b'{' || !can_be_called(name(&rest[..end])) {
            let end = rest.ceil_char_boundary(end);
            return self.no_call(Region::List, at + end);
        }
        let tool = name(&rest[..end]).to_owned();
        self.called_by_name(Region::List, &tool, at + end)
    }

    /// Looks for the name and the arguments of a call of DeepSeek's.
    fn separated(&mut self, opened: usize) -> Step {
        let region = Region::Separated;
        let mut at = opened;
        if self.held.starts_with(CALLS_BEGIN) {
            let rest = self.held[at..].trim_start();
            if let Some(after) = rest.strip_prefix(CALL_BEGIN) {
                at = self.held.len() - after.len();
            } else if CALL_BEGIN.starts_with(rest) {
                return Step::Wait;
            } else {
                return self.no_call(region, opened);
            }
        }
        let rest = &self.held[at..];
        let longest = rest.ceil_char_boundary(LONGEST_HEADER);
        let end = rest.find('{').unwrap_or(rest.len()).min(longest);
        if let Some(closed) = rest[..end].find(CALL_END) {
            return self.no_call(region, at + closed);
        }
        if end == rest.len() && end < longest.max(LONGEST_HEADER) {
            return Step::Wait;
        }
        let header = rest[..end].trim();
        if header.is_empty() && end < longest {
            return self.object(region, at + end, at + end, false);
        }
        match separated_name(header).filter(|_| rest[end..].starts_with('{')) {
            Some(tool) => {
                let tool = tool.to_owned();
                self.called_by_name(region, &tool, at + end)
            }
            None => self.no_call(region, at + end),
        }
    }

    /// Begins a call whose arguments stand at this place, if they do.
    fn called_by_name(&mut self, region: Region, tool: &str, at: usize) -> Step {
        match begins_object(&self.held[at..]) {
            None => Step::Wait,
            Some(false) => self.no_call(region, at + 1),
            Some(true) => {
                self.begin(at, tool);
                self.state = State::Arguments { region, end: JsonEnd::default(), objects: 0, listed: false };
                Step::Again
            }
        }
    }

    /// Looks whether a value is a call.
    fn value(&mut self, region: Region, at: usize, end: usize, listed: bool) -> Step {
        let value = serde_json::from_str::<Value>(&self.held[at..end]).ok();
        match value.and_then(|value| self.tools.calls(&value, region.is_strict())) {
            Some(calls) => self.called(end, &calls, region.behind(listed)),
            None => self.no_call(region, end),
        }
    }

    /// Looks for one more call in a list.
    fn next(&mut self, region: Region) -> Step {
        let at = self.past_space(0);
        match self.held[at..].chars().next() {
            None => return Step::Wait,
            Some(',') => {
                let object = self.past_space(at + 1);
                match self.held[object..].chars().next() {
                    None => return Step::Wait,
                    Some('{') => return self.object(region, object, object, true),
                    Some(_) => {}
                }
            }
            Some(']') => {
                self.held.drain(..=at);
            }
            Some(_) => {}
        }
        self.state = region.behind(false);
        Step::Again
    }

    /// Where the white space ends that begins there.
    fn past_space(&self, at: usize) -> usize {
        self.held.len() - self.held[at..].trim_start().len()
    }

    /// Takes what is held for a part of a value, up to where it ends, and says whether it does.
    fn passed(&mut self, end: &mut JsonEnd) -> (String, bool) {
        let (length, is_over) = match end.look(&self.held) {
            Extent::More => (self.held.len(), false),
            Extent::Ends(length) | Extent::Broken(length) => (length, true),
        };
        end.passed();
        (self.held.drain(..length).collect(), is_over)
    }

    /// Takes up to so many bytes for the beginning of a call.
    fn begin(&mut self, end: usize, tool: &str) {
        self.held.drain(..end);
        self.space.clear();
        (self.spoke, self.called) = (false, true);
        self.said.begin(tool);
    }

    /// Takes up to so many bytes for calls.
    fn called(&mut self, end: usize, calls: &[FunctionCall], then: State) -> Step {
        self.held.drain(..end);
        self.space.clear();
        (self.spoke, self.called) = (false, true);
        calls.iter().for_each(|call| self.said.call(call));
        self.state = then;
        Step::Again
    }

    /// Takes up to so many bytes for text, what opened them included.
    fn no_call(&mut self, region: Region, end: usize) -> Step {
        self.say_to(end);
        self.state = if region == Region::Fence { State::Foreign } else { State::Saying };
        Step::Again
    }

    fn closing(&mut self, marks: &'static [&'static str]) -> Step {
        let rest = self.held.trim_start();
        let found =
            marks.iter().enumerate().find_map(|(index, mark)| Some((index, rest.strip_prefix(mark)?)));
        if let Some((index, after)) = found {
            self.held = after.to_owned();
            self.state = State::Closing(&marks[index + 1..]);
        } else if marks.iter().any(|mark| mark.starts_with(rest)) {
            return Step::Wait;
        } else {
            self.state = State::Saying;
        }
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
            self.said.text(&said);
        }
        self.space.push_str(&text[kept..]);
    }
}

/// A name of a tool without what stands between it and its arguments.
fn name(text: &str) -> &str {
    let end = [ARGUMENTS, CALL_ID].iter().filter_map(|mark| text.find(mark)).min().unwrap_or(text.len());
    text[..end].trim()
}

/// The name of a tool before or behind the mark that separates it: what it is comes before the name, if that is said.
fn separated_name(header: &str) -> Option<&str> {
    let (before, behind) = header.split_once(SEPARATOR)?;
    let behind = behind.find(FENCE).map_or(behind, |fence| &behind[..fence]).trim();
    let name = if behind.is_empty() { before.trim() } else { behind };
    can_be_called(name).then_some(name)
}
