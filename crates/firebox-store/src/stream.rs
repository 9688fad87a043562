//! Read units of a checkpoint, read ahead of their use into a few buffers that are used again and again.

#[cfg(test)]
#[path = "../../../fuzz/checks/stream_ring.rs"]
mod check;
mod ring;

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use memmap2::MmapMut;

use crate::disk::ReadAt;
use crate::error::StoreError;
use crate::memory::anonymous;
use crate::read_unit::{LoadedTensors, Loan, ReadUnit};
use crate::scrap::Scrap;
use ring::{Ring, Wanted};

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
    /// Read units that were read.
    pub units: u64,
    /// Bytes of their tensors.
    pub bytes: u64,
    /// Read units that were there when they were asked for, and were not waited for.
    pub found: u64,
    /// Read units that had to be waited for.
    pub missed: u64,
    /// Time that readers spent reading.
    pub reading: Duration,
    /// Time that users spent waiting for what they had asked for.
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

/// Looks on while units are read and waited for.
pub trait ReadObserver: fmt::Debug + Send + Sync {
    /// Whether it wants to be told, now. Asked all the time, so that it must cost nothing.
    fn follows(&self) -> bool;

    /// A unit was read, of so many bytes, by the thread that tells so.
    fn read(&self, unit: usize, bytes: u64, began: Instant);

    /// A unit that was not there was waited for.
    fn waited(&self, unit: usize, began: Instant);
}

/// Hands out units in turn, round and round, and reads the next ones meanwhile.
///
/// A unit that is handed out has a buffer to itself until the last tensor over it is dropped. Read units may be asked
/// for in any order and from several threads; asked for in order they are there when they are needed. What is
/// [skipped](Self::skip) is not read ahead.
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
    /// What buffers are made of, and where memory goes that stayed with what was read, once that is let go of.
    scrap: Option<Scrap>,
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

/// Read units that were asked for. Those that nobody takes after all are not waited for.
pub struct Order<'a> {
    shared: &'a Arc<Shared>,
    coming: VecDeque<Wanted>,
}

impl Iterator for Order<'_> {
    type Item = Result<LoadedTensors, StoreError>;

    fn next(&mut self) -> Option<Self::Item> {
        let Wanted { id, unit, .. } = self.coming.pop_front()?;
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
        state.forget(id);
        state.taken(unit);
        drop(state);
        self.shared.changed.notify_all();
        let counts = &self.shared.counts;
        add(&counts.waiting, began.elapsed());
        if waited { &counts.missed } else { &counts.found }.fetch_add(1, Ordering::Relaxed);
        if waited && let Some(observer) = self.shared.observer() {
            observer.waited(unit, began);
        }
        let loaded = |buffer| {
            let loan = Loan::default();
            let unit = &self.shared.units[unit];
            LoadedTensors::new(unit.clone(), self.shared.lent(buffer, unit, &loan), Some(loan))
        };
        Some(read.map(loaded))
    }
}

impl Drop for Order<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        for wanted in self.coming.drain(..) {
            state.forget(wanted.id);
        }
        drop(state);
        // What was read for nobody can make room now.
        self.shared.changed.notify_all();
    }
}

/// A buffer that is in use, and goes back to where it came from.
struct Lease {
    buffer: Option<MmapMut>,
    /// What is in use of it.
    bytes: usize,
    shared: Arc<Shared>,
    loan: Loan,
}

