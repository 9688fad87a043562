//! The grammar of an answer that may call tools: text, and calls whose arguments have to fit.

use std::fmt::Write as _;

use super::marks::{
    ARGUMENTS, CALL, CALL_BEGIN, CALL_ID, CALLS_BEGIN, CHANNEL, CONSTRAIN, END, FUNCTIONS, FUNCTOOLS, LISTED,
    MESSAGE, PYTHON, RETURN, SECTION, SECTION_ARGUMENTS, SECTION_CALL, SECTION_CALL_END, SEPARATOR, START,
};
use super::syntax::CallSyntax;
use crate::tokenizer::Tokenizer;

/// White space within calls. It is bounded, because small models would write it forever.
const SPACE: &str = r"[ \t\r\n]{0,32}";

/// A tool that an answer may call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallableTool {
    /// Its name, which is [valid](crate::is_valid_tool_name).
    pub name: String,
    /// The grammar of its arguments, as an expression of Lark.
    pub arguments: String,
}

impl CallSyntax {
    /// The grammar, in `llguidance`'s notation of Lark, of an answer with text and calls of `tools`: behind a mark that opens a call,
    /// only a call with its arguments can follow. `text` is an expression for an answer without calls; without one it is any text.
    ///
    /// Returns `None` if calls cannot be told from text: in channels whose marks are no control tokens, and in a syntax without
    /// marks if `text` is given.
    pub fn answer_grammar(
        self,
        tokenizer: &Tokenizer,
        tools: &[CallableTool],
        text: Option<&str>,
    ) -> Option<String> {
        let mut lark = Lark { syntax: self, tokenizer, rules: String::new(), segments: Vec::new() };
        match text {
            Some(_) if self.is_bare() => None,
            Some(text) => {
                lark.add_calls(tools);
                if self == Self::Channels {
                    lark.add_channels(tools)?;
                } else {
                    lark.add_marked(tools, false);
                }
                let calls = lark.segments.join(" | ");
                Some(format!("start: {text} | calls\ncalls: ({calls})+\n{}", lark.rules))
            }
            None if self == Self::Channels => {
                lark.add_calls(tools);
                lark.add_channels(tools)?;
                lark.add_plain_channels();
                let messages = lark.segments.join(" | ");
                Some(format!("start: first_text? ({messages})*\n{}", lark.rules))
            }
            None => {
                lark.add_calls(tools);
                lark.add_text();
                lark.add_marked(tools, true);
                if self.is_bare() {
                    lark.add_bare(tools);
                }
                let segments = lark.segments.join(" | ");
                Some(format!("start: ({segments})* TEXT?\n{}", lark.rules))
            }
        }
    }
}

/// A grammar under construction.
struct Lark<'a> {
    syntax: CallSyntax,
    tokenizer: &'a Tokenizer,
    rules: String,
    /// What an answer consists of, as alternatives.
    segments: Vec<String>,
}

