//! The threads of the pool at work together on many short operations.
//!
//! A step of decoding is some hundred products with short work for one thread between them. A thread of rayon's pool that
//! has nothing to do looks for a few dozen rounds and then sleeps, and waking it can take as long as a small product does:
//! some 40 µs on a virtual machine. So while there is work every now and then, threads look on for longer, and who waits for the
//! last piece of a product does not sleep at once.

use std::cell::Cell;
use std::hint::spin_loop;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rayon::{Scope, Yield};

/// For how long a thread looks on that has found nothing: longer than what one thread does alone between two operations,
/// or between two steps.
const SPIN_TIME: Duration = Duration::from_micros(500);

/// For how long it looks at most, whatever it finds. One that waits for something of another computation may begin to look
/// too, and waits for so much longer at most.
const MAX_POLL_TIME: Duration = Duration::from_millis(100);

/// Polls between two that are told the time and let others have the core.
const POLLS_PER_YIELD: usize = 8;

/// Pauses between two looks, which touch what the other threads write.
const PAUSES_PER_POLL: usize = 16;

/// Threads that have a role. Where there are several pools all count together: too many in one, and the others sleep as
/// rayon's threads do.
static ACTIVE_THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static ROLE: Cell<Role> = const { Cell::new(Role::Idle) };
}

/// What a thread does that is not to sleep.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Idle,
    /// Polls for work, or does what it has found.
    Polls,
    /// Others wait for what it computes: it is not to begin looking.
    Computes,
}

/// Runs something on a thread of the pool, and has the others look for work as long as some comes.
pub(crate) fn run_on_pool<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    rayon::scope(|_| {
        let _computes = RoleGuard::begin(Role::Computes);
        if ACTIVE_THREADS.load(Ordering::Relaxed) < rayon::current_num_threads() {
            rayon::spawn_broadcast(|_| poll_for_work());
        }
        work()
    })
}

/// Has all threads work on some pieces, each of which takes the next one when it has done one.
pub(crate) fn parallel_for_each<T: Send>(pieces: impl IntoIterator<Item = T>, work: impl Fn(T) + Sync) {
    let mut pieces = pieces.into_iter();
    let Some(first) = pieces.next() else { return };
    // Most operations of a step of one sequence are one piece: no list of it, and nobody to be told.
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
    // Also while the scope waits for its helpers.
    let _computes = RoleGuard::begin(Role::Computes);
    rayon::scope(|scope| {
        spawn_helpers(scope, helpers, &take_all);
        take_all();
        // Should it take longer, the scope waits as rayon does.
        spin_while(|| {
            spin_loop();
            left.load(Ordering::Acquire) > 0
        });
    });
}

/// Has so many others help, of whom the first two spawn_helpers the rest in turn: many that sleep are not woken by one.
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

/// Goes on as long as there is reason to, but not for long.
fn spin_while(mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while began.elapsed() < SPIN_TIME {
        if (0..POLLS_PER_YIELD).any(|_| !condition()) {
            return;
        }
        thread::yield_now();
    }
}

/// A piece that is under way, done when it is dropped.
struct Completion<'a>(&'a AtomicUsize);

impl Drop for Completion<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// A thread has a role until this is dropped, and then the one before.
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
    fn every_piece_is_worked_on_once() {
        for count in [0, 1, 2, 7, 100] {
            let mut pieces = vec![0; count];
            run_on_pool(|| parallel_for_each(pieces.iter_mut().enumerate(), |(at, piece)| *piece += at + 1));
            assert_eq!(pieces, (1..=count).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_piece_that_panics_is_told_when_all_have_ended() {
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
        assert_eq!(ended.load(Ordering::Relaxed), before, "pieces go on behind one's back");
    }
}
