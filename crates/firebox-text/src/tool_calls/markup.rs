//! Calls in markup, with a tag for each parameter: those of Qwen3-Coder, GLM, MiniMax and DeepSeek-V3.2.

use std::fmt::Write as _;

use serde_json::Value;

use super::declared_tools::Tools;
use super::tool_name::{MAX_TOOL_NAME, is_valid_tool_name};

/// The longest name of a parameter with its attributes.
const MAX_KEY: usize = 256;

/// How a call is marked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    /// Qwen3-Coder and Seed-OSS: `<function=NAME>`, `<parameter=KEY>VALUE</parameter>`, `</function>`. Qwen3-Coder has the value
    /// on lines of its own.
    Function,
    /// GLM: `NAME`, `<arg_key>KEY</arg_key>`, `<arg_value>VALUE</arg_value>`, `</tool_call>`.
    Keyed,
    /// MiniMax-M2: `<invoke name="NAME">`, `<parameter name="KEY">VALUE</parameter>`, `</invoke>`.
    Invoke,
    /// DeepSeek-V3.2: like `Invoke`, with `｜DSML｜` in all tags and the attribute `string` for whether a value is a text.
    Dsml,
}

/// The beginning of a call.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Head {
    /// The text may become one.
    More,
    /// It is none.
    None,
    /// The tool, and the bytes before its first parameter or its end.
    Begins(String, usize),
}

impl Dialect {
    fn opens_parameter(self) -> &'static str {
        match self {
            Self::Function => "<parameter=",
            Self::Keyed => "<arg_key>",
            Self::Invoke => "<parameter name=\"",
            Self::Dsml => "<｜DSML｜parameter name=\"",
        }
    }

    fn closes_value(self) -> &'static str {
        match self {
            Self::Function | Self::Invoke => "</parameter>",
            Self::Keyed => "</arg_value>",
            Self::Dsml => "</｜DSML｜parameter>",
        }
    }

    fn closes_call(self) -> &'static str {
        match self {
            Self::Function => "</function>",
            Self::Keyed => "</tool_call>",
            Self::Invoke => "</invoke>",
            Self::Dsml => "</｜DSML｜invoke>",
        }
    }

    /// What precedes and follows the name of the tool.
    pub fn around_name(self) -> (&'static str, &'static str) {
        match self {
            Self::Function => ("<function=", ">"),
            Self::Keyed => ("", ""),
            Self::Invoke => ("<invoke name=\"", "\">"),
            Self::Dsml => ("<｜DSML｜invoke name=\"", "\">"),
        }
    }

    /// Reads the beginning of a call. It is certain once a parameter or the end follows the name.
    pub fn head(self, text: &str) -> Head {
        let (before, behind) = self.around_name();
        let Some(rest) = text.strip_prefix(before) else {
            return if before.starts_with(text) { Head::More } else { Head::None };
        };
        // A name of GLM ends where the next tag begins.
        let longest = rest.floor_char_boundary(MAX_TOOL_NAME + 2);
        let Some(end) = rest[..longest].find(if behind.is_empty() { "<" } else { behind }) else {
            return if rest.len() <= longest { Head::More } else { Head::None };
        };
        let name = rest[..end].trim();
        if !is_valid_tool_name(name) {
            return Head::None;
        }
        let after = rest[end + behind.len()..].trim_start();
        let follows = [self.opens_parameter(), self.closes_call()];
        if follows.iter().any(|tag| after.starts_with(tag)) {
            return Head::Begins(name.to_owned(), text.len() - after.len());
        }
        if follows.iter().any(|tag| tag.starts_with(after)) { Head::More } else { Head::None }
    }
}

/// Makes JSON of the parameters of a call, as they arrive.
#[derive(Debug, Clone)]
pub(super) struct MarkupCall {
    pub dialect: Dialect,
    tool: String,
    /// Parameters so far.
    count: usize,
    /// The parameter whose value comes next.
    parameter: Option<Parameter>,
}

#[derive(Debug, Clone)]
struct Parameter {
    key: String,
    is_text: bool,
    /// Whether a part of the text was handed out.
    begun: bool,
    /// Whether the value has lines of its own.
    is_block: bool,
}

impl MarkupCall {
    pub fn new(dialect: Dialect, tool: String) -> Self {
        Self { dialect, tool, count: 0, parameter: None }
    }

