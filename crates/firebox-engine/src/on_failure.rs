//! What an engine does when its thread panics.

/// What an engine does when its thread panics outside a computation. All requests at hand fail either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnFailure {
    /// It starts again with the same models.
    #[default]
    Restart,
    /// It ends.
    End,
}
