//! The order in which models read from one disk: the most urgent first. If all read ahead at the same time, urgent
//! reads would come as late as those that nothing needs yet.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use firebox_store::{Checkpoint, ReadAt, ReadMethod, StoreError};

use super::config::CONFIG;

/// A queue for one disk, which serves one large read at a time.
#[derive(Debug, Default)]
pub(super) struct DiskQueue {
    state: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    is_reading: bool,
    waiting: Vec<Waiter>,
    next_id: u64,
}

#[derive(Debug)]
struct Waiter {
    id: u64,
    position: Arc<QueuePosition>,
    /// Reads that began since it waits.
    overtaken: u32,
}

impl Waiter {
    /// The smallest rank reads next.
    fn rank(&self) -> u64 {
        if self.overtaken < CONFIG.max_overtaken { 1 + u64::from(self.position.number()) } else { 0 }
    }
}

impl Queue {
    fn add(&mut self, position: &Arc<QueuePosition>) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.waiting.push(Waiter { id, position: position.clone(), overtaken: 0 });
        id
    }

    fn may_read(&self, id: u64) -> bool {
        let own = self.waiting.iter().find(|waiter| waiter.id == id).map(Waiter::rank);
        !self.is_reading && self.waiting.iter().all(|other| Some(other.rank()) >= own)
    }

    fn begin_reading(&mut self, id: u64) {
        self.is_reading = true;
        self.waiting.retain(|waiter| waiter.id != id);
        for waiter in &mut self.waiting {
            waiter.overtaken += 1;
        }
    }
}

/// A model's place in the queue. Small numbers come first.
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
    /// Waits until a model may read.
    fn acquire(&self, position: &Arc<QueuePosition>) -> DiskGuard<'_> {
        let mut state = self.state();
        let id = state.add(position);
        while !state.may_read(id) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.begin_reading(id);
        DiskGuard(self)
    }

    /// Wakes the waiting reads after positions have changed.
    pub fn reorder(&self) {
        // A read that has just looked at the positions waits by the time that the lock is free.
        drop(self.state());
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, Queue> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Exclusive use of the disk until it is dropped.
struct DiskGuard<'a>(&'a DiskQueue);

impl Drop for DiskGuard<'_> {
    fn drop(&mut self) {
        self.0.state().is_reading = false;
        self.0.changed.notify_all();
    }
}

/// The files of a model, whose large reads go through a disk queue.
#[derive(Debug)]
pub(super) struct QueuedFiles {
    files: Arc<dyn ReadAt>,
    cached: Arc<dyn ReadAt>,
    disk: Arc<DiskQueue>,
    position: Arc<QueuePosition>,
}

impl QueuedFiles {
    pub fn new(
        checkpoint: &Checkpoint,
        method: ReadMethod,
        disk: &Arc<DiskQueue>,
        position: &Arc<QueuePosition>,
    ) -> Self {
        Self {
            files: checkpoint.disk(method),
            cached: checkpoint.disk(ReadMethod::Buffered),
            disk: disk.clone(),
            position: position.clone(),
        }
    }
}

impl ReadAt for QueuedFiles {
    fn read_at(&self, file: usize, buffer: &mut [u8], start: u64) -> Result<usize, StoreError> {
        if buffer.len() < CONFIG.unqueued_read {
            return self.cached.read_at(file, buffer, start);
        }
        let _guard = self.disk.acquire(&self.position);
        self.files.read_at(file, buffer, start)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_read_that_was_overtaken_often_enough_comes_next() {
        let (mut state, urgent, other) =
            (Queue::default(), Arc::new(QueuePosition::default()), Arc::new(QueuePosition::default()));
        other.set(u32::MAX);
        let late = state.add(&other);
        for _ in 0..CONFIG.max_overtaken {
            let soon = state.add(&urgent);
            assert!(state.may_read(soon) && !state.may_read(late));
            state.begin_reading(soon);
            state.is_reading = false;
        }
        let soon = state.add(&urgent);
        assert!(state.may_read(late) && !state.may_read(soon));
    }

    #[test]
    fn the_smallest_number_reads_next() {
        let (disk, order) = (DiskQueue::default(), Mutex::new(Vec::new()));
        let first = Arc::new(QueuePosition::default());
        let reading = disk.acquire(&first);
        thread::scope(|scope| {
            for number in [3, 1, 2] {
                let (disk, order) = (&disk, &order);
                scope.spawn(move || {
                    let position = Arc::new(QueuePosition::default());
                    position.set(number);
                    let _reading = disk.acquire(&position);
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
