//! The reader of syntaxes in which a mark precedes a call.

use serde_json::Value;

use super::answer_part::AnswerPart;
use super::declared_tools::Tools;
use super::json_scanner::{Extent, JsonScanner};
use super::literals::{gemma_call, python_calls};
use super::marks::{
    ARGUMENTS, CALL_BEGIN, CALL_END, CALL_ID, CALLS_BEGIN, FENCE, RECIPIENT, SECTION, SECTION_ARGUMENTS,
    SECTION_CALL, SECTION_CALL_END, SEPARATOR,
};
use super::markup::{Dialect, Head, MarkupCall};
use super::object_head::{ObjectHead, begins_object, inspect_object};
use super::part_queue::PartQueue;
use super::region::Region;
use super::syntax::CallSyntax;
use super::tool_name::{MAX_TOOL_NAME, is_valid_tool_name};
use crate::message::FunctionCall;

/// The info strings of fences that can contain calls.
const CALL_FENCES: [&str; 6] = ["", "json", "tool_call", "tool_calls", "tool_code", "tool"];
/// The longest header of a DeepSeek call: a name, and marks around it.
const MAX_HEADER: usize = MAX_TOOL_NAME + 64;

/// Separates text from calls, which begin with a mark.
#[derive(Debug, Clone)]
pub(super) struct MarkerReader {
    syntax: CallSyntax,
    tools: Tools,
    /// Text that is not yet known to be text or a call.
    held: String,
    state: State,
    /// White space that is dropped if a call or the end follows.
    space: String,
    /// Whether there was text since the last call, or since the beginning.
    has_text: bool,
    called: bool,
    parts: PartQueue,
}

#[derive(Debug, Clone)]
enum State {
    Text,
    /// `held` begins with the opening mark, of `opened` bytes.
    Within {
        region: Region,
        opened: usize,
    },
    /// `held` has a value at `at` that may be one or more calls.
    Value {
        region: Region,
        at: usize,
        end: JsonScanner,
        listed: bool,
    },
    /// `held` has the name of a tool at `at`, followed by its arguments.
    Named {
        at: usize,
    },
    /// `held` begins with the next part of a call's arguments, which are nested in so many objects.
    Arguments {
        region: Region,
        end: JsonScanner,
        objects: usize,
        listed: bool,
    },
    /// Behind the arguments, within the objects that contain them.
    Behind {
        region: Region,
        end: JsonScanner,
        listed: bool,
    },
    /// In a list, behind one of its calls.
    Next {
        region: Region,
    },
    /// `held` begins with the next parameter of a call, or with its end.
    Markup {
        region: Region,
        call: MarkupCall,
    },
    /// Behind a call of which more may follow before the closing mark.
    NextMarkup {
        region: Region,
        dialect: Dialect,
    },
    /// Between a call and its closing marks, which are optional.
    Closing(&'static [&'static str]),
    /// In a fence with other content.
    OtherFence,
}

impl State {
    /// The state behind a call.
    fn behind(region: Region, listed: bool) -> Self {
        if listed { Self::Next { region } } else { Self::Closing(region.closing()) }
    }
}

/// Whether the held text can be processed further.
enum Step {
    Again,
    Wait,
}

impl MarkerReader {
    pub fn new(syntax: CallSyntax, tools: Tools) -> Self {
        Self {
            syntax,
            tools,
            held: String::new(),
            state: State::Text,
            space: String::new(),
            has_text: false,
            called: false,
            parts: PartQueue::default(),
        }
    }

    pub fn push(&mut self, piece: &str) -> Vec<AnswerPart> {
        self.held.push_str(piece);
        while let Step::Again = self.step() {}
        self.parts.take()
    }

    pub fn finish(&mut self) -> Vec<AnswerPart> {
        match self.state.clone() {
            State::Arguments { .. } | State::Markup { .. } => {
                self.parts.end();
                self.held.clear();
            }
            State::NextMarkup { .. } if self.held.trim().is_empty() => self.held.clear(),
            State::Next { .. } if matches!(self.held.trim(), "" | ",") => self.held.clear(),
            State::Closing(_) if self.held.trim().is_empty() => self.held.clear(),
            _ => {}
        }
        let rest = std::mem::take(&mut self.held);
        self.emit_text(&rest);
        self.state = State::Text;
        let space = std::mem::take(&mut self.space);
        if self.has_text || !self.called {
            self.parts.text(&space);
        }
        self.parts.take()
    }

