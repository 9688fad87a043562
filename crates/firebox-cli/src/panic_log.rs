//! Backtraces of panics in a server's own threads.

use std::backtrace::Backtrace;
use std::panic::{set_hook, take_hook};
use std::thread;

/// The beginning of the names of Firebox's threads.
const THREADS: &str = "firebox-";

/// Prints a backtrace after the message of a panic of Firebox's threads, whatever `RUST_BACKTRACE` says: a server's
/// failure can rarely be repeated.
#[expect(clippy::print_stderr, reason = "that is where the message before it goes")]
pub fn install() {
    let before = take_hook();
    set_hook(Box::new(move |panic| {
        before(panic);
        if thread::current().name().is_some_and(|name| name.starts_with(THREADS)) {
            eprintln!("{}", Backtrace::force_capture());
        }
    }));
}
