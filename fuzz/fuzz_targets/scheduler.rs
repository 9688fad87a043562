//! Requests, models and heat in any order: nobody starves, nobody is held up by who matters less, and all of it ends.
#![no_main]

#[path = "../without_burn/schedule.rs"]
mod schedule;
#[allow(dead_code)] // Only how hot it may be.
#[path = "../../crates/firebox-runtime/src/thermal.rs"]
mod thermal;

/// As in `firebox-runtime`, whose own has errors of models as well.
#[derive(Debug)]
#[allow(dead_code)] // They are made and not read.
enum RuntimeError {
    QueueFull { priority: schedule::Priority, limit: usize },
    Setting { setting: &'static str, value: String, reason: &'static str },
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    schedule::happenings::wrong_nobody(schedule::happenings::Happening::of_bytes(input));
});
