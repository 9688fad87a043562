//! Shares short operations among the threads of rayon's pool.
//!
//! A decode step runs some hundred matrix products with little single-threaded work between them. An idle
//! thread of rayon's pool polls a few dozen times and then sleeps, and waking it takes up to 40 µs on a
//! virtual machine, as long as a small product. While work keeps arriving, threads therefore poll for longer,
//! and a thread that waits for the last piece of a product spins before it sleeps.

use std::cell::Cell;
use std::hint::spin_loop;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rayon::{Scope, Yield};

/// Time that a thread polls without finding work: longer than the single-threaded work between two operations
/// or two steps.
const SPIN_TIME: Duration = Duration::from_micros(500);

/// Longest time that a thread polls, whether it finds work or not. This bounds the delay of a thread that
/// began to poll while it waited for another computation.
const MAX_POLL_TIME: Duration = Duration::from_millis(100);

/// Polls between two checks of the clock, each of which yields the core to other threads.
const POLLS_PER_YIELD: usize = 8;

/// Spin-loop hints between two polls: a poll reads memory that the other threads write.
const PAUSES_PER_POLL: usize = 16;

/// Threads that poll or compute, over all pools: with several pools some threads sleep as rayon's usually do.
static ACTIVE_THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static ROLE: Cell<Role> = const { Cell::new(Role::Idle) };
}

/// Role of a thread of the pool.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Idle,
    /// Polls for work, or runs the work it found.
    Polls,
    /// Computes something that other threads wait for, and must not start to poll.
    Computes,
}

/// Runs `work` on a thread of the pool while the other threads poll for work to share.
pub(crate) fn run_on_pool<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    rayon::scope(|_| {
        let _computes = RoleGuard::begin(Role::Computes);
        if ACTIVE_THREADS.load(Ordering::Relaxed) < rayon::current_num_threads() {
            rayon::spawn_broadcast(|_| poll_for_work());
        }
        work()
    })
}

/// Runs `work` on every piece. Threads take the next piece as they finish one.
pub(crate) fn parallel_for_each<T: Send>(pieces: impl IntoIterator<Item = T>, work: impl Fn(T) + Sync) {
    let mut pieces = pieces.into_iter();
    let Some(first) = pieces.next() else { return };
    // Most operations of a single-sequence step have one piece, which needs neither a list nor other threads.
    let Some(second) = pieces.next() else { return work(first) };
    let pieces: Vec<Mutex<Option<T>>> =
        [first, second].into_iter().chain(pieces).map(|piece| Mutex::new(Some(piece))).collect();
    let (next, left) = (AtomicUsize::new(0), AtomicUsize::new(pieces.len()));
    let take_all = || {
        while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            let _completion = Completion(&left);
            let piece = piece.lock().unwrap_or_else(PoisonError::into_inner).take();
            piece.into_iter().for_each(&work);
        }
    };
    let helpers = rayon::current_num_threads().min(pieces.len()).saturating_sub(1);
    if helpers == 0 {
        return take_all();
    }
    // Keeps the role while the scope waits for its helpers.
    let _computes = RoleGuard::begin(Role::Computes);
    rayon::scope(|scope| {
        spawn_helpers(scope, helpers, &take_all);
        take_all();
        // After `SPIN_TIME` the scope waits as rayon does.
        spin_while(|| {
            spin_loop();
            left.load(Ordering::Acquire) > 0
        });
    });
}

/// Spawns `helpers` helpers as a tree: the first two spawn the others, so that one thread does not have to
/// wake all.
fn spawn_helpers<'scope>(scope: &Scope<'scope>, helpers: usize, help: &'scope (impl Fn() + Sync)) {
    let of_first = helpers.div_ceil(2);
    for helpers in [of_first, helpers - of_first].into_iter().filter(|helpers| *helpers > 0) {
        scope.spawn(move |scope| {
            spawn_helpers(scope, helpers - 1, help);
            help();
        });
    }
}

fn poll_for_work() {
    if ROLE.get() != Role::Idle {
        return;
    }
    let _polls = RoleGuard::begin(Role::Polls);
    let began = Instant::now();
    let mut found = true;
    while found && began.elapsed() < MAX_POLL_TIME {
        spin_while(|| {
            (0..PAUSES_PER_POLL).for_each(|_| spin_loop());
            found = rayon::yield_now() == Some(Yield::Executed);
            !found
        });
    }
}

/// Spins while `condition` holds, for at most `SPIN_TIME`.
fn spin_while(mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while began.elapsed() < SPIN_TIME {
        if (0..POLLS_PER_YIELD).any(|_| !condition()) {
            return;
        }
        thread::yield_now();
    }
}

/// Counts a piece as done when dropped.
struct Completion<'a>(&'a AtomicUsize);

impl Drop for Completion<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// Gives the thread a role and restores the previous one when dropped.
struct RoleGuard {
    before: Role,
}

impl RoleGuard {
    fn begin(role: Role) -> Self {
        Self { before: replace_role(role) }
    }
}

impl Drop for RoleGuard {
    fn drop(&mut self) {
        replace_role(self.before);
    }
}

fn replace_role(role: Role) -> Role {
    let before = ROLE.replace(role);
    match (before, role) {
        (Role::Idle, Role::Polls | Role::Computes) => drop(ACTIVE_THREADS.fetch_add(1, Ordering::Relaxed)),
        (Role::Polls | Role::Computes, Role::Idle) => drop(ACTIVE_THREADS.fetch_sub(1, Ordering::Relaxed)),
        _ => {}
    }
    before
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_runs_once() {
        for count in [0, 1, 2, 7, 100] {
            let mut pieces = vec![0; count];
            run_on_pool(|| parallel_for_each(pieces.iter_mut().enumerate(), |(at, piece)| *piece += at + 1));
            assert_eq!(pieces, (1..=count).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_panic_propagates_after_all_pieces_have_ended() {
        let ended = AtomicUsize::new(0);
        let shared = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            parallel_for_each(0..16, |at| {
                assert_ne!(at, 3, "as it should");
                thread::sleep(Duration::from_millis(2));
                ended.fetch_add(1, Ordering::Relaxed);
            });
        }));
        assert!(shared.is_err());
        let before = ended.load(Ordering::Relaxed);
        thread::sleep(Duration::from_millis(20));
        assert_eq!(ended.load(Ordering::Relaxed), before, "pieces still ran after the panic propagated");
    }
}