impl AsRef<[u8]> for Lease {
    fn as_ref(&self) -> &[u8] {
        self.buffer.as_deref().unwrap_or(&[])
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        if !self.loan.is_kept() {
            self.shared.state().give_back(buffer);
            self.shared.changed.notify_all();
        } else if let Some(scrap) = &self.shared.scrap {
            scrap.leave(buffer, self.bytes);
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, Ring> {
        // Nothing that holds the lock leaves the state half changed, whatever else panics.
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
            let Some(unit) = state.job() else {
                state = self.wait(state);
                continue;
            };
            state.reading.push(unit);
            let free = state.free.pop();
            state.made += usize::from(free.is_none());
            drop(state);
            // Whoever waits is told, whatever a source of bytes does.
            let read = catch_unwind(AssertUnwindSafe(|| self.read(unit, free)));
            let read = read.unwrap_or(Err(StoreError::ReaderPanicked));
            state = self.state();
            state.take_in(unit, read);
            self.changed.notify_all();
        }
    }

    fn read(&self, unit: usize, buffer: Option<MmapMut>) -> Result<MmapMut, StoreError> {
        let mut buffer = buffer.map_or_else(|| self.made(self.buffer_bytes), Ok)?;
        let began = Instant::now();
        self.units[unit].read(&*self.disk, &mut buffer)?;
        add(&self.counts.reading, began.elapsed());
        self.counts.units.fetch_add(1, Ordering::Relaxed);
        self.counts.bytes.fetch_add(self.units[unit].bytes(), Ordering::Relaxed);
        if let Some(observer) = self.observer() {
            observer.read(unit, self.units[unit].bytes(), began);
        }
        Ok(buffer)
    }

    fn made(&self, bytes: usize) -> Result<MmapMut, StoreError> {
        match &self.scrap {
            Some(scrap) => scrap.make(bytes),
            None => anonymous(bytes),
        }
    }

    fn lent(self: &Arc<Self>, buffer: MmapMut, unit: &ReadUnit, loan: &Loan) -> Bytes {
        let (buffer, bytes) = (Some(buffer), unit.buffer_bytes());
        Bytes::from_owner(Lease { buffer, bytes, shared: self.clone(), loan: loan.clone() })
    }

    /// Who wants to be told, if anybody does.
    fn observer(&self) -> Option<Arc<dyn ReadObserver>> {
        let observer = self.observer.read().unwrap_or_else(PoisonError::into_inner);
        observer.as_ref().filter(|observer| observer.follows()).cloned()
    }
}

impl Stream {
    /// Read units of one checkpoint, in the order in which a round needs them.
    pub fn new(
        disk: Arc<dyn ReadAt>,
        units: Vec<Arc<ReadUnit>>,
        config: StreamConfig,
    ) -> Result<Self, StoreError> {
        Self::of_scrap(disk, units, config, None)
    }

    /// The same with buffers that are made of memory that others have let go of, and that is left to others.
    pub fn of_scrap(
        disk: Arc<dyn ReadAt>,
        units: Vec<Arc<ReadUnit>>,
        config: StreamConfig,
        scrap: Option<Scrap>,
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
            scrap,
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

    /// A unit, as soon as it is there.
    ///
    /// # Panics
    /// If there is no such unit.
    pub fn take(&self, unit: usize) -> Result<LoadedTensors, StoreError> {
        self.order([unit]).next().unwrap_or_else(|| unreachable!("one was ordered"))
    }

    /// Reads a unit, one of the stream's or another one of its checkpoint, into memory of its own: no buffer is given for it.
    pub fn read(&self, unit: &Arc<ReadUnit>) -> Result<LoadedTensors, StoreError> {
        let mut memory = self.shared.made(unit.buffer_bytes())?;
        unit.read(&*self.shared.disk, &mut memory)?;
        let loan = Loan::default();
        loan.keep();
        Ok(LoadedTensors::new(unit.clone(), self.shared.lent(memory, unit, &loan), Some(loan)))
    }

    /// Several units that are needed at once, as soon as all are there. If there are fewer buffers, more are made for that, but
    /// not for several who do so at the same time: they could wait for each other.
    ///
    /// # Panics
    /// If there is no such unit.
    pub fn take_all(&self, units: &[usize]) -> Result<Vec<LoadedTensors>, StoreError> {
        self.ordered(units.iter().copied(), units.len()).collect()
    }

    /// Several units, each as soon as it is there, while the next ones are being read.
    ///
    /// # Panics
    /// If there is no such unit.
    pub fn order(&self, units: impl IntoIterator<Item = usize>) -> Order<'_> {
        self.ordered(units, 1)
    }

    fn ordered(&self, units: impl IntoIterator<Item = usize>, together: usize) -> Order<'_> {
        let count = self.shared.units.len();
        let mut state = self.shared.state();
        let coming: VecDeque<Wanted> = units
            .into_iter()
            .inspect(|unit| assert!(*unit < count, "unit {unit} of {count}"))
            .map(|unit| state.ask(unit, together))
            .collect();
        if let Some(first) = coming.front() {
            state.next = first.unit;
        }
        drop(state);
        self.shared.changed.notify_all();
        Order { shared: &self.shared, coming }
    }

