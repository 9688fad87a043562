//! Reads units of a checkpoint ahead of their use, into a few buffers that are used again and again.

mod ring;
#[cfg(any(test, feature = "fuzzing"))]
mod ring_harness;

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::buffer::{BufferGuard, BufferHome, BufferPool, DetachFlag};
use crate::error::StoreError;
use crate::memory::{Memory, allocate};
use crate::read_at::ReadAt;
use crate::read_unit::{LoadedTensors, ReadUnit};
use ring::{Request, Ring};
#[cfg(feature = "fuzzing")]
pub use ring_harness::check_stream_events;

/// Buffers and threads of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamConfig {
    /// Buffers, the one in use included. With one buffer nothing is read ahead.
    pub buffers: usize,
    /// Reader threads. One keeps a disk busy that reads megabytes at a time.
    pub readers: usize,
}

impl Default for StreamConfig {
    fn default() -> Self {
        Self { buffers: 3, readers: 1 }
    }
}

/// Counts of a stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StreamReport {
    /// Read units that were read.
    pub units: u64,
    /// Bytes of their tensors.
    pub bytes: u64,
    /// Units that were ready when they were requested.
    pub found: u64,
    /// Units that were waited for.
    pub missed: u64,
    /// Time that readers spent reading.
    pub reading: Duration,
    /// Time that users waited for units.
    pub waiting: Duration,
}

impl std::ops::Add for StreamReport {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            units: self.units + other.units,
            bytes: self.bytes + other.bytes,
            found: self.found + other.found,
            missed: self.missed + other.missed,
            reading: self.reading + other.reading,
            waiting: self.waiting + other.waiting,
        }
    }
}

/// Observes reads and waits.
pub trait ReadObserver: fmt::Debug + Send + Sync {
    /// Whether events are reported. Called before every event, so it must be cheap.
    fn follows(&self) -> bool;

    /// A unit of so many bytes was read by the calling thread.
    fn read(&self, unit: usize, bytes: u64, began: Instant);

    /// A unit that was not ready was waited for.
    fn waited(&self, unit: usize, began: Instant);
}

/// Hands out units, round and round, and reads the next ones meanwhile.
///
/// A unit has a buffer to itself until the last tensor over it is dropped. Units may be requested in any order and from several threads.
/// Requested in order, they are ready when they are needed. [Skipped](Self::skip) units are not read ahead.
pub struct Stream {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    disk: Arc<dyn ReadAt>,
    units: Vec<Arc<ReadUnit>>,
    /// Bytes of a buffer: those of the largest unit.
    buffer_bytes: usize,
    state: Mutex<Ring>,
    changed: Condvar,
    counts: Counts,
    observer: RwLock<Option<Arc<dyn ReadObserver>>>,
    /// The pool that buffers are made from, and that detached buffers are released to.
    pool: Option<BufferPool>,
}

#[derive(Default)]
struct Counts {
    units: AtomicU64,
    bytes: AtomicU64,
    found: AtomicU64,
    missed: AtomicU64,
    reading: AtomicU64,
    waiting: AtomicU64,
}

/// Units that were requested, in order. Requests that are dropped are cancelled.
pub struct Requested<'a> {
    shared: &'a Arc<Shared>,
    requests: VecDeque<Request>,
}

impl Iterator for Requested<'_> {
    type Item = Result<LoadedTensors, StoreError>;

    fn next(&mut self) -> Option<Self::Item> {
        let Request { id, unit, .. } = self.requests.pop_front()?;
        let began = Instant::now();
        let mut state = self.shared.state();
        state.wait_for(id);
        self.shared.changed.notify_all();
        let mut waited = false;
        let read = loop {
            if let Some(at) = state.ready.iter().position(|(ready, _)| *ready == unit)
                && let Some((_, read)) = state.ready.remove(at)
            {
                break read;
            }
            waited = true;
            state = self.shared.wait(state);
        };
        state.cancel(id);
        state.advance_past(unit);
        drop(state);
        self.shared.changed.notify_all();
        let counts = &self.shared.counts;
        add(&counts.waiting, began.elapsed());
        if waited { &counts.missed } else { &counts.found }.fetch_add(1, Ordering::Relaxed);
        if waited && let Some(observer) = self.shared.observer() {
            observer.waited(unit, began);
        }
        let loaded = |buffer| self.shared.lend(buffer, &self.shared.units[unit], DetachFlag::default());
        Some(read.map(loaded))
    }
}