    fn step(&mut self) -> Step {
        match self.state.clone() {
            State::Text => self.find_opening(),
            State::Within { region: region @ (Region::Separated | Region::Section), opened } => {
                self.separated(region, opened)
            }
            State::Within { region, opened } => self.within(region, opened),
            State::Value { region, at, mut end, listed } => match end.scan(&self.held[at..]) {
                Extent::More => {
                    self.state = State::Value { region, at, end, listed };
                    Step::Wait
                }
                Extent::Ends(length) => self.value(region, at, at + length, listed),
                Extent::Broken(length) => self.not_a_call(region, at + length),
            },
            State::Named { at } => self.named(at),
            State::Arguments { region, mut end, objects, listed } => {
                let (piece, is_over) = self.take_scanned(&mut end);
                self.parts.arguments(&piece);
                if !is_over {
                    self.state = State::Arguments { region, end, objects, listed };
                    return Step::Wait;
                }
                self.parts.end();
                self.state = match objects {
                    0 => State::behind(region, listed),
                    _ => State::Behind { region, end: JsonScanner::within(objects), listed },
                };
                Step::Again
            }
            State::Behind { region, mut end, listed } => {
                if !self.take_scanned(&mut end).1 {
                    self.state = State::Behind { region, end, listed };
                    return Step::Wait;
                }
                self.state = State::behind(region, listed);
                Step::Again
            }
            State::Next { region } => self.next(region),
            State::Markup { region, mut call } => {
                let (json, is_over) = call.take(&mut self.held, &self.tools);
                self.parts.arguments(&json);
                if !is_over {
                    self.state = State::Markup { region, call };
                    return Step::Wait;
                }
                self.parts.end();
                self.state = match call.dialect {
                    Dialect::Function => State::Closing(region.closing()),
                    // The mark that closes a call of GLM closes the tag.
                    Dialect::Keyed => State::Text,
                    dialect @ (Dialect::Invoke | Dialect::Dsml) => State::NextMarkup { region, dialect },
                };
                Step::Again
            }
            State::NextMarkup { region, dialect } => {
                let rest = self.held.trim_start();
                let begins = dialect.around_name().0;
                if rest.starts_with(begins) {
                    self.held = rest.to_owned();
                    return self.markup(region, dialect, 0);
                }
                if begins.starts_with(rest) {
                    return Step::Wait;
                }
                self.state = State::Closing(region.closing());
                Step::Again
            }
            State::Closing(marks) => self.closing(marks),
            State::OtherFence => self.other_fence(),
        }
    }

    /// Searches for the opening of a call.
    fn find_opening(&mut self) -> Step {
        if !self.has_text && self.syntax.is_bare() {
            let start = self.held.len() - self.held.trim_start().len();
            match self.held[start..].chars().next() {
                None => {
                    self.emit_text_to(start);
                    return Step::Wait;
                }
                Some('{' | '[') => {
                    self.emit_text_to(start);
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
                    self.emit_text_to(at);
                    self.state = State::Within { region, opened: mark.len() };
                    return Step::Again;
                }
            }
            if self.syntax.marks().iter().any(|(mark, _)| mark.starts_with(rest)) {
                self.emit_text_to(at);
                return Step::Wait;
            }
        }
        self.emit_text_to(self.held.len());
        Step::Wait
    }

    /// Inspects the text behind an opening mark.
    fn within(&mut self, region: Region, opened: usize) -> Step {
        let mut opened = opened;
        if region == Region::Fence {
            let Some(line) = self.held[opened..].find('\n') else {
                let kind = self.held[opened..].trim();
                if CALL_FENCES.iter().any(|fenced| fenced.starts_with(kind)) {
                    return Step::Wait;
                }
                return self.not_a_call(region, opened);
            };
            if !CALL_FENCES.contains(&self.held[opened..opened + line].trim()) {
                return self.not_a_call(region, opened);
            }
            opened += line + 1;
        }
        let at = self.past_space(opened);
        match (self.held[at..].chars().next(), region) {
            (None, _) => Step::Wait,
            (Some('{'), _) => self.object(region, at, at, false),
            // Python's calls are in a list too.
            (Some('['), Region::Pythonic) if !self.held[at + 1..].trim_start().starts_with('{') => {
                match self.held[at + 1..].trim_start().is_empty() {
                    true => Step::Wait,
                    false => self.literals(region, at),
                }
            }
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
            (Some(_), Region::MiniMax) => self.markup(region, Dialect::Invoke, at),
            (Some(_), Region::Dsml | Region::DsmlTools) => self.markup(region, Dialect::Dsml, at),
            (Some('<'), Region::Tag) | (Some(_), Region::SeedTag) => {
                self.markup(region, Dialect::Function, at)
            }
            (Some(_), Region::Tag) => self.markup(region, Dialect::Keyed, at),
            (Some(_), Region::Pythonic | Region::Braced) => self.literals(region, at),
            (Some(_), _) => self.not_a_call(region, at),
        }
    }

