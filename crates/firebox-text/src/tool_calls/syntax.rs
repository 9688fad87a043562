//! The syntaxes of tool calls, by model family.

use std::borrow::Cow;

use super::marks::{
    ARGUMENTS, BRACED, BRACED_END, CALL, CALL_BEGIN, CALL_END, CALL_ID, CALLS_BEGIN, CALLS_END, CHANNEL,
    CONSTRAIN, DSML, DSML_END, DSML_TOOLS, DSML_TOOLS_END, END, FENCE, FUNCTIONS, FUNCTIONS_END, FUNCTOOLS,
    LISTED, MESSAGE, MINIMAX, MINIMAX_END, PYTHON, PYTHONIC, PYTHONIC_END, RECIPIENT, RETURN, SECTION,
    SECTION_ARGUMENTS, SECTION_CALL, SECTION_CALL_END, SECTION_END, SEED_TAG, SEED_TAG_END, SEPARATOR, START,
    TAG, TAG_END, TAGS, TAGS_END, TOOL_FIELD_END, TOOLCALL, TOOLCALL_END,
};
use super::region::Region;

/// The syntax in which a family of models writes tool calls.
///
/// ```
/// use firebox_text::CallSyntax;
///
/// assert_eq!(CallSyntax::from_template("… within <tool_call></tool_call> XML tags …"), CallSyntax::Tagged);
/// assert_eq!(CallSyntax::from_template("{% for message in messages %}…"), CallSyntax::Fenced);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallSyntax {
    /// Qwen, Hermes, SmolLM and others: `<tool_call>` around an object, or around the markup of Qwen3-Coder, Seed-OSS or GLM.
    Tagged,
    /// MiniMax-M1, Apriel and Nemotron Nano 2: `<tool_calls>` or `<TOOLCALL>` around one or more objects.
    Enclosed,
    /// MiniMax-M2: `<minimax:tool_call>` around calls that are marked up as `<invoke name="NAME">`.
    Invoked,
    /// DeepSeek-V3.2 and V4: `<｜DSML｜function_calls>` around calls that are marked up as `<｜DSML｜invoke name="NAME">`.
    Dsml,
    /// LFM2: `<|tool_call_start|>` before a list of Python's calls.
    Pythonic,
    /// Gemma 4: `<|tool_call>`, `call:`, a name, and arguments in braces.
    Braced,
    /// Kimi K2: `<|tool_call_begin|>`, `functions.`, a name and a number, `<|tool_call_argument_begin|>` and arguments.
    Sections,
    /// Llama 3: the answer is an object of `name` and `parameters`, after `<|python_tag|>` or without.
    Bare,
    /// Mistral: `[TOOL_CALLS]` before a list of objects, or before a name and `[ARGS]`.
    Listed,
    /// Phi-4-mini and Granite: `<|tool_call|>` or `functools` before a list of objects.
    Functions,
    /// DeepSeek-V3.1: `<｜tool▁call▁begin｜>`, a name, `<｜tool▁sep｜>` and arguments.
    Separated,
    /// DeepSeek-V3 and R1: like `Separated`, with `function` before the name, and arguments in a fence of backticks.
    SeparatedFence,
    /// gpt-oss: messages in channels; those addressed to a tool are calls. Thoughts have a channel too.
    Channels,
    /// Unknown: an answer that is an object, or one in a fence of backticks, that calls a declared tool.
    Fenced,
}

impl CallSyntax {
    /// All syntaxes.
    pub const ALL: [Self; 14] = [
        Self::Tagged,
        Self::Bare,
        Self::Listed,
        Self::Functions,
        Self::Separated,
        Self::SeparatedFence,
        Self::Channels,
        Self::Fenced,
        Self::Enclosed,
        Self::Invoked,
        Self::Dsml,
        Self::Pythonic,
        Self::Braced,
        Self::Sections,
    ];

    /// Determines the syntax from a model's chat template.
    pub fn from_template(template: &str) -> Self {
        let has = |mark: &str| template.contains(mark);
        if has(SEPARATOR) {
            if has("```json") { Self::SeparatedFence } else { Self::Separated }
        } else if has(CHANNEL) && has(CALL) {
            Self::Channels
        } else if has(SECTION_CALL) {
            Self::Sections
        } else if has(MINIMAX) {
            Self::Invoked
        } else if has("DSML") {
            Self::Dsml
        } else if has(PYTHONIC) {
            Self::Pythonic
        } else if has(BRACED) {
            Self::Braced
        } else if has(TAG) || has(SEED_TAG) {
            Self::Tagged
        } else if has(TAGS) || has(TOOLCALL) {
            Self::Enclosed
        } else if has(LISTED) {
            Self::Listed
        } else if has(FUNCTIONS) || has(FUNCTOOLS) || has(TOOL_FIELD_END) {
            Self::Functions
        } else if has(PYTHON) || has("\"parameters\": dictionary") {
            Self::Bare
        } else {
            Self::Fenced
        }
    }

