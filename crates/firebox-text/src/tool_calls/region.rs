//! The contexts in which marks allow calls.

use super::marks::{
    BRACED_END, CALL_END, CALLS_END, DSML_END, DSML_TOOLS_END, FENCE, FUNCTIONS_END, MINIMAX_END,
    PYTHONIC_END, SECTION_CALL_END, SECTION_END, SEED_TAG_END, TAG_END, TAGS_END, TOOLCALL_END,
};

/// The kind of context in which a call may occur.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Region {
    Tag,
    Bare,
    List,
    Functions,
    Separated,
    Fence,
    SeedTag,
    Tags,
    ToolCall,
    /// Several calls of MiniMax-M2, or of DeepSeek-V3.2, or of DeepSeek-V4.
    MiniMax,
    Dsml,
    DsmlTools,
    Pythonic,
    Braced,
    Section,
}

impl Region {
    /// Returns whether only declared tools count as calls, because other text looks like calls too.
    pub fn is_strict(self) -> bool {
        matches!(self, Self::Bare | Self::Fence)
    }

    /// The closing mark of a context whose opening mark is followed by an object, if by no other notation.
    pub fn encloses_objects(self) -> Option<&'static str> {
        let is_marked = !matches!(
            self,
            Self::Bare | Self::List | Self::Functions | Self::Separated | Self::Fence | Self::Section
        );
        self.closing().first().copied().filter(|_| is_marked)
    }

    /// The marks that may follow a call, in this order.
    pub fn closing(self) -> &'static [&'static str] {
        match self {
            Self::Tag => &[TAG_END],
            Self::Bare => &[";"],
            Self::List => &[],
            Self::Functions => &[FUNCTIONS_END],
            Self::Separated => &[FENCE, CALL_END, CALLS_END],
            Self::Fence => &[FENCE],
            Self::SeedTag => &[SEED_TAG_END],
            Self::Tags => &[TAGS_END],
            Self::ToolCall => &[TOOLCALL_END],
            Self::MiniMax => &[MINIMAX_END],
            Self::Dsml => &[DSML_END],
            Self::DsmlTools => &[DSML_TOOLS_END],
            Self::Pythonic => &[PYTHONIC_END],
            Self::Braced => &[BRACED_END],
            Self::Section => &[SECTION_CALL_END, SECTION_END],
        }
    }
}