    /// Searches for the beginning of a call in markup.
    fn markup(&mut self, region: Region, dialect: Dialect, at: usize) -> Step {
        match dialect.head(&self.held[at..]) {
            Head::More => Step::Wait,
            Head::None => self.not_a_call(region, self.held.ceil_char_boundary(at + 1)),
            Head::Begins(tool, length) => {
                self.begin(at + length, &tool);
                self.state = State::Markup { region, call: MarkupCall::new(dialect, tool) };
                Step::Again
            }
        }
    }

    /// Waits for the closing mark of calls in a notation of their own.
    fn literals(&mut self, region: Region, at: usize) -> Step {
        let Some(closing) = region.closing().first() else { return self.not_a_call(region, at) };
        let Some(end) = self.held[at..].find(closing).map(|end| at + end) else { return Step::Wait };
        let text = &self.held[at..end];
        let calls = match region {
            Region::Braced => gemma_call(text).map(|call| vec![call]),
            _ => python_calls(text),
        };
        match calls {
            Some(calls) => self.called(end + closing.len(), &calls, State::Text),
            None => self.not_a_call(region, end),
        }
    }

    /// Checks whether an object is a call, or else whether the whole value, whose first object it is, consists of calls.
    fn object(&mut self, region: Region, value: usize, object: usize, listed: bool) -> Step {
        match inspect_object(&self.held[object..]) {
            ObjectHead::More => Step::Wait,
            ObjectHead::Call { name, at, objects } if !region.is_strict() || self.tools.has(&name) => {
                self.begin(object + at, &name);
                self.state = State::Arguments { region, end: JsonScanner::default(), objects, listed };
                Step::Again
            }
            ObjectHead::Call { .. } | ObjectHead::Whole => {
                self.whole(region, value, listed && value == object)
            }
        }
    }

    /// Waits for a complete value.
    fn whole(&mut self, region: Region, at: usize, listed: bool) -> Step {
        self.state = State::Value { region, at, end: JsonScanner::default(), listed };
        Step::Again
    }

    /// Searches for the arguments behind a name.
    fn named(&mut self, at: usize) -> Step {
        let rest = &self.held[at..];
        let end = rest.find(['{', '\n', '<', '`']).unwrap_or(rest.len()).min(MAX_TOOL_NAME);
        if end == rest.len() {
            return Step::Wait;
        }
        if rest.as_bytes()[end] != b'{' || !is_valid_tool_name(name(&rest[..end])) {
            let end = rest.ceil_char_boundary(end);
            return self.not_a_call(Region::List, at + end);
        }
        let tool = name(&rest[..end]).to_owned();
        self.called_by_name(Region::List, &tool, at + end)
    }

    /// Searches for the name and the arguments of a call of DeepSeek or Kimi.
    fn separated(&mut self, region: Region, opened: usize) -> Step {
        let (all, begin, ended) = match region {
            Region::Section => (SECTION, SECTION_CALL, SECTION_CALL_END),
            _ => (CALLS_BEGIN, CALL_BEGIN, CALL_END),
        };
        let mut at = opened;
        if self.held.starts_with(all) {
            let rest = self.held[at..].trim_start();
            if let Some(after) = rest.strip_prefix(begin) {
                at = self.held.len() - after.len();
            } else if begin.starts_with(rest) {
                return Step::Wait;
            } else {
                return self.not_a_call(region, opened);
            }
        }
        let rest = &self.held[at..];
        let longest = rest.ceil_char_boundary(MAX_HEADER);
        let end = rest.find('{').unwrap_or(rest.len()).min(longest);
        if let Some(closed) = rest[..end].find(ended) {
            return self.not_a_call(region, at + closed);
        }
        if end == rest.len() && end < longest.max(MAX_HEADER) {
            return Step::Wait;
        }
        let header = rest[..end].trim();
        if header.is_empty() && end < longest {
            return self.object(region, at + end, at + end, false);
        }
        let tool = if region == Region::Section { section_name(header) } else { separated_name(header) };
        match tool.filter(|_| rest[end..].starts_with('{')) {
            Some(tool) => {
                let tool = tool.to_owned();
                self.called_by_name(region, &tool, at + end)
            }
            None => self.not_a_call(region, at + end),
        }
    }

