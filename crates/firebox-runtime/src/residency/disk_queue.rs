use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use firebox_store::{Checkpoint, ReadAt, ReadMethod, StoreError};

/// What is smaller is read at once, and through the page cache: rows of an embedding, which a pass waits for.
const SMALL: usize = 256 << 10;

/// Lets models read from one disk one after the other, whoever needs it most first: what each of them waits for would
/// else come as late as what all of them read ahead.
#[derive(Debug, Default)]
pub(super) struct DiskQueue {
    state: Mutex<Waiting>,
    changed: Condvar,
}

/// Reads of others after which it is somebody's turn in any case: the least urgent model goes on as well, if slowly.
const MOST_PASSED: u32 = 16;

#[derive(Debug, Default)]
struct Waiting {
    reads: bool,
    waiting: Vec<Waiter>,
    next_id: u64,
}

#[derive(Debug)]
struct Waiter {
    id: u64,
    turn: Arc<QueuePosition>,
    /// How many have read since it came.
    passed: u32,
}

impl Waiter {
    fn rank(&self) -> u64 {
        if self.passed < MOST_PASSED { 1 + u64::from(self.turn.number()) } else { 0 }
    }
}

impl Waiting {
    fn comes(&mut self, turn: &Arc<QueuePosition>) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.waiting.push(Waiter { id, turn: turn.clone(), passed: 0 });
        id
    }

    fn may_read(&self, id: u64) -> bool {
        let own = self.waiting.iter().find(|waiter| waiter.id == id).map(Waiter::rank);
        !self.reads && self.waiting.iter().all(|other| Some(other.rank()) >= own)
    }

    fn reads(&mut self, id: u64) {
        self.reads = true;
        self.waiting.retain(|waiter| waiter.id != id);
        for waiter in &mut self.waiting {
            waiter.passed += 1;
        }
    }
}

/// When it is a model's turn: those with small numbers come first.
#[derive(Debug, Default)]
pub(super) struct QueuePosition(AtomicU32);

impl QueuePosition {
    pub fn set(&self, number: u32) {
        self.0.store(number, Ordering::Relaxed);
    }

    fn number(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

impl DiskQueue {
    fn wait(&self, turn: &Arc<QueuePosition>) -> Reading<'_> {
        let mut state = self.state();
        let id = state.comes(turn);
        while !state.may_read(id) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.reads(id);
        Reading(self)
    }

    /// Has those look again who wait, because their numbers are others now.
    pub fn reorder(&self) {
        drop(self.state());
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, Waiting> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Has the disk until it is dropped.
struct Reading<'a>(&'a DiskQueue);

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.state().reads = false;
        self.0.changed.notify_all();
    }
}

/// The files of a model, read when it is its turn.
#[derive(Debug)]
pub(super) struct QueuedFiles {
    files: Arc<dyn ReadAt>,
    cached: Arc<dyn ReadAt>,
    disk: Arc<DiskQueue>,
    turn: Arc<QueuePosition>,
}

impl QueuedFiles {
    pub fn new(
        checkpoint: &Checkpoint,
        method: ReadMethod,
        disk: &Arc<DiskQueue>,
        turn: &Arc<QueuePosition>,
    ) -> Self {
        Self {
            files: checkpoint.disk(method),
            cached: checkpoint.disk(ReadMethod::Buffered),
            disk: disk.clone(),
            turn: turn.clone(),
        }
    }
}

impl ReadAt for QueuedFiles {
    fn read_at(&self, file: usize, buffer: &mut [u8], start: u64) -> Result<usize, StoreError> {
        if buffer.len() < SMALL {
            return self.cached.read_at(file, buffer, start);
        }
        let _reading = self.disk.wait(&self.turn);
        self.files.read_at(file, buffer, start)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn who_was_passed_over_often_enough_reads_next() {
        let (mut state, urgent, other) =
            (Waiting::default(), Arc::new(QueuePosition::default()), Arc::new(QueuePosition::default()));
        other.set(u32::MAX);
        let late = state.comes(&other);
        for _ in 0..MOST_PASSED {
            let soon = state.comes(&urgent);
            assert!(state.may_read(soon) && !state.may_read(late));
            state.reads(soon);
            state.reads = false;
        }
        let soon = state.comes(&urgent);
        assert!(state.may_read(late) && !state.may_read(soon));
    }

    #[test]
    fn who_needs_it_most_reads_next() {
        let (disk, order) = (DiskQueue::default(), Mutex::new(Vec::new()));
        let first = Arc::new(QueuePosition::default());
        let reading = disk.wait(&first);
        thread::scope(|scope| {
            for number in [3, 1, 2] {
                let (disk, order) = (&disk, &order);
                scope.spawn(move || {
                    let turn = Arc::new(QueuePosition::default());
                    turn.set(number);
                    let _reading = disk.wait(&turn);
                    order.lock().unwrap().push(number);
                });
            }
            while disk.state().waiting.len() < 3 {
                thread::sleep(Duration::from_millis(1));
            }
            drop(reading);
        });
        assert_eq!(order.into_inner().unwrap(), [1, 2, 3]);
    }
}