    /// Control tokens that mark calls. A detokenizer that omits special tokens drops them, so they have to be restored before the text
    /// is read.
    pub fn control_tokens(self) -> &'static [&'static str] {
        match self {
            Self::Tagged => &[TAG, TAG_END, SEED_TAG, SEED_TAG_END, TAGS, TAGS_END],
            Self::Enclosed => &[TAGS, TAGS_END, TOOLCALL, TOOLCALL_END],
            Self::Invoked => &[MINIMAX, MINIMAX_END],
            Self::Dsml => &[DSML, DSML_END, DSML_TOOLS, DSML_TOOLS_END],
            Self::Pythonic => &[PYTHONIC, PYTHONIC_END],
            Self::Braced => &[BRACED, BRACED_END, "<|\"|>"],
            Self::Sections => &[SECTION, SECTION_CALL, SECTION_ARGUMENTS, SECTION_CALL_END, SECTION_END],
            Self::Bare => &[PYTHON, TAG, TAG_END],
            Self::Listed => &[LISTED, ARGUMENTS, CALL_ID],
            Self::Functions => &[FUNCTIONS, FUNCTIONS_END],
            Self::Separated | Self::SeparatedFence => {
                &[CALLS_BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, CALLS_END]
            }
            Self::Fenced => &[TAG, TAG_END, CALLS_BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, CALLS_END],
            Self::Channels => &[START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN],
        }
    }

    /// Returns whether these tokens occur in every answer, with or without tools.
    pub fn is_always_marked(self) -> bool {
        self == Self::Channels
    }

    /// The beginning of an answer that is only a call of this tool, or of any tool. It is followed by the arguments if there is a tool
    /// and the syntax [names it first](Self::names_tool_first), else by an object of name and arguments.
    pub fn opening(self, tool: Option<&str>) -> Cow<'static, str> {
        match (self, tool) {
            (Self::Tagged, _) => "<tool_call>\n".into(),
            (Self::Enclosed, _) => "<tool_calls>\n".into(),
            (Self::Invoked, _) => format!("{MINIMAX}\n").into(),
            (Self::Dsml, _) => format!("{DSML}\n").into(),
            (Self::Pythonic, _) => PYTHONIC.into(),
            (Self::Braced, _) => BRACED.into(),
            (Self::Sections, Some(tool)) => {
                format!("{SECTION}{SECTION_CALL}{RECIPIENT}.{tool}:0{SECTION_ARGUMENTS}").into()
            }
            (Self::Sections, None) => format!("{SECTION}{SECTION_CALL}").into(),
            (Self::Listed, _) => LISTED.into(),
            (Self::Functions, _) => FUNCTIONS.into(),
            (Self::Separated, Some(tool)) => format!("{CALLS_BEGIN}{CALL_BEGIN}{tool}{SEPARATOR}").into(),
            (Self::SeparatedFence, Some(tool)) => {
                format!("{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}{tool}\n```json\n").into()
            }
            (Self::Separated | Self::SeparatedFence, None) => format!("{CALLS_BEGIN}{CALL_BEGIN}").into(),
            (Self::Channels, tool) => {
                let to = tool.map(|tool| format!(".{tool}")).unwrap_or_default();
                format!("{CHANNEL}commentary to={RECIPIENT}{to} {CONSTRAIN}json{MESSAGE}").into()
            }
            (Self::Bare | Self::Fenced, _) => "".into(),
        }
    }

    /// Returns whether the name of a tool precedes its arguments, rather than being a field beside them.
    pub fn names_tool_first(self) -> bool {
        matches!(self, Self::Separated | Self::SeparatedFence | Self::Channels | Self::Sections)
    }

    /// The key of the arguments in a call's object.
    pub fn arguments_key(self) -> &'static str {
        match self {
            Self::Bare => "parameters",
            _ => "arguments",
        }
    }

    /// Returns whether even a single call is written as a list.
    pub fn always_lists(self) -> bool {
        matches!(self, Self::Listed | Self::Functions)
    }

    /// The opening marks of calls and the contexts that they open.
    pub(super) fn marks(self) -> &'static [(&'static str, Region)] {
        match self {
            Self::Tagged => &[(TAG, Region::Tag), (SEED_TAG, Region::SeedTag), (TAGS, Region::Tags)],
            Self::Enclosed => &[(TAGS, Region::Tags), (TOOLCALL, Region::ToolCall)],
            Self::Invoked => &[(MINIMAX, Region::MiniMax)],
            Self::Dsml => &[(DSML, Region::Dsml), (DSML_TOOLS, Region::DsmlTools)],
            Self::Pythonic => &[(PYTHONIC, Region::Pythonic)],
            Self::Braced => &[(BRACED, Region::Braced)],
            Self::Sections => &[(SECTION, Region::Section), (SECTION_CALL, Region::Section)],
            Self::Bare => &[(PYTHON, Region::Bare), (TAG, Region::Tag)],
            Self::Listed => &[(LISTED, Region::List)],
            Self::Functions => &[(FUNCTIONS, Region::Functions), (FUNCTOOLS, Region::Functions)],
            Self::Separated | Self::SeparatedFence => {
                &[(CALLS_BEGIN, Region::Separated), (CALL_BEGIN, Region::Separated)]
            }
            // DeepSeek's own templates do not mention tools, but its models know the marks.
            Self::Fenced => &[
                (FENCE, Region::Fence),
                (TAG, Region::Tag),
                (CALLS_BEGIN, Region::Separated),
                (CALL_BEGIN, Region::Separated),
            ],
            Self::Channels => &[],
        }
    }

    /// Returns whether an answer may begin with the object itself.
    pub(super) fn is_bare(self) -> bool {
        matches!(self, Self::Bare | Self::Fenced)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_that_are_special_tokens_are_restored() {
        for syntax in CallSyntax::ALL {
            for (mark, _) in syntax.marks() {
                let is_text = !mark.starts_with(['<', '[']);
                assert!(is_text || syntax.control_tokens().contains(mark), "{syntax:?}: {mark}");
            }
            let [opens, closes] =
                ["<tool_call>", "</tool_call>"].map(|tag| syntax.control_tokens().contains(&tag));
            assert_eq!(opens, closes, "{syntax:?}");
        }
    }
}