impl Drop for Requested<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        for request in self.requests.drain(..) {
            state.cancel(request.id);
        }
        drop(state);
        // A unit that nothing requests any more may give up its buffer.
        self.shared.changed.notify_all();
    }
}

impl BufferHome for Shared {
    fn release(&self, buffer: Memory, is_detached: bool) {
        if !is_detached {
            self.state().release(buffer);
            self.changed.notify_all();
        } else if let Some(pool) = &self.pool {
            pool.put(buffer);
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, Ring> {
        // Nothing panics between two changes that belong together.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, Ring>) -> MutexGuard<'a, Ring> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    fn read_until_stopped(&self) {
        let mut state = self.state();
        loop {
            if state.stopped {
                return;
            }
            let Some(unit) = state.next_read() else {
                state = self.wait(state);
                continue;
            };
            state.reading.push(unit);
            let free = state.free.pop();
            state.made += usize::from(free.is_none());
            drop(state);
            // A panic in the source of bytes is reported to those who wait.
            let read = catch_unwind(AssertUnwindSafe(|| self.read(unit, free)));
            let read = read.unwrap_or(Err(StoreError::ReaderPanicked));
            state = self.state();
            state.finish_read(unit, read);
            self.changed.notify_all();
        }
    }

    fn read(&self, unit: usize, buffer: Option<Memory>) -> Result<Memory, StoreError> {
        let mut buffer = buffer.map_or_else(|| self.allocate(self.buffer_bytes), Ok)?;
        let began = Instant::now();
        self.units[unit].read(&*self.disk, buffer.as_mut())?;
        add(&self.counts.reading, began.elapsed());
        self.counts.units.fetch_add(1, Ordering::Relaxed);
        self.counts.bytes.fetch_add(self.units[unit].bytes(), Ordering::Relaxed);
        if let Some(observer) = self.observer() {
            observer.read(unit, self.units[unit].bytes(), began);
        }
        Ok(buffer)
    }

    fn allocate(&self, bytes: usize) -> Result<Memory, StoreError> {
        match &self.pool {
            Some(pool) => pool.take(bytes),
            None => allocate(bytes),
        }
    }

    fn lend(self: &Arc<Self>, mut memory: Memory, unit: &Arc<ReadUnit>, flag: DetachFlag) -> LoadedTensors {
        memory.set_used(unit.buffer_bytes());
        LoadedTensors::new(unit.clone(), BufferGuard::new(memory, self.clone(), flag))
    }

    /// The observer, if it follows events now.
    fn observer(&self) -> Option<Arc<dyn ReadObserver>> {
        let observer = self.observer.read().unwrap_or_else(PoisonError::into_inner);
        observer.as_ref().filter(|observer| observer.follows()).cloned()
    }
}

impl Stream {
    /// Streams units of one checkpoint, which are given in the order in which a round needs them.
    pub fn new(
        disk: Arc<dyn ReadAt>,
        units: Vec<Arc<ReadUnit>>,
        config: StreamConfig,
    ) -> Result<Self, StoreError> {
        Self::with_pool(disk, units, config, None)
    }

    /// Streams units into buffers of a pool, to which detached buffers are released.
    pub fn with_pool(
        disk: Arc<dyn ReadAt>,
        units: Vec<Arc<ReadUnit>>,
        config: StreamConfig,
        pool: Option<BufferPool>,
    ) -> Result<Self, StoreError> {
        let buffer_bytes = units.iter().map(|unit| unit.buffer_bytes()).max().unwrap_or(0);
        let count = units.len();
        let shared = Arc::new(Shared {
            disk,
            units,
            buffer_bytes,
            state: Mutex::new(Ring::new(config.buffers, count)),
            changed: Condvar::new(),
            counts: Counts::default(),
            observer: RwLock::new(None),
            pool,
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

    /// Waits for a unit.
    ///
    /// # Panics
    /// If there is no such unit.
    pub fn take(&self, unit: usize) -> Result<LoadedTensors, StoreError> {
        self.request([unit]).next().unwrap_or_else(|| unreachable!("one was requested"))
    }

    /// Reads a unit, of the stream or another one of its checkpoint, into memory of its own instead of a buffer.
    pub fn read(&self, unit: &Arc<ReadUnit>) -> Result<LoadedTensors, StoreError> {
        let mut memory = self.shared.allocate(unit.buffer_bytes())?;
        unit.read(&*self.shared.disk, memory.as_mut())?;
        let flag = DetachFlag::default();
        flag.detach();
        Ok(self.shared.lend(memory, unit, flag))
    }

    /// Waits for several units that are needed at once. If there are fewer buffers, more are made, but not for several callers at the same
    /// time: they could wait for each other.
    ///
    /// # Panics
    /// If there is no such unit.
    pub fn take_all(&self, units: &[usize]) -> Result<Vec<LoadedTensors>, StoreError> {
        self.request_together(units.iter().copied(), units.len()).collect()
    }

    /// Requests several units. The result waits for each of them while the next ones are being read.
    ///
    /// # Panics
    /// If there is no such unit.
    pub fn request(&self, units: impl IntoIterator<Item = usize>) -> Requested<'_> {
        self.request_together(units, 1)
    }

    fn request_together(&self, units: impl IntoIterator<Item = usize>, together: usize) -> Requested<'_> {
        let count = self.shared.units.len();
        let mut state = self.shared.state();
        let requests: VecDeque<Request> = units
            .into_iter()
            .inspect(|unit| assert!(*unit < count, "unit {unit} of {count}"))
            .map(|unit| state.request(unit, together))
            .collect();
        if let Some(first) = requests.front() {
            state.next = first.unit;
        }
        drop(state);
        self.shared.changed.notify_all();
        Requested { shared: &self.shared, requests }
    }

    /// Reads successive units, except skipped ones, before all others that no caller waits for. Returns whether they can be
    /// [taken](Self::take) without waiting, because they are ready or could not be read. The unit that is needed last gives up its buffer
    /// for them; if there are fewer buffers, more are made.
    ///
    /// # Panics
    /// If there are no such units.
    pub fn prioritize(&self, units: Range<usize>) -> bool {
        let mut state = self.shared.state();
        assert!(units.end <= state.skipped.len(), "units {units:?} of {}", state.skipped.len());
        let missing = || units.clone().filter(|unit| !state.skipped[*unit]);
        if missing().all(|unit| state.is_settled(unit)) {
            return true;
        }
        if state.priority != units {
            state.next = units.start;
            state.priority = units;
            drop(state);
            self.shared.changed.notify_all();
        }
        false
    }

    /// Prioritizes no units any more.
    pub fn clear_priority(&self) {
        self.shared.state().priority = 0..0;
    }

    /// Takes a unit's buffer out of the ring for as long as its tensors are in use. The unused end of the buffer is returned to the system,
    /// and another buffer takes its place.
    pub fn detach(&self, loaded: &LoadedTensors) {
        if loaded.detach_flag().is_some_and(DetachFlag::detach) {
            loaded.trim();
            self.shared.state().made -= 1;
            self.shared.changed.notify_all();
        }
    }

    /// The units, in order.
    pub fn units(&self) -> &[Arc<ReadUnit>] {
        &self.shared.units
    }

    /// Sets whether a unit is left out when reading ahead.
    pub fn skip(&self, unit: usize, skipped: bool) {
        let mut state = self.shared.state();
        state.skipped[unit] = skipped;
        state.drop_stale();
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Sets which units a round consists of: no others are read ahead.
    pub fn read_ahead(&self, round: Range<usize>) {
        let count = self.shared.units.len();
        let end = round.end.min(count);
        let mut state = self.shared.state();
        state.round = round.start.min(end)..end;
        state.drop_stale();
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Sets how many buffers there may be; one is always made when it is needed. Surplus buffers are freed at once, or when they are
    /// released.
    pub fn set_buffers(&self, buffers: usize) {
        let mut state = self.shared.state();
        state.buffers = buffers;
        while state.made > state.buffers && state.free.pop().is_some() {
            state.made -= 1;
        }
        while state.made > state.buffers
            && let Some(at) = state.unrequested()
        {
            state.drop_ready(at);
        }
        drop(state);
        self.shared.changed.notify_all();
    }

    /// How many buffers there may be.
    pub fn buffers(&self) -> usize {
        self.shared.state().buffers
    }

    /// How many buffers there are, surplus ones in use included.
    pub fn made_buffers(&self) -> usize {
        self.shared.state().made
    }

    /// Waits until there are, and may be, fewer buffers than `count`, or until the time is over.
    pub fn wait_for_fewer_buffers(&self, count: usize, timeout: Duration) {
        let until = Instant::now() + timeout;
        let mut state = self.shared.state();
        while state.made.max(state.buffers) >= count {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let waited = self.shared.changed.wait_timeout(state, left);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Bytes of one buffer.
    pub fn buffer_bytes(&self) -> usize {
        self.shared.buffer_bytes
    }

    /// Sets the observer.
    pub fn set_observer(&self, observer: Arc<dyn ReadObserver>) {
        *self.shared.observer.write().unwrap_or_else(PoisonError::into_inner) = Some(observer);
    }

    /// The counts so far.
    pub fn report(&self) -> StreamReport {
        let counts = &self.shared.counts;
        let time = |nanos: &AtomicU64| Duration::from_nanos(nanos.load(Ordering::Relaxed));
        StreamReport {
            units: counts.units.load(Ordering::Relaxed),
            bytes: counts.bytes.load(Ordering::Relaxed),
            found: counts.found.load(Ordering::Relaxed),
            missed: counts.missed.load(Ordering::Relaxed),
            reading: time(&counts.reading),
            waiting: time(&counts.waiting),
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("units", &self.shared.units.len())
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
            // Panics of readers were reported to those who waited.
            drop(thread.join());
        }
    }
}

fn add(nanos: &AtomicU64, time: Duration) {
    nanos.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::ring_harness::check_stream_events as check;
    use super::*;
    use crate::checkpoint::Checkpoint;
    use crate::read_at::ReadMethod;

    #[test]
    fn the_fuzzing_corpus() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/stream_ring");
        let stories = std::fs::read_dir(folder).unwrap();
        let handed_out: usize =
            stories.map(|story| check(&std::fs::read(story.unwrap().path()).unwrap())).sum();
        assert!(handed_out > 0);
    }

    /// The pages behind a detached unit are returned while its tensors are in use.
    #[test]
    fn references_to_a_unit_end_where_its_buffer_is_trimmed() {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/gguf/qwen3_moe/hf");
        let checkpoint = Checkpoint::open(fixture).unwrap();
        let names: Vec<_> = checkpoint.tensors().map(|info| info.name.clone()).collect();
        let unit =
            |names: &[String]| Arc::new(checkpoint.read_unit(names.iter().map(String::as_str)).unwrap());
        let (small, large) = (unit(&names[..1]), unit(&names));
        assert!(small.buffer_bytes() < large.buffer_bytes());
        let config = StreamConfig { buffers: 1, readers: 1 };
        let stream =
            Stream::new(checkpoint.disk(ReadMethod::Buffered), vec![small.clone(), large], config).unwrap();
        let loaded = stream.take(0).unwrap();
        assert_eq!(loaded.bytes().len(), small.buffer_bytes());
        stream.detach(&loaded);
        assert_eq!(loaded.bytes().len(), small.buffer_bytes());
    }

    #[test]
    fn a_failure_is_forgotten_when_its_request_is_cancelled() {
        // A unit is requested, cannot be read and is cancelled; then it is requested again.
        let [request, read, fail, cancel] = [0, 9, 13, 7];
        assert_eq!(check(&[0, 1, request, read, fail, cancel, request]), 1);
        // Of two requests one is still to be told.
        assert_eq!(check(&[0, 1, request, request, read, fail, cancel]), 1);
    }
}
