//! The ways in which a run ends.

/// Why a run is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ending {
    /// All steps were taken.
    Completed,
    /// As many evaluations as the settings say were no better than the best one.
    NoBetter,
    /// It was asked to stop, and can be resumed.
    Stopped,
}
