//! The lock that a pass holds while it streams weights.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

/// How long a whole pass waits for an interleaved one that is wanted and does not begin.
const MOST_WANTED: Duration = Duration::from_secs(1);

/// Held by what streams weights: a whole pass, which would only take buffers from another one, or a single step of an interleaved pass.
///
/// An interleaved pass has the turn from its first step to its last: whole passes of other threads wait for its end, because between its
/// steps they would hold it up as often as it has layers. If both kinds want the lock, they take turns.
///
/// A thread of the pool that waits within a pass may begin another pass on top of it, which would wait for a buffer that only the pass
/// below can release. So the lock is taken before the pool is entered.
#[derive(Debug, Default)]
pub(crate) struct StreamLock {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    is_held: bool,
    /// Whole passes that wait.
    waiting: usize,
    /// The thread whose interleaved pass is under way.
    turn: Option<ThreadId>,
    /// The thread that wants to begin an interleaved pass.
    wanted: Option<ThreadId>,
    /// Whether the last pass was an interleaved one.
    was_interleaved: bool,
}

impl State {
    /// Returns whether a step of an interleaved pass may run, and notes that one is wanted.
    fn admits_step(&mut self) -> bool {
        if self.turn.is_none() {
            self.wanted = Some(thread::current().id());
        }
        !self.is_held && (self.turn.is_some() || self.waiting == 0 || !self.was_interleaved)
    }
}

/// The lock, until it is dropped.
#[derive(Debug)]
pub(crate) struct StreamLockGuard<'l>(&'l StreamLock);

impl StreamLock {
    /// Waits for the lock, and for the end of an interleaved pass of another thread.
    pub fn lock(&self) -> StreamLockGuard<'_> {
        let me = thread::current().id();
        let mut state = self.state();
        state.waiting += 1;
        let until = Instant::now() + MOST_WANTED;
        loop {
            let of_another = |thread: Option<ThreadId>| thread.is_some_and(|thread| thread != me);
            let is_open = !state.is_held && !of_another(state.turn);
            let left = until.saturating_duration_since(Instant::now());
            if is_open && (state.was_interleaved || !of_another(state.wanted) || left.is_zero()) {
                break;
            }
            state = if is_open {
                self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
            } else {
                self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
            };
        }
        state.waiting -= 1;
        state.is_held = true;
        state.was_interleaved &= state.turn.is_some();
        StreamLockGuard(self)
    }

    /// Takes the lock for a step of an interleaved pass. Returns none if it is held, or if the pass has not begun and it is the turn of
    /// whole ones that wait.
    pub fn try_lock(&self) -> Option<StreamLockGuard<'_>> {
        let mut state = self.state();
        if !state.admits_step() {
            return None;
        }
        state.is_held = true;
        Some(StreamLockGuard(self))
    }

    /// Returns whether [`try_lock`](Self::try_lock) would take the lock. Whole passes that come later wait for the pass that it is wanted
    /// for.
    pub fn is_free(&self) -> bool {
        self.state().admits_step()
    }

    /// Wants no interleaved pass any more.
    pub fn clear_wanted(&self) {
        if self.state().wanted.take().is_some() {
            self.changed.notify_all();
        }
    }

    /// Begins the turn of an interleaved pass of this thread.
    pub fn begin_turn(&self) {
        let mut state = self.state();
        (state.turn, state.wanted) = (Some(thread::current().id()), None);
    }

    /// Ends the turn of an interleaved pass.
    pub fn end_turn(&self) {
        {
            let mut state = self.state();
            (state.turn, state.was_interleaved) = (None, true);
        }
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for StreamLockGuard<'_> {
    fn drop(&mut self) {
        self.0.state().is_held = false;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_whole_pass_waits_for_the_end_of_an_interleaved_one() {
        let (lock, has_ended) = (StreamLock::default(), AtomicBool::new(false));
        lock.begin_turn();
        thread::scope(|scope| {
            let whole = scope.spawn(|| {
                let _held = lock.lock();
                has_ended.load(Ordering::Relaxed)
            });
            while lock.state().waiting == 0 {
                thread::yield_now();
            }
            for _ in 0..3 {
                drop(lock.try_lock().expect("the pass under way goes on"));
            }
            drop(lock.lock());
            has_ended.store(true, Ordering::Relaxed);
            lock.end_turn();
            assert!(whole.join().unwrap());
        });
        assert!(lock.try_lock().is_some());
    }

    #[test]
    fn passes_of_both_kinds_take_turns() {
        let (lock, wholes, is_over) = (StreamLock::default(), AtomicUsize::new(0), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let _held = lock.lock();
                    wholes.fetch_add(1, Ordering::Relaxed);
                }
            });
            while wholes.load(Ordering::Relaxed) == 0 {
                thread::yield_now();
            }
            for _ in 0..20 {
                // Whole passes go on as they like until an interleaved one is wanted.
                lock.is_free();
                let (wanted, before) = (Instant::now(), wholes.load(Ordering::Relaxed));
                while lock.try_lock().is_none() {
                    thread::yield_now();
                }
                lock.begin_turn();
                let between = wholes.load(Ordering::Relaxed) - before;
                // One that had the lock, one whose turn it was, and those that waited for too long while this thread did not run.
                let late = wanted.elapsed().as_secs() as usize;
                assert!(between <= 2 + late, "{between} whole passes before a wanted one");
                for _ in 0..3 {
                    while lock.try_lock().is_none() {
                        thread::yield_now();
                    }
                }
                let ended = wholes.load(Ordering::Relaxed);
                lock.end_turn();
                while wholes.load(Ordering::Relaxed) == ended {
                    thread::yield_now();
                }
            }
            is_over.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn an_interleaved_pass_that_does_not_begin_is_not_waited_for() {
        let lock = StreamLock::default();
        let held = lock.lock();
        thread::scope(|scope| {
            scope.spawn(|| assert!(lock.try_lock().is_none()));
        });
        drop(held);
        drop(lock.lock());
        lock.clear_wanted();
        drop(lock.lock());
    }
}