    /// Takes what is certain from the text. Returns it as JSON, and whether the call has ended.
    pub fn take(&mut self, held: &mut String, tools: &Tools) -> (String, bool) {
        let mut json = String::new();
        loop {
            let goes_on = match self.parameter.take() {
                None => self.begin_parameter(held, tools, &mut json),
                Some(parameter) => self.value(parameter, held, tools, &mut json),
            };
            match goes_on {
                Some(true) => {}
                Some(false) => return (json, true),
                None => return (json, false),
            }
        }
    }

    /// Reads up to the next value. Returns whether one follows, or nothing as long as that is not known.
    fn begin_parameter(&mut self, held: &mut String, tools: &Tools, json: &mut String) -> Option<bool> {
        let (opens, closes) = (self.dialect.opens_parameter(), self.dialect.closes_call());
        let rest = held.trim_start();
        if let Some(after) = rest.strip_prefix(closes) {
            json.push_str(if self.count == 0 { "{}" } else { "}" });
            *held = after.to_owned();
            return Some(false);
        }
        let Some(rest) = rest.strip_prefix(opens) else {
            // Anything else ends the call, whose arguments are no JSON then.
            return if opens.starts_with(rest) || closes.starts_with(rest) { None } else { Some(false) };
        };
        let Some((key, is_text, value)) = self.key(rest) else {
            return (rest.len() > MAX_KEY).then_some(false);
        };
        let is_text = is_text.unwrap_or_else(|| tools.is_text(&self.tool, &key));
        json.push_str(if self.count == 0 { "{" } else { ", " });
        let _ = write!(json, "{}: ", Value::from(key.as_str()));
        self.count += 1;
        self.parameter = Some(Parameter { key, is_text, begun: false, is_block: false });
        *held = value.to_owned();
        Some(true)
    }

    /// Returns the key that a text begins with, whether the tag says that its value is a text, and what follows the tag.
    fn key<'t>(&self, text: &'t str) -> Option<(String, Option<bool>, &'t str)> {
        match self.dialect {
            Dialect::Function => text.split_once('>').map(|(key, rest)| (key.trim().to_owned(), None, rest)),
            Dialect::Keyed => {
                let (key, rest) = text.split_once("</arg_key>")?;
                let rest = rest.trim_start().strip_prefix("<arg_value>")?;
                Some((key.trim().to_owned(), None, rest))
            }
            Dialect::Invoke | Dialect::Dsml => {
                let (key, rest) = text.split_once('"')?;
                let (attributes, rest) = rest.split_once('>')?;
                let is_text = match attributes.trim() {
                    "string=\"true\"" => Some(true),
                    "string=\"false\"" => Some(false),
                    _ => None,
                };
                Some((key.to_owned(), is_text, rest))
            }
        }
    }

    /// Reads a value or a part of it. Returns true once it has ended.
    fn value(
        &mut self,
        mut parameter: Parameter,
        held: &mut String,
        tools: &Tools,
        json: &mut String,
    ) -> Option<bool> {
        if !parameter.begun {
            if held.is_empty() {
                self.parameter = Some(parameter);
                return None;
            }
            parameter.is_block = self.dialect == Dialect::Function && held.starts_with('\n');
            held.drain(..usize::from(parameter.is_block));
            parameter.begun = true;
            json.push_str(if parameter.is_text { "\"" } else { "" });
        }
        let closes = self.dialect.closes_value();
        // Some answers of Qwen3-Coder leave the end of a value out.
        let ends = [closes, if self.dialect == Dialect::Function { "</function>" } else { closes }];
        let found = ends.iter().filter_map(|end| Some((held.find(end)?, *end))).min();
        let Some((at, end)) = found else {
            if parameter.is_text {
                let mut certain = (0..held.len()).find(|&at| {
                    held.is_char_boundary(at) && ends.iter().any(|end| end.starts_with(&held[at..]))
                });
                let certain = certain.get_or_insert(held.len());
                let kept = usize::from(parameter.is_block && held[..*certain].ends_with('\n'));
                json.push_str(&escaped(&held[..*certain - kept]));
                held.drain(..*certain - kept);
            }
            self.parameter = Some(parameter);
            return None;
        };
        let text = &held[..at];
        let text = if parameter.is_block { text.strip_suffix('\n').unwrap_or(text) } else { text };
        match parameter.is_text {
            true => json.push_str(&format!("{}\"", escaped(text))),
            false => json.push_str(&tools.value(&self.tool, &parameter.key, text).to_string()),
        }
        held.drain(..at + if end == closes { end.len() } else { 0 });
        Some(true)
    }
}

/// Returns a text as it is between the quotes of JSON.
fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}
