//! Portions of a checkpoint, read ahead of their use into a few buffers that are used again and again.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use memmap2::MmapMut;

use crate::disk::ReadAt;
use crate::error::StoreError;
use crate::portion::{Loaded, Portion, anonymous};

/// How a stream reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamConfig {
    /// Buffers, the one in use included. With a single one nothing is read ahead.
    pub buffers: usize,
    /// Threads that read. One keeps a disk busy that is asked for millions of bytes at a time.
    pub readers: usize,
}

impl Default for StreamConfig {
    fn default() -> Self {
        Self { buffers: 3, readers: 1 }
    }
}

/// What a stream has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StreamReport {
    /// Portions that were read.
    pub portions: u64,
    /// Bytes of their tensors.
    pub bytes: u64,
    /// Time that readers spent reading.
    pub reading: Duration,
    /// Time that users spent waiting for what they had asked for.
    pub waiting: Duration,
}

impl std::ops::Add for StreamReport {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            portions: self.portions + other.portions,
            bytes: self.bytes + other.bytes,
            reading: self.reading + other.reading,
            waiting: self.waiting + other.waiting,
        }
    }
}

/// Hands out portions in turn, round and round, and reads the next ones meanwhile.
///
/// A portion that is handed out has a buffer to itself until the last tensor over it is dropped. Portions may be asked
/// for in any order and from several threads; asked for in order they are there when they are needed. What is
/// [skipped](Self::skip) is not read ahead.
pub struct Stream {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    disk: Arc<dyn ReadAt>,
    portions: Vec<Arc<Portion>>,
    /// Bytes of a buffer: those of the largest portion.
    buffer_bytes: usize,
    state: Mutex<State>,
    changed: Condvar,
    counts: Counts,
}

#[derive(Default)]
struct Counts {
    portions: AtomicU64,
    bytes: AtomicU64,
    reading: AtomicU64,
    waiting: AtomicU64,
}

struct State {
    /// How many buffers there may be.
    buffers: usize,
    /// How many there are, wherever they are.
    made: usize,
    free: Vec<MmapMut>,
    reading: Vec<usize>,
    ready: VecDeque<(usize, Result<MmapMut, StoreError>)>,
    /// What somebody waits for, in the order in which it was asked for.
    wanted: Vec<usize>,
    /// Where reading ahead begins.
    next: usize,
    /// What a round consists of.
    round: Range<usize>,
    skipped: Vec<bool>,
    stopped: bool,
}

/// Portions that were asked for. Those that nobody takes after all are not waited for.
pub struct Order<'a> {
    shared: &'a Arc<Shared>,
    coming: VecDeque<usize>,
}

impl Iterator for Order<'_> {
    type Item = Result<Loaded, StoreError>;

    fn next(&mut self) -> Option<Self::Item> {
        let portion = self.coming.pop_front()?;
        let began = Instant::now();
        let mut state = self.shared.state();
        let read = loop {
            if let Some(at) = state.ready.iter().position(|(ready, _)| *ready == portion)
                && let Some((_, read)) = state.ready.remove(at)
            {
                break read;
            }
            state = self.shared.wait(state);
        };
        state.forget(portion);
        state.next = portion + 1;
        drop(state);
        self.shared.changed.notify_all();
        add(&self.shared.counts.waiting, began.elapsed());
        let loaded = |buffer| {
            let lease = Lease { buffer: Some(buffer), shared: self.shared.clone() };
            Loaded::new(self.shared.portions[portion].clone(), Bytes::from_owner(lease))
        };
        Some(read.map(loaded))
    }
}

impl Drop for Order<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        for portion in self.coming.drain(..) {
            state.forget(portion);
        }
        drop(state);
        // What was read for nobody can make room now.
        self.shared.changed.notify_all();
    }
}

/// A buffer that is in use, and goes back to where it came from.
struct Lease {
    buffer: Option<MmapMut>,
    shared: Arc<Shared>,
}

impl AsRef<[u8]> for Lease {
    fn as_ref(&self) -> &[u8] {
        self.buffer.as_deref().unwrap_or(&[])
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.shared.state().give_back(buffer);
            self.shared.changed.notify_all();
        }
    }
}

impl State {
    fn give_back(&mut self, buffer: MmapMut) {
        if self.made > self.buffers {
            self.made -= 1;
        } else {
            self.free.push(buffer);
        }
    }

    /// One who waited for a portion waits no longer.
    fn forget(&mut self, portion: usize) {
        if let Some(at) = self.wanted.iter().position(|wanted| *wanted == portion) {
            self.wanted.remove(at);
        }
    }

    /// What to read next, if there is something and a buffer for it.
    fn job(&mut self) -> Option<usize> {
        let coming = |state: &Self, portion: usize| {
            state.reading.contains(&portion) || state.ready.iter().any(|(ready, _)| *ready == portion)
        };
        let has_buffer = !self.free.is_empty() || self.made < self.buffers;
        if let Some(&wanted) = self.wanted.iter().find(|wanted| !coming(self, **wanted)) {
            return (has_buffer || self.made == 0 || self.sacrifice()).then_some(wanted);
        }
        let Range { start, end } = self.round;
        let next = self.next.clamp(start, end);
        (next..end)
            .chain(start..next)
            .filter(|_| has_buffer)
            .find(|portion| !self.skipped[*portion] && !coming(self, *portion))
    }