    /// Has units that lie one after the other read before all that nobody waits for, those that are skipped excepted, and says
    /// whether they can be [taken](Self::take) without waiting: because they are there, or because they could not be read, which
    /// whoever takes them is told. What lies farthest ahead gives up its buffer for them; if there are fewer buffers, more are made.
    ///
    /// # Panics
    /// If there are no such units.
    pub fn aim(&self, units: Range<usize>) -> bool {
        let mut state = self.shared.state();
        assert!(units.end <= state.skipped.len(), "units {units:?} of {}", state.skipped.len());
        let missing = || units.clone().filter(|unit| !state.skipped[*unit]);
        if missing().all(|unit| state.is_there(unit)) {
            return true;
        }
        if state.aim != units {
            state.next = units.start;
            state.aim = units;
            drop(state);
            self.shared.changed.notify_all();
        }
        false
    }

    /// Aims at nothing any more.
    pub fn rest(&self) {
        self.shared.state().aim = 0..0;
    }

    /// Lets what was read stay where it is for as long as anything refers to it. What it leaves empty of its buffer goes back to the system,
    /// and another buffer takes its place.
    pub fn detach(&self, loaded: &LoadedTensors) {
        if loaded.loan().is_some_and(Loan::keep) {
            loaded.trim();
            self.shared.state().made -= 1;
            self.shared.changed.notify_all();
        }
    }

    /// The units, in order.
    pub fn units(&self) -> &[Arc<ReadUnit>] {
        &self.shared.units
    }

    /// Whether a unit is left out when reading ahead.
    pub fn skip(&self, unit: usize, skipped: bool) {
        let mut state = self.shared.state();
        state.skipped[unit] = skipped;
        state.drop_stale();
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Which units a round consists of for now: no others are read ahead.
    pub fn read_ahead(&self, round: Range<usize>) {
        let count = self.shared.units.len();
        let end = round.end.min(count);
        let mut state = self.shared.state();
        state.round = round.start.min(end)..end;
        state.drop_stale();
        drop(state);
        self.shared.changed.notify_all();
    }

    /// How many buffers there may be from now on; one is always made when it is needed. Those too many go at once, or
    /// as soon as they are given back.
    pub fn set_buffers(&self, buffers: usize) {
        let mut state = self.shared.state();
        state.buffers = buffers;
        while state.made > state.buffers && state.free.pop().is_some() {
            state.made -= 1;
        }
        while state.made > state.buffers
            && let Some(at) = state.unasked()
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

    /// How many there are, those included that are too many and not given back yet.
    pub fn made_buffers(&self) -> usize {
        self.shared.state().made
    }

    /// Bytes of one buffer.
    pub fn buffer_bytes(&self) -> usize {
        self.shared.buffer_bytes
    }

    /// Who looks on from now on.
    pub fn set_observer(&self, observer: Arc<dyn ReadObserver>) {
        *self.shared.observer.write().unwrap_or_else(PoisonError::into_inner) = Some(observer);
    }

    /// What it has done so far.
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
            // A reader that panicked has said so already; there is nobody here to tell.
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

    use super::check::check;

    #[test]
    fn the_fuzzing_corpus() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/stream_ring");
        let stories = std::fs::read_dir(folder).unwrap();
        let handed_out: usize =
            stories.map(|story| check(&std::fs::read(story.unwrap().path()).unwrap())).sum();
        assert!(handed_out > 0);
    }

    #[test]
    fn a_failure_that_nobody_waited_for_is_forgotten() {
        // One unit is asked for, cannot be read and is given up; then it is asked for again.
        let [ask, read, fail, give_up] = [0, 9, 13, 7];
        assert_eq!(check(&[0, 1, ask, read, fail, give_up, ask]), 1);
        // Of two who have asked one is still to be told.
        assert_eq!(check(&[0, 1, ask, ask, read, fail, give_up]), 1);
    }
}
