//! What a timeline has recorded.

use super::names::Kind;

/// The model of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Track(pub(super) u16);

/// The row of a trace that holds the events of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TraceRow(pub u16);

impl Track {
    pub(super) fn of(self, names: &[String]) -> &str {
        names.get(usize::from(self.0)).map_or("", String::as_str)
    }
}

impl TraceRow {
    pub(super) fn number(self) -> u32 {
        self.0.into()
    }
}

/// A recorded event.
#[derive(Debug, Clone, Copy)]
pub(super) struct Event {
    pub kind: Kind,
    pub track: Track,
    pub row: TraceRow,
    /// Nanoseconds since the timeline was started.
    pub at: u64,
    pub took: u64,
    pub numbers: [u64; 2],
}

/// The contents of a trace file.
pub(super) struct Recording {
    pub events: Vec<Event>,
    pub rows: Vec<String>,
    pub tracks: Vec<String>,
    pub lost: u64,
}