    /// Frees the buffer of a portion that was read ahead and nobody has asked for, the one least near.
    fn sacrifice(&mut self) -> bool {
        let distance = |portion: usize| (portion + self.skipped.len() - self.next) % self.skipped.len();
        let unasked = self.ready.iter().enumerate().filter(|(_, (ready, _))| !self.wanted.contains(ready));
        let Some((at, _)) = unasked.max_by_key(|(_, (ready, _))| distance(*ready)) else { return false };
        if let Some((_, Ok(buffer))) = self.ready.remove(at) {
            self.free.push(buffer);
        }
        !self.free.is_empty() || self.made < self.buffers
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that holds the lock leaves the state half changed, whatever else panics.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    fn read_until_stopped(&self) {
        let mut state = self.state();
        loop {
            if state.stopped {
                return;
            }
            let Some(portion) = state.job() else {
                state = self.wait(state);
                continue;
            };
            state.reading.push(portion);
            let free = state.free.pop();
            state.made += usize::from(free.is_none());
            drop(state);
            let read = self.read(portion, free);
            state = self.state();
            state.reading.retain(|reading| *reading != portion);
            state.made -= usize::from(read.is_err());
            state.ready.push_back((portion, read));
            self.changed.notify_all();
        }
    }

    fn read(&self, portion: usize, buffer: Option<MmapMut>) -> Result<MmapMut, StoreError> {
        let mut buffer = buffer.map_or_else(|| anonymous(self.buffer_bytes), Ok)?;
        let began = Instant::now();
        self.portions[portion].read(&*self.disk, &mut buffer)?;
        add(&self.counts.reading, began.elapsed());
        self.counts.portions.fetch_add(1, Ordering::Relaxed);
        self.counts.bytes.fetch_add(self.portions[portion].bytes(), Ordering::Relaxed);
        Ok(buffer)
    }
}

impl Stream {
    /// Portions of one checkpoint, in the order in which a round needs them.
    pub fn new(
        disk: Arc<dyn ReadAt>,
        portions: Vec<Arc<Portion>>,
        config: StreamConfig,
    ) -> Result<Self, StoreError> {
        let buffer_bytes = portions.iter().map(|portion| portion.buffer_bytes()).max().unwrap_or(0);
        let state = State {
            buffers: config.buffers,
            made: 0,
            free: Vec::new(),
            reading: Vec::new(),
            ready: VecDeque::new(),
            wanted: Vec::new(),
            next: 0,
            round: 0..portions.len(),
            skipped: vec![false; portions.len()],
            stopped: false,
        };
        let shared = Arc::new(Shared {
            disk,
            portions,
            buffer_bytes,
            state: Mutex::new(state),
            changed: Condvar::new(),
            counts: Counts::default(),
        });
        let mut stream = Self { shared, threads: Vec::new() };
        for _ in 0..config.readers.max(1) {
            let shared = stream.shared.clone();
            let thread = std::thread::Builder::new()
                .name("firebox-read".into())
                .spawn(move || shared.read_until_stopped())
                .map_err(|source| StoreError::Thread { source })?;
            stream.threads.push(thread);
        }
        Ok(stream)
    }

    /// A portion, as soon as it is there.
    ///
    /// # Panics
    /// If there is no such portion.
    pub fn take(&self, portion: usize) -> Result<Loaded, StoreError> {
        self.order([portion]).next().unwrap_or_else(|| unreachable!("one was ordered"))
    }

    /// Several portions, each as soon as it is there, while the next ones are being read.
    pub fn order(&self, portions: impl IntoIterator<Item = usize>) -> Order<'_> {
        let coming: VecDeque<usize> = portions.into_iter().collect();
        let mut state = self.shared.state();
        if let Some(&first) = coming.front() {
            state.next = first;
        }
        state.wanted.extend(&coming);
        drop(state);
        self.shared.changed.notify_all();
        Order { shared: &self.shared, coming }
    }

    /// The portions, in order.
    pub fn portions(&self) -> &[Arc<Portion>] {
        &self.shared.portions
    }

    /// Where it reads from.
    pub fn disk(&self) -> &dyn ReadAt {
        &*self.shared.disk
    }

    /// Whether a portion is left out when reading ahead.
    pub fn skip(&self, portion: usize, skipped: bool) {
        self.shared.state().skipped[portion] = skipped;
        self.shared.changed.notify_all();
    }

    /// Which portions a round consists of for now: no others are read ahead.
    pub fn read_ahead(&self, round: Range<usize>) {
        let count = self.shared.portions.len();
        let end = round.end.min(count);
        self.shared.state().round = round.start.min(end)..end;
        self.shared.changed.notify_all();
    }

    /// How many buffers there may be from now on; one is always made when it is needed. Those too many go at once, or
    /// as soon as they are given back.
    pub fn set_buffers(&self, buffers: usize) {
        let mut state = self.shared.state();
        state.buffers = buffers;
        while state.made > state.buffers && (!state.free.is_empty() || state.sacrifice()) {
            state.free.pop();
            state.made -= 1;
        }
        drop(state);
        self.shared.changed.notify_all();
    }

    /// How many buffers there may be.
    pub fn buffers(&self) -> usize {
        self.shared.state().buffers
    }

    /// Bytes of one buffer.
    pub fn buffer_bytes(&self) -> usize {
        self.shared.buffer_bytes
    }

    /// What it has done so far.
    pub fn report(&self) -> StreamReport {
        let counts = &self.shared.counts;
        let time = |nanos: &AtomicU64| Duration::from_nanos(nanos.load(Ordering::Relaxed));
        StreamReport {
            portions: counts.portions.load(Ordering::Relaxed),
            bytes: counts.bytes.load(Ordering::Relaxed),
            reading: time(&counts.reading),
            waiting: time(&counts.waiting),
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("portions", &self.shared.portions.len())
            .field("buffers", &self.buffers())
            .field("report", &self.report())
            .finish()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.shared.state().stopped = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            // A reader that panicked has said so already; there is nobody here to tell.
            drop(thread.join());
        }
    }
}

fn add(nanos: &AtomicU64, time: Duration) {
    nanos.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
}
