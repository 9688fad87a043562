//! Timelines in Chrome's trace format, which Perfetto opens too.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::{Map, Value};

use super::names::Shape;
use super::recording::{Event, Recording};

/// An entry of a trace.
#[derive(Serialize)]
struct Entry<'a> {
    name: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    cat: &'a str,
    ph: &'a str,
    /// Microseconds.
    ts: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    pid: u32,
    tid: u32,
    /// The scope of a mark: its thread.
    #[serde(skip_serializing_if = "Option::is_none")]
    s: Option<&'a str>,
    args: Map<String, Value>,
}

pub(super) fn write(recording: &Recording, mut to: impl Write) -> io::Result<()> {
    to.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
    let rows = recording.rows.iter().enumerate().map(|(row, name)| row_name(row, name));
    let events = recording.events.iter().map(|event| entry(event, &recording.tracks));
    for (at, entry) in rows.chain(events).enumerate() {
        to.write_all(if at == 0 { b"\n" } else { b",\n" })?;
        serde_json::to_writer(&mut to, &entry)?;
    }
    let lost = recording.lost;
    writeln!(to, "\n],\"otherData\":{{\"program\":\"firebox\",\"events_lost\":\"{lost}\"}}}}")
}

fn row_name(row: usize, name: &str) -> Entry<'static> {
    let args = Map::from_iter([("name".to_owned(), Value::from(name))]);
    Entry {
        name: "thread_name",
        cat: "",
        ph: "M",
        ts: 0.0,
        dur: None,
        pid: 1,
        tid: row as u32,
        s: None,
        args,
    }
}

fn entry<'a>(event: &Event, tracks: &'a [String]) -> Entry<'a> {
    let micros = |nanos: u64| nanos as f64 / 1000.0;
    let names = event.kind.numbers().iter();
    let numbers = names.zip(event.numbers).map(|(name, number)| ((*name).to_owned(), Value::from(number)));
    let mut args = Map::from_iter(numbers);
    let shape = event.kind.shape();
    let track = event.track.of(tracks);
    if !track.is_empty() {
        if shape == Shape::Level {
            // The levels of several models share one chart.
            args = Map::from_iter([(track.to_owned(), Value::from(event.numbers[0]))]);
        } else {
            args.insert("model".to_owned(), track.into());
        }
    }
    let (ph, dur, s) = match shape {
        Shape::Span => ("X", Some(micros(event.took)), None),
        Shape::Mark => ("i", None, Some("t")),
        Shape::Level => ("C", None, None),
    };
    Entry {
        name: event.kind.name(),
        cat: event.kind.category(),
        ph,
        ts: micros(event.at),
        dur,
        pid: 1,
        tid: event.row.number(),
        s,
        args,
    }
}
