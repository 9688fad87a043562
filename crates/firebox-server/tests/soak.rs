//! A soak test: twelve users with sessions, three models, head switches, branches, evictions, memory pressure,
//! heat, disconnects and restarts. One answer in fifty has its whole session recomputed by a
//! [reference](reference::Reference), token by token. Afterwards no memory, thread or file may be left.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::print_stdout)]

#[path = "soak/action.rs"]
mod action;
#[path = "http/client.rs"]
#[allow(dead_code)]
mod client;
#[path = "soak/process.rs"]
mod process;
#[path = "soak/reference.rs"]
mod reference;
#[path = "soak/servers.rs"]
mod servers;
#[path = "soak/stress.rs"]
mod stress;
#[path = "soak/tally.rs"]
mod tally;
#[path = "soak/user.rs"]
mod user;

use std::time::{Duration, Instant};

use process::{Footprint, Growth};
use reference::References;
use servers::{Arrangement, TestServer};
use tally::Tally;
use user::{RunLimit, User};

/// The allocator of the command, which the test measures.
#[global_allocator]
static ALLOCATOR: firebox_allocator::Allocator = firebox_allocator::Allocator;

const USERS: u64 = 12;

/// Duration of the soak.
#[derive(Clone, Copy)]
enum SoakDuration {
    For(Duration),
    /// Until every user has done this many actions.
    Actions(u32),
}

/// A soak of several servers in sequence.
struct Soak {
    lasts: SoakDuration,
    servers: u32,
    /// One answer in this many is recomputed.
    compared_every: u64,
    seed: u64,
}

impl Soak {
    fn run(&self) -> (Tally, Growth) {
        let (references, tally) = (References::open(), Tally::default());
        let folder = tempfile::tempdir().unwrap();
        let mut users: Vec<User> =
            (0..USERS).map(|number| User::new(number, self.seed, self.compared_every)).collect();
        let (began, mut growth) = (Instant::now(), Growth::default());
        for number in 0..self.servers {
            let arrangement = [Arrangement::Apart, Arrangement::Together][number as usize % 2];
            let stay = match self.lasts {
                SoakDuration::For(time) => RunLimit::Until(began + time * (number + 1) / self.servers),
                SoakDuration::Actions(actions) => RunLimit::Actions(actions / self.servers),
            };
            let server = TestServer::open(arrangement, folder.path());
            let stress = server.stress(self.seed + u64::from(number));
            std::thread::scope(|scope| {
                for user in &mut users {
                    scope.spawn(|| user.stay(&server, &references, &tally, stay));
                }
            });
            tally.stress(stress.end());
            let during = Footprint::now();
            server.close();
            let quiet = Footprint::quiet(growth.quiet.last());
            println!(
                "{:>6.0} s, models {arrangement:?}: {} answers; at work {during}; quiet {quiet}",
                began.elapsed().as_secs_f64(),
                tally.count("answer"),
            );
            growth.quiet.push(quiet);
        }
        (tally, growth)
    }
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().unwrap())
}

/// A short soak, with more of its answers recomputed.
#[test]
fn a_short_soak_is_correct_and_leaks_nothing() {
    let seed = number("FIREBOX_SOAK_SEED", 1);
    let soak = Soak { lasts: SoakDuration::Actions(40), servers: 4, compared_every: 10, seed };
    let (tally, growth) = soak.run();
    println!("{tally}");
    tally.expect_variety(false);
    growth.expect_no_handles();
}

#[test]
#[ignore = "soak: an hour: FIREBOX_SOAK_SECONDS=3600 cargo test --test soak -- --ignored --nocapture"]
fn a_soak_is_correct_and_leaks_nothing() {
    let time = Duration::from_secs(number("FIREBOX_SOAK_SECONDS", 3600));
    // A server a minute, at least twelve to see growth.
    let servers = (time.as_secs() / 60).clamp(12, 120) as u32;
    let soak = Soak {
        lasts: SoakDuration::For(time),
        servers,
        compared_every: 50,
        seed: number("FIREBOX_SOAK_SEED", 1),
    };
    let (tally, growth) = soak.run();
    println!("{tally}\n{growth}");
    tally.expect_variety(true);
    growth.expect_no_handles();
    growth.expect_no_memory();
}
