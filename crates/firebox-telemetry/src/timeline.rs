use std::cell::Cell;
use std::collections::VecDeque;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::names::{Kind, Shape};
use super::trace;

/// Events that are remembered unless told otherwise: ten megabytes, a minute and a half of a hundred tokens a second
/// through 28 layers.
pub const TIMELINE_EVENTS: usize = 1 << 18;

/// What happened when, on which thread: the newest events of a program, for a trace file.
///
/// Where it is off, which it is at first, asking for that is all that is done. Clones are the same timeline.
#[derive(Debug, Clone, Default)]
pub struct Timeline(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Tells it from all others of the process, the ones that are gone too.
    id: u64,
    on: AtomicBool,
    // A lock that nobody waits for takes a fifth of the time that is allowed, and events stay in order.
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
    lanes: Vec<String>,
    /// Names of the models.
    tracks: Vec<String>,
}

/// Whose an event is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Track(u16);

/// The row of a thread, in which its events are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Lane(u16);

impl Track {
    pub(super) fn of(self, names: &[String]) -> &str {
        names.get(usize::from(self.0)).map_or("", String::as_str)
    }
}

impl Lane {
    pub(super) fn number(self) -> u32 {
        self.0.into()
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Event {
    pub kind: Kind,
    pub track: Track,
    pub lane: Lane,
    /// Nanoseconds since the timeline was switched on.
    pub at: u64,
    pub took: u64,
    pub numbers: [u64; 2],
}

/// Something that happened, for who looks while it does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drawn {
    /// What it was.
    pub kind: Kind,
    /// The model it belongs to.
    pub model: String,
    /// Nanoseconds since the timeline was switched on.
    pub at: u64,
    /// Nanoseconds it took; none for what takes no time.
    pub took: u64,
    /// What its kind [says](Kind::numbers) they are.
    pub numbers: [u64; 2],
}

/// What a file is written from.
pub(super) struct Recording {
    pub events: Vec<Event>,
    pub lanes: Vec<String>,
    pub tracks: Vec<String>,
    pub lost: u64,
}

thread_local! {
    /// The lane of this thread in the timeline that it drew on last.
    static LANE: Cell<(u64, u16)> = const { Cell::new((0, 0)) };
}

impl Timeline {
    /// Remembers the newest `most` events from now on, and forgets all before.
    pub fn start(&self, most: usize) {
        let mut state = self.state();
        state.began = Some(Instant::now());
        state.most = most.max(1);
        state.events.clear();
        state.lost = 0;
        drop(state);
        self.0.on.store(true, Ordering::Relaxed);
    }

    /// Remembers nothing more. What is remembered stays.
    pub fn stop(&self) {
        self.0.on.store(false, Ordering::Relaxed);
    }

    /// Whether anything is remembered.
    pub fn is_on(&self) -> bool {
        self.0.on.load(Ordering::Relaxed)
    }

    /// Who is called so.
    pub fn track(&self, name: &str) -> Track {
        let tracks = &mut self.state().tracks;
        let found = tracks.iter().position(|known| known == name).unwrap_or_else(|| {
            tracks.push(name.to_owned());
            tracks.len() - 1
        });
        Track(u16::try_from(found).unwrap_or(u16::MAX))
    }

    /// Adds what happened on this thread. Where it is a mark or a level the end does not count.
    pub fn span(&self, kind: Kind, track: Track, numbers: [u64; 2], began: Instant, ended: Instant) {
        let mut state = self.state();
        let lane = state.lane_of_thread(self.0.id);
        state.push(kind, track, lane, numbers, [began, ended]);
    }

    /// What is remembered of what happened since `from`, as far as it is of a kind that is wanted, and where to go on from.
    /// 0 is when the timeline was switched on.
    pub fn since(&self, from: u64, wanted: impl Fn(Kind) -> bool) -> (Vec<Drawn>, u64) {
        let state = self.state();
        let next = state.lost + state.events.len() as u64;
        // Who comes from before it was switched on again gets all there is.
        let from = if from > next { 0 } else { from };
        let known = usize::try_from(from.saturating_sub(state.lost)).unwrap_or(usize::MAX);
        let events = state.events.iter().skip(known).filter(|event| wanted(event.kind));
        let drawn = events.map(|event| Drawn {
            kind: event.kind,
            model: event.track.of(&state.tracks).to_owned(),
            at: event.at,
            took: event.took,
            numbers: event.numbers,
        });
        (drawn.collect(), next)
    }

    /// Nanoseconds since it was switched on; nothing where it never was.
    pub fn now(&self) -> Option<u64> {
        Some(self.state().began?.elapsed().as_nanos() as u64)
    }

    /// How many events are remembered, and how many were forgotten for them.
    pub fn counts(&self) -> (usize, u64) {
        let state = self.state();
        (state.events.len(), state.lost)
    }

    /// Writes a trace that `chrome://tracing` and <https://ui.perfetto.dev> open.
    pub fn write(&self, to: impl Write) -> io::Result<()> {
        let state = self.state();
        let recording = Recording {
            events: state.events.iter().copied().collect(),
            lanes: state.lanes.clone(),
            tracks: state.tracks.clone(),
            lost: state.lost,
        };
        // Those who are drawing go on while the file is written.
        drop(state);
        trace::write(&recording, to)
    }

    /// The same, into a file.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        let mut file = io::BufWriter::new(std::fs::File::create(path)?);
        self.write(&mut file)?;
        file.flush()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Whoever panicked with the lock has left an event more or less.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn lane_of_thread(&mut self, timeline: u64) -> Lane {
        LANE.with(|cached| match cached.get() {
            (of, lane) if of == timeline => Lane(lane),
            _ => {
                let lane = u16::try_from(self.lanes.len()).unwrap_or(u16::MAX);
                if lane < u16::MAX {
                    let thread = std::thread::current();
                    self.lanes.push(thread.name().map_or_else(|| format!("thread {lane}"), str::to_owned));
                }
                cached.set((timeline, lane));
                Lane(lane)
            }
        })
    }

    fn push(&mut self, kind: Kind, track: Track, lane: Lane, numbers: [u64; 2], [from, to]: [Instant; 2]) {
        let Some(began) = self.began else { return };
        // What began before it was switched on is cut off there.
        let since = |instant: Instant| instant.saturating_duration_since(began).as_nanos() as u64;
        let (at, ended) = (since(from), since(to));
        let took = if kind.shape() == Shape::Span { ended.saturating_sub(at) } else { 0 };
        if self.events.len() >= self.most {
            self.events.pop_front();
            self.lost += 1;
        }
        self.events.push_back(Event { kind, track, lane, at, took, numbers });
    }
}
