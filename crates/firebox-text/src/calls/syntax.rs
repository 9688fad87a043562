use super::reader::Region;

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
    /// Nothing is known: an answer that is an object, or one in a fence of backticks, that calls a tool which is there.
    Fenced,
}

impl CallSyntax {
    /// That of a model by the text of its chat template.
    pub fn of(template: &str) -> Self {
        let has = |mark: &str| template.contains(mark);
        if has(TAG) {
            Self::Tagged
        } else if has(LISTED) {
            Self::Listed
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
            Self::Bare => &[PYTHON],
            Self::Listed => &[LISTED, ARGUMENTS, CALL_ID],
            Self::Fenced => &[],
        }
    }

    /// What an answer begins with that is a call and nothing else.
    pub fn opening(self) -> &'static str {
        match self {
            Self::Tagged => "<tool_call>\n",
            Self::Listed => LISTED,
            Self::Bare | Self::Fenced => "",
        }
    }

    /// What the arguments of a call are called in its object.
    pub fn arguments(self) -> &'static str {
        match self {
            Self::Bare => "parameters",
            Self::Tagged | Self::Listed | Self::Fenced => "arguments",
        }
    }

    /// Whether calls are in a list even if there is one.
    pub fn lists(self) -> bool {
        self == Self::Listed
    }

    /// What opens calls, and how it goes on then.
    pub(super) fn marks(self) -> &'static [(&'static str, Region)] {
        match self {
            Self::Tagged => &[(TAG, Region::Tag)],
            Self::Bare => &[(PYTHON, Region::Bare), (TAG, Region::Tag)],
            Self::Listed => &[(LISTED, Region::List)],
            Self::Fenced => &[(FENCE, Region::Fence), (TAG, Region::Tag)],
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
