use std::borrow::Cow;

use super::marked::Region;

/// How a family of models writes calls of tools.
///
/// ```
/// use firebox_text::CallSyntax;
///
/// assert_eq!(CallSyntax::of("… within <tool_call></tool_call> XML tags …"), CallSyntax::Tagged);
/// assert_eq!(CallSyntax::of("{% for message in messages %}…"), CallSyntax::Fenced);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallSyntax {
    /// Qwen, Hermes, SmolLM and others: `<tool_call>` around an object, or around the markup of Qwen3-Coder or GLM.
    Tagged,
    /// Llama 3: the answer is an object of `name` and `parameters`, after `<|python_tag|>` or without.
    Bare,
    /// Mistral: `[TOOL_CALLS]` before a list of objects, or before a name and `[ARGS]`.
    Listed,
    /// Phi-4-mini and Granite: `<|tool_call|>` or `functools` before a list of objects.
    Functions,
    /// DeepSeek-V3.1: `<｜tool▁call▁begin｜>`, a name, `<｜tool▁sep｜>` and arguments.
    Separated,
    /// DeepSeek-V3 and R1: the same with `function` before the name, and arguments in a fence of backticks.
    SeparatedFence,
    /// gpt-oss: messages in channels, of which one that is addressed to a tool is a call. What it thinks is in a channel too.
    Channels,
    /// Nothing is known: an answer that is an object, or one in a fence of backticks, that calls a tool which is there.
    Fenced,
}

impl CallSyntax {
    /// That of a model by the text of its chat template.
    pub fn of(template: &str) -> Self {
        let has = |mark: &str| template.contains(mark);
        if has(SEPARATOR) {
            if has("```json") { Self::SeparatedFence } else { Self::Separated }
        } else if has(CHANNEL) && has(CALL) {
            Self::Channels
        } else if has(TAG) {
            Self::Tagged
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

    /// Control tokens that tell calls apart from text. Whoever makes text of tokens leaves them out, so they have to be
    /// put back before the text is read.
    pub fn control(self) -> &'static [&'static str] {
        match self {
            Self::Tagged => &[TAG, TAG_END],
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

    /// Whether there are such tokens in every answer, with tools or without.
    pub fn is_everywhere(self) -> bool {
        self == Self::Channels
    }

    /// What an answer begins with that is a call of this tool, or of any, and nothing else. Behind it are the
    /// arguments if there is a tool and the syntax [names it before](Self::names_before), or else an object of name and
    /// arguments.
    pub fn opening(self, tool: Option<&str>) -> Cow<'static, str> {
        match (self, tool) {
            (Self::Tagged, _) => "<tool_call>\n".into(),
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

    /// Whether the name of a tool stands before its arguments instead of beside them.
    pub fn names_before(self) -> bool {
        matches!(self, Self::Separated | Self::SeparatedFence | Self::Channels)
    }

    /// What the arguments of a call are called in its object.
    pub fn arguments(self) -> &'static str {
        match self {
            Self::Bare => "parameters",
            _ => "arguments",
        }
    }

    /// Whether calls are in a list even if there is one.
    pub fn lists(self) -> bool {
        matches!(self, Self::Listed | Self::Functions)
    }

    /// What opens calls, and how it goes on then.
    pub(super) fn marks(self) -> &'static [(&'static str, Region)] {
        match self {
            Self::Tagged => &[(TAG, Region::Tag)],
            Self::Bare => &[(PYTHON, Region::Bare), (TAG, Region::Tag)],
            Self::Listed => &[(LISTED, Region::List)],
            Self::Functions => &[(FUNCTIONS, Region::Functions), (FUNCTOOLS, Region::Functions)],
            Self::Separated | Self::SeparatedFence => {
                &[(CALLS_BEGIN, Region::Separated), (CALL_BEGIN, Region::Separated)]
            }
            // DeepSeek's own templates tell of no tools, but its models know their marks.
            Self::Fenced => &[
                (FENCE, Region::Fence),
                (TAG, Region::Tag),
                (CALLS_BEGIN, Region::Separated),
                (CALL_BEGIN, Region::Separated),
            ],
            Self::Channels => &[],
        }
    }

    /// Whether an answer may begin with the object itself.
    pub(super) fn is_bare(self) -> bool {
        matches!(self, Self::Bare | Self::Fenced)
    }
}

pub(super) const TAG: &str = "<tool_call>";
pub(super) const TAG_END: &str = "</tool_call>";
pub(super) const PYTHON: &str = "<|python_tag|>";
pub(super) const LISTED: &str = "[TOOL_CALLS]";
pub(super) const ARGUMENTS: &str = "[ARGS]";
pub(super) const CALL_ID: &str = "[CALL_ID]";
pub(super) const FENCE: &str = "```";
pub(super) const FUNCTIONS: &str = "<|tool_call|>";
pub(super) const FUNCTIONS_END: &str = "<|/tool_call|>";
pub(super) const FUNCTOOLS: &str = "functools";
/// Behind the tools that Phi-4-mini is told of.
const TOOL_FIELD_END: &str = "<|/tool|>";
pub(super) const CALLS_BEGIN: &str = "<｜tool▁calls▁begin｜>";
pub(super) const CALLS_END: &str = "<｜tool▁calls▁end｜>";
pub(super) const CALL_BEGIN: &str = "<｜tool▁call▁begin｜>";
pub(super) const CALL_END: &str = "<｜tool▁call▁end｜>";
pub(super) const SEPARATOR: &str = "<｜tool▁sep｜>";
pub(super) const START: &str = "<|start|>";
pub(super) const CHANNEL: &str = "<|channel|>";
pub(super) const CONSTRAIN: &str = "<|constrain|>";
pub(super) const MESSAGE: &str = "<|message|>";
pub(super) const END: &str = "<|end|>";
pub(super) const CALL: &str = "<|call|>";
pub(super) const RETURN: &str = "<|return|>";
/// Whom messages are addressed to that call the caller's tools, before the name of a tool.
pub(super) const RECIPIENT: &str = "functions";
