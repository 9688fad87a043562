//! The timeline of a program.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::names::{Kind, Shape};
use super::recording::{Event, Recording, TraceRow, Track};
use super::trace;

/// The default number of events: ten megabytes, or a minute and a half of a hundred tokens per second through 28 layers.
pub const TIMELINE_EVENTS: usize = 1 << 18;

/// The newest events of a program with their threads, for a trace file.
///
/// The timeline is off at first, and then costs one atomic read per event. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Timeline(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Distinguishes it from all other timelines of the process, past ones included.
    id: u64,
    on: AtomicBool,
    // A mutex without contention takes a fifth of the time that an event may take, and keeps events in order.
    state: Mutex<State>,
}

impl Default for Shared {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { id, on: AtomicBool::new(false), state: Mutex::default() }
    }
}

#[derive(Debug, Default)]
struct State {
    began: Option<Instant>,
    most: usize,
    events: VecDeque<Event>,
    lost: u64,
    rows: Vec<String>,
    /// Names of the models.
    tracks: Vec<String>,
}

/// An event, for clients that poll the timeline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimelineEvent {
    /// Its kind.
    pub kind: Kind,
    /// Its model.
    pub model: String,
    /// Nanoseconds since the timeline was started.
    pub at: u64,
    /// Its duration in nanoseconds; 0 for events without duration.
    pub took: u64,
    /// Its numbers, whose names the kind [defines](Kind::numbers).
    pub numbers: [u64; 2],
}

thread_local! {
    /// The row of this thread in the timeline that it wrote to last.
    static ROW: Cell<(u64, u16)> = const { Cell::new((0, 0)) };
}

impl Timeline {
    /// Starts to record the newest `most` events, and drops all earlier ones.
    pub fn start(&self, most: usize) {
        let mut state = self.state();
        state.began = Some(Instant::now());
        state.most = most.max(1);
        state.events.clear();
        state.lost = 0;
        drop(state);
        self.0.on.store(true, Ordering::Relaxed);
    }

    /// Stops recording. Recorded events are kept.
    pub fn stop(&self) {
        self.0.on.store(false, Ordering::Relaxed);
    }

    /// Returns whether events are recorded.
    pub fn is_on(&self) -> bool {
        self.0.on.load(Ordering::Relaxed)
    }

    /// Returns the track of a model.
    pub fn track(&self, name: &str) -> Track {
        let tracks = &mut self.state().tracks;
        let found = tracks.iter().position(|known| known == name).unwrap_or_else(|| {
            tracks.push(name.to_owned());
            tracks.len() - 1
        });
        Track(u16::try_from(found).unwrap_or(u16::MAX))
    }

    /// Records an event of this thread. Events without duration ignore the end.
    pub fn span(&self, kind: Kind, track: Track, numbers: [u64; 2], began: Instant, ended: Instant) {
        let mut state = self.state();
        let row = state.row_of_thread(self.0.id);
        state.push(kind, track, row, numbers, [began, ended]);
    }

    /// Returns the recorded events since position `from` whose kind is wanted, and the position for the next call. Position 0
    /// is the start of the timeline.
    pub fn since(&self, from: u64, wanted: impl Fn(Kind) -> bool) -> (Vec<TimelineEvent>, u64) {
        let state = self.state();
        let next = state.lost + state.events.len() as u64;
        // A position from before the last start returns all events.
        let from = if from > next { 0 } else { from };
        let known = usize::try_from(from.saturating_sub(state.lost)).unwrap_or(usize::MAX);
        let events = state.events.iter().skip(known).filter(|event| wanted(event.kind));
        let found = events.map(|event| TimelineEvent {
            kind: event.kind,
            model: event.track.of(&state.tracks).to_owned(),
            at: event.at,
            took: event.took,
            numbers: event.numbers,
        });
        (found.collect(), next)
    }

    /// Returns nanoseconds since the start; `None` if the timeline was never started.
    pub fn now(&self) -> Option<u64> {
        Some(self.state().began?.elapsed().as_nanos() as u64)
    }

    /// Returns the number of recorded events, and of those that were dropped for newer ones.
    pub fn counts(&self) -> (usize, u64) {
        let state = self.state();
        (state.events.len(), state.lost)
    }

    /// Writes a trace that `chrome://tracing` and <https://ui.perfetto.dev> open.
    pub fn write(&self, to: impl Write) -> io::Result<()> {
        let state = self.state();
        let recording = Recording {
            events: state.events.iter().copied().collect(),
            rows: state.rows.clone(),
            tracks: state.tracks.clone(),
            lost: state.lost,
        };
        // Events can be recorded while the file is written.
        drop(state);
        trace::write(&recording, to)
    }

    /// Writes a trace to a file.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        let mut file = io::BufWriter::new(std::fs::File::create(path)?);
        self.write(&mut file)?;
        file.flush()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // After a panic with the lock there is an event more or less, and nothing inconsistent.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn row_of_thread(&mut self, timeline: u64) -> TraceRow {
        ROW.with(|cached| match cached.get() {
            (of, row) if of == timeline => TraceRow(row),
            _ => {
                let row = u16::try_from(self.rows.len()).unwrap_or(u16::MAX);
                if row < u16::MAX {
                    let thread = std::thread::current();
                    self.rows.push(thread.name().map_or_else(|| format!("thread {row}"), str::to_owned));
                }
                cached.set((timeline, row));
                TraceRow(row)
            }
        })
    }

    fn push(&mut self, kind: Kind, track: Track, row: TraceRow, numbers: [u64; 2], [from, to]: [Instant; 2]) {
        let Some(began) = self.began else { return };
        // A span that began before the start is cut off there.
        let since = |instant: Instant| instant.saturating_duration_since(began).as_nanos() as u64;
        let (at, ended) = (since(from), since(to));
        let took = if kind.shape() == Shape::Span { ended.saturating_sub(at) } else { 0 };
        if self.events.len() >= self.most {
            self.events.pop_front();
            self.lost += 1;
        }
        self.events.push_back(Event { kind, track, row, at, took, numbers });
    }
}