impl Lark<'_> {
    fn rule(&mut self, name: &str, body: &str) {
        // A `String` takes all that is written.
        let _ = writeln!(self.rules, "{name}: {body}");
    }

    /// The id of a mark that is a control token, which is no text.
    fn control(&self, mark: &str) -> Option<u32> {
        self.tokenizer.token_to_id(mark).filter(|&id| self.tokenizer.is_control(id))
    }

    /// A mark as an expression.
    fn mark(&self, mark: &str) -> String {
        match self.control(mark) {
            Some(id) => format!("<[{id}]>"),
            None => format!("/{}/", escaped(mark)),
        }
    }

    /// Adds the rules of calls and their lists.
    fn add_calls(&mut self, tools: &[CallableTool]) {
        let key = self.syntax.arguments_key();
        for (index, CallableTool { name, arguments }) in tools.iter().enumerate() {
            let name = escaped(name);
            self.rule(&format!("args_{index}"), arguments);
            self.rule(&format!("NAME_{index}"), &format!("/{name}/"));
            let fields =
                format!(r#"{SPACE}"name"{SPACE}:{SPACE}"{name}"{SPACE},{SPACE}"{key}"{SPACE}:{SPACE}"#);
            self.rule(&format!("FIELDS_{index}"), &format!("/{fields}/"));
            self.rule(&format!("HEAD_{index}"), &format!(r"/\{{{fields}/"));
            self.rule(&format!("call_{index}"), &format!("HEAD_{index} args_{index} TAIL"));
        }
        self.rule("call", &alternatives(tools, |index| format!("call_{index}")));
        self.rule("list", "OPEN call (COMMA call)* CLOSE");
        self.rule("SPACE", &format!("/{}/", SPACE.replace("{0,", "{1,")));
        self.rule("TAIL", &format!(r"/{SPACE}\}}/"));
        self.rule("OPEN", &format!(r"/\[{SPACE}/"));
        self.rule("COMMA", &format!("/{SPACE},{SPACE}/"));
        self.rule("CLOSE", &format!(r"/{SPACE}\]/"));
    }

    /// Adds the rules of text, and the control tokens that mean nothing here.
    fn add_text(&mut self) {
        if self.syntax.is_bare() {
            // An answer that begins with an object is a call, unless its first key is none of a call. `;` separates calls.
            self.rule("KEY", r#"/"[^"\\]*"/ & ~/"(name|type|id|function|arguments|parameters)"/"#);
            self.rule("OTHER", r#"KEY | /[^"\s]/"#);
            self.rule("OBJECT", r"/\{\s*/ OTHER");
            self.rule("FIRST", r"/\s*/ (/[^\s{\[;]/ | OBJECT | /\[\s*/ (/[^\s{]/ | OBJECT))");
            self.rule("TEXT", r"FIRST /(?s:.*)/ | /\s+/");
        } else {
            self.rule("TEXT", "/(?s:.+)/");
        }
        let marks: Vec<u32> = self.syntax.marks().iter().filter_map(|(mark, _)| self.control(mark)).collect();
        let others = self.other_controls(&marks);
        if !others.is_empty() {
            self.segments.push(format!("TEXT? <[{others}]>"));
        }
    }

    /// The control tokens beside these and the ends, as ranges.
    fn other_controls(&self, marks: &[u32]) -> String {
        let known = 0..self.tokenizer.vocab_size() as u32;
        let others = known.filter(|id| {
            self.tokenizer.is_control(*id) && !self.tokenizer.is_eos(*id) && !marks.contains(id)
        });
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for id in others {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == id => *last = id,
                _ => ranges.push((id, id)),
            }
        }
        ranges.iter().map(|(first, last)| format!("{first}-{last}")).collect::<Vec<_>>().join(",")
    }

    /// Adds a segment that begins with a mark, and with the text before it if there may be any.
    fn segment(&mut self, mark: &str, behind: &str, with_text: bool) {
        if !with_text {
            let mark = self.mark(mark);
            self.segments.push(format!("{mark} {behind}"));
            return;
        }
        if let Some(id) = self.control(mark) {
            self.segments.push(format!("TEXT? <[{id}]> {behind}"));
        }
        // Readers take a mark that is spelled by other tokens for a mark too.
        self.segment_after(&escaped(mark), behind);
    }

    /// Adds a segment of text up to the first match of a pattern, and what follows.
    fn segment_after(&mut self, pattern: &str, behind: &str) {
        let name = format!("until_{}", self.segments.len());
        self.rule(&format!("{name}[lazy]"), &format!("TEXT? /{pattern}/"));
        self.segments.push(format!("{name} {behind}"));
    }

    /// Adds the calls behind the marks of the syntax.
    fn add_marked(&mut self, tools: &[CallableTool], with_text: bool) {
        let has = |mark: &str| self.syntax.marks().iter().any(|(known, _)| *known == mark);
        let [python, listed, functions, functools, separated, sections] =
            [PYTHON, LISTED, FUNCTIONS, FUNCTOOLS, CALL_BEGIN, SECTION_CALL].map(has);
        // Where the family marks up its calls or writes them in another notation, an object between the marks is read as well.
        for (mark, region) in self.syntax.marks() {
            if let Some(end) = region.encloses_objects() {
                let end = match self.control(end) {
                    Some(id) => format!("SPACE? <[{id}]>"),
                    None => format!("/{SPACE}{}/", escaped(end)),
                };
                let list = if self.syntax == CallSyntax::Enclosed { "(call | list)" } else { "call" };
                self.segment(mark, &format!("SPACE? {list} {end}"), with_text);
            }
        }
        if python {
            self.segment(PYTHON, "SPACE? call", with_text);
        }
        if listed {
            let (id, arguments) = (self.mark(CALL_ID), self.mark(ARGUMENTS));
            let of = |index| {
                format!("NAME_{index} ({id} /[a-zA-Z0-9_]{{1,64}}/)? {arguments}? SPACE? args_{index}")
            };
            self.rule("named", &alternatives(tools, of));
            self.segment(LISTED, "SPACE? (list | named)", with_text);
        }
        if functions {
            self.segment(FUNCTIONS, "SPACE? list", with_text);
        }
        // The word alone is text.
        if functools && with_text {
            let of = |index| format!("FIELDS_{index} args_{index} TAIL");
            self.rule("open_call", &alternatives(tools, of));
            self.segment_after(r"functools\s*\[", "SPACE? call (COMMA call)* CLOSE");
            self.segment_after(r"functools\s*\{", "open_call");
        }
        if separated {
            let separator = self.mark(SEPARATOR);
            let of = |index| {
                let fence = format!(r"/{SPACE}```json{SPACE}/");
                format!(
                    "NAME_{index} {separator} SPACE? args_{index} | /function/ {separator} NAME_{index} {fence} args_{index}"
                )
            };
            self.rule("separated", &alternatives(tools, of));
            let begin = self.mark(CALL_BEGIN);
            self.segment(CALLS_BEGIN, &format!("SPACE? {begin} separated"), with_text);
            self.segment(CALL_BEGIN, "separated", with_text);
        }
        if sections {
            let [begin, arguments, end] =
                [SECTION_CALL, SECTION_ARGUMENTS, SECTION_CALL_END].map(|mark| self.mark(mark));
            let of = |index| {
                let number = r"/:[0-9]{1,3} ?/";
                format!(r"/functions\./ NAME_{index} {number} {arguments} SPACE? args_{index} SPACE? {end}")
            };
            self.rule("section_call", &alternatives(tools, of));
            self.segment(SECTION, &format!("SPACE? {begin} section_call"), with_text);
            self.segment(SECTION_CALL, "section_call", with_text);
        }
    }

    /// Adds calls without a mark, at the beginning of an answer or of a fence.
    fn add_bare(&mut self, tools: &[CallableTool]) {
        for index in 0..tools.len() {
            self.rule(&format!("BARE_{index}"), &format!("/{SPACE}/ HEAD_{index}"));
            self.rule(&format!("FIRST_{index}"), &format!(r"/{SPACE}\[{SPACE}/ HEAD_{index}"));
        }
        let of = |index| {
            format!("BARE_{index} args_{index} TAIL | FIRST_{index} args_{index} TAIL (COMMA call)* CLOSE")
        };
        self.rule("bare", &alternatives(tools, of));
        self.segments.push("bare".into());
        self.segments.push(format!("/{SPACE};/"));
        if self.syntax == CallSyntax::Fenced {
            let fence = r"```[ \t]*(json|tool_calls?|tool_code|tool)?[ \t]*\r?\n";
            self.segment_after(fence, "");
        }
    }

    /// Adds the messages to tools.
    fn add_channels(&mut self, tools: &[CallableTool]) -> Option<()> {
        let id = |mark| self.control(mark).map(|id| id.to_string());
        let marks = [START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN].map(id);
        let [Some(start), Some(channel), Some(constrain), Some(message), Some(end), Some(call), Some(over)] =
            marks
        else {
            return None;
        };
        // A header without a recipient.
        self.rule("HEADER", "/(?s:.+)/ & ~/(?s:.*)to=(?s:.*)/");
        // One alternative for each token: a token that belongs to two sets would be read as one of the first alone.
        self.rule("recipient", &format!("<[{start}]> | <[{channel}]>"));
        self.rule("field", &format!("(recipient | <[{constrain}]>) HEADER?"));
        self.rule("message", &format!("<[{message}]>"));
        self.rule("end", &format!("<[{end},{call},{over}]>"));
        for (index, tool) in tools.iter().enumerate() {
            let to = format!(r"to=(functions\.)?{}", escaped(&tool.name));
            self.rule(&format!("TO_{index}"), &format!(r"/[a-z ]{{0,32}}{to} ?(json|code)? ?/"));
        }
        let of = |index| format!("(field* recipient)? TO_{index} field* message SPACE? args_{index} end?");
        self.rule("to_tool", &alternatives(tools, of));
        self.segments.push("to_tool".into());
        Some(())
    }

    /// Adds messages to the user, and an answer that begins without a header.
    fn add_plain_channels(&mut self) {
        self.rule("TEXT", "/(?s:.+)/");
        self.rule("FIRST_TEXT", r"/(?s:.+)/ & ~/\s*to=(?s:.*)/");
        self.rule("first_text", "FIRST_TEXT end?");
        self.rule("plain", "field+ message TEXT? end?");
        self.segments.push("plain".into());
    }
}

/// An expression for every tool, as alternatives.
fn alternatives(tools: &[CallableTool], of: impl Fn(usize) -> String) -> String {
    (0..tools.len()).map(of).collect::<Vec<_>>().join(" | ")
}

/// A text as a regular expression that matches it.
fn escaped(text: &str) -> String {
    let mut expression = String::new();
    for letter in text.chars() {
        // `\<` and `\>` are borders of words.
        if letter.is_ascii_punctuation() && !['_', '<', '>'].contains(&letter) {
            expression.push('\\');
        }
        expression.push(letter);
    }
    expression
}