    /// Begins a call if its arguments begin at this position.
    fn called_by_name(&mut self, region: Region, tool: &str, at: usize) -> Step {
        match begins_object(&self.held[at..]) {
            None => Step::Wait,
            Some(false) => self.not_a_call(region, at + 1),
            Some(true) => {
                self.begin(at, tool);
                self.state =
                    State::Arguments { region, end: JsonScanner::default(), objects: 0, listed: false };
                Step::Again
            }
        }
    }

    /// Checks whether a value is a call.
    fn value(&mut self, region: Region, at: usize, end: usize, listed: bool) -> Step {
        let value = serde_json::from_str::<Value>(&self.held[at..end]).ok();
        match value.and_then(|value| self.tools.calls(&value, region.is_strict())) {
            Some(calls) => self.called(end, &calls, State::behind(region, listed)),
            None => self.not_a_call(region, end),
        }
    }

    /// Searches for another call in a list.
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
        self.state = State::behind(region, false);
        Step::Again
    }

    /// The end of the white space at a position.
    fn past_space(&self, at: usize) -> usize {
        self.held.len() - self.held[at..].trim_start().len()
    }

    /// Removes the held part of a value, up to its end. Returns that part and whether the value ended.
    fn take_scanned(&mut self, end: &mut JsonScanner) -> (String, bool) {
        let (length, is_over) = match end.scan(&self.held) {
            Extent::More => (self.held.len(), false),
            Extent::Ends(length) | Extent::Broken(length) => (length, true),
        };
        end.discard_scanned();
        (self.held.drain(..length).collect(), is_over)
    }

    /// Removes the first bytes up to `end` as the beginning of a call.
    fn begin(&mut self, end: usize, tool: &str) {
        self.held.drain(..end);
        self.space.clear();
        (self.has_text, self.called) = (false, true);
        self.parts.begin(tool);
    }

    /// Removes the first bytes up to `end` as complete calls.
    fn called(&mut self, end: usize, calls: &[FunctionCall], then: State) -> Step {
        self.held.drain(..end);
        self.space.clear();
        (self.has_text, self.called) = (false, true);
        calls.iter().for_each(|call| self.parts.call(call));
        self.state = then;
        Step::Again
    }

    /// Returns the first bytes up to `end` as text, the opening mark included.
    fn not_a_call(&mut self, region: Region, end: usize) -> Step {
        self.emit_text_to(end);
        self.state = if region == Region::Fence { State::OtherFence } else { State::Text };
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
            self.state = State::Text;
        }
        Step::Again
    }

    /// Passes text on up to the end of a fence.
    fn other_fence(&mut self) -> Step {
        if let Some(at) = self.held.find(FENCE) {
            self.emit_text_to(at + FENCE.len());
            self.state = State::Text;
            return Step::Again;
        }
        let kept = self.held.trim_end_matches('`').len();
        self.emit_text_to(kept);
        Step::Wait
    }

    /// Passes the first bytes of the held text on as text.
    fn emit_text_to(&mut self, end: usize) {
        let rest = self.held.split_off(end);
        let text = std::mem::replace(&mut self.held, rest);
        self.emit_text(&text);
    }

    fn emit_text(&mut self, text: &str) {
        let kept = text.trim_end().len();
        if kept > 0 {
            let said = std::mem::take(&mut self.space) + &text[..kept];
            self.has_text = true;
            self.parts.text(&said);
        }
        self.space.push_str(&text[kept..]);
    }
}

/// The name of a tool without the marks between it and its arguments.
fn name(text: &str) -> &str {
    let end = [ARGUMENTS, CALL_ID].iter().filter_map(|mark| text.find(mark)).min().unwrap_or(text.len());
    text[..end].trim()
}

/// The name of a tool around its separator: it stands behind it if the kind of the call precedes it, else before it.
fn separated_name(header: &str) -> Option<&str> {
    let (before, behind) = header.split_once(SEPARATOR)?;
    let behind = behind.find(FENCE).map_or(behind, |fence| &behind[..fence]).trim();
    let name = if behind.is_empty() { before.trim() } else { behind };
    is_valid_tool_name(name).then_some(name)
}

/// The name of a tool in Kimi's header: `functions.NAME:NUMBER` and the mark before the arguments.
fn section_name(header: &str) -> Option<&str> {
    let name = header.strip_suffix(SECTION_ARGUMENTS)?.trim();
    let name = name.strip_prefix(RECIPIENT).and_then(|name| name.strip_prefix('.')).unwrap_or(name);
    let name = name.rsplit_once(':').map_or(name, |(name, _)| name);
    is_valid_tool_name(name).then_some(name)
}
