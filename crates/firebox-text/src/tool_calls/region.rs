//! The contexts in which marks allow calls.

use super::marks::{CALL_END, CALLS_END, FENCE, FUNCTIONS_END, TAG_END};

/// The kind of context in which a call may occur.
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
    /// Returns whether only declared tools count as calls, because other text looks like calls too.
    pub fn is_strict(self) -> bool {
        matches!(self, Self::Bare | Self::Fence)
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
        }
    }
}
