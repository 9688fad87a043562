//! Everything at once, for as long as is asked: twelve clients with conversations that stay, three models, heads that
//! change, branches, forgotten turns, memory that gets short, heat, clients that leave, and servers that end and begin
//! again. One answer in fifty has its whole conversation recomputed by a [plain model](plain::Plain), token by token.
//! Nothing may be left behind by it: no memory, no thread, no open file.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::print_stdout)]

#[path = "http/client.rs"]
#[allow(dead_code)]
mod client;
#[path = "soak/deed.rs"]
mod deed;
#[path = "soak/house.rs"]
mod house;
#[path = "soak/plain.rs"]
mod plain;
#[path = "soak/process.rs"]
mod process;
#[path = "soak/tally.rs"]
mod tally;
#[path = "soak/visitor.rs"]
mod visitor;
#[path = "soak/weather.rs"]
mod weather;

use std::time::{Duration, Instant};

use house::{Arrangement, House};
use plain::Plains;
use process::{Footprint, Growth};
use tally::Tally;
use visitor::{Stay, Visitor};

/// The allocator of the command, which is what is to be seen.
#[global_allocator]
static ALLOCATOR: firebox_allocator::Allocator = firebox_allocator::Allocator;

const VISITORS: u64 = 12;

/// How long visitors stay in all servers together.
#[derive(Clone, Copy)]
enum Lasts {
    For(Duration),
    /// As long as every visitor takes for so many deeds.
    Deeds(u32),
}

/// A soak of so many servers, one after the other.
struct Soak {
    lasts: Lasts,
    houses: u32,
    /// One answer in so many is recomputed.
    shadowed: u64,
    seed: u64,
}

impl Soak {
    fn run(&self) -> (Tally, Growth) {
        let (plains, tally) = (Plains::open(), Tally::default());
        let folder = tempfile::tempdir().unwrap();
        let mut visitors: Vec<Visitor> =
            (0..VISITORS).map(|number| Visitor::new(number, self.seed, self.shadowed)).collect();
        let (began, mut growth) = (Instant::now(), Growth::default());
        for number in 0..self.houses {
            let arrangement = [Arrangement::Apart, Arrangement::Together][number as usize % 2];
            let stay = match self.lasts {
                Lasts::For(time) => Stay::Until(began + time * (number + 1) / self.houses),
                Lasts::Deeds(deeds) => Stay::Deeds(deeds / self.houses),
            };
            let house = House::open(arrangement, folder.path());
            let weather = house.weather(self.seed + u64::from(number));
            std::thread::scope(|scope| {
                for visitor in &mut visitors {
                    scope.spawn(|| visitor.stay(&house, &plains, &tally, stay));
                }
            });
            tally.weather(weather.end());
            let during = Footprint::now();
            house.close();
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

/// The same for a few deeds of each, of which more are looked at.
#[test]
fn a_short_soak_says_nothing_wrong_and_leaves_nothing_behind() {
    let seed = number("FIREBOX_SOAK_SEED", 1);
    let soak = Soak { lasts: Lasts::Deeds(40), houses: 4, shadowed: 10, seed };
    let (tally, growth) = soak.run();
    println!("{tally}");
    tally.expect_variety(false);
    growth.expect_no_handles();
}

#[test]
#[ignore = "an hour: FIREBOX_SOAK_SECONDS=3600 cargo test --test soak -- --ignored --nocapture"]
fn a_soak_says_nothing_wrong_and_leaves_nothing_behind() {
    let time = Duration::from_secs(number("FIREBOX_SOAK_SECONDS", 3600));
    // A server a minute, and enough of them to see what grows.
    let houses = (time.as_secs() / 60).clamp(12, 120) as u32;
    let soak = Soak { lasts: Lasts::For(time), houses, shadowed: 50, seed: number("FIREBOX_SOAK_SEED", 1) };
    let (tally, growth) = soak.run();
    println!("{tally}\n{growth}");
    tally.expect_variety(true);
    growth.expect_no_handles();
    growth.expect_no_memory();
}
