//! Tests on simulated devices.

use super::*;
use crate::Priority;
use firebox_memory::thermal::Heat;

const DEVICES: [&str; 3] = ["iphone-a17", "ipad-m3", "mac-studio"];
const NOON: Duration = Duration::from_secs(12 * 3600);

fn path(name: &str) -> String {
    format!("{}/../../assets/devices/{name}.toml", env!("CARGO_MANIFEST_DIR"))
}

fn profile(name: &str) -> Profile {
    Profile::open(path(name)).unwrap()
}

fn minutes(minutes: u64) -> Duration {
    Duration::from_secs(minutes * 60)
}

fn class(report: &Report, priority: Priority) -> &ClassReport {
    &report.classes[priority as usize]
}

#[track_caller]
fn sound(report: Report) -> Report {
    assert_eq!(report.violations, 0, "{}: {:#?}", report.device, report.examples);
    assert!(report.most_held <= report.budget);
    report
}

#[test]
fn a_day_on_a_phone_violates_no_invariant() {
    let report = sound(simulate(&profile("iphone-a17"), &Mix::everyday(), 24.0, 1).unwrap());
    assert!(report.classes.iter().all(|class| class.done > 30 && class.refused == 0), "{report:#?}");
    assert!(class(&report, Priority::Pinned).met > 0.99, "{:?}", class(&report, Priority::Pinned));
    assert!(report.warnings > 0 && report.models.iter().any(|model| model.streamed_bytes > 0));
}

#[test]
fn hours_on_other_devices_violate_no_invariant() {
    for device in &DEVICES[1..] {
        let report = simulate_from(&profile(device), &Mix::everyday(), NOON, minutes(120), 1).unwrap();
        assert!(class(&sound(report), Priority::Pinned).met > 0.99);
    }
}

#[test]
fn no_seed_and_load_violates_an_invariant() {
    for seed in 0..12 {
        let device = profile(DEVICES[seed as usize % DEVICES.len()]);
        let mix = Mix::everyday().times([1.0, 5.0, 25.0, 100.0][seed as usize % 4]);
        sound(simulate_from(&device, &mix, NOON, minutes(4), seed).unwrap());
    }
}

/// Two minutes of more than four times what the device can do, of all priorities.
#[test]
fn overload_keeps_the_deadlines_of_the_most_urgent_and_starves_no_model() {
    let mix = Mix::everyday().times(80.0);
    for seed in [1, 2, 3] {
        let report = simulate_from(&profile("iphone-a17"), &mix, NOON, minutes(2), seed).unwrap();
        let report = sound(report);
        println!("asked {:.1}, busy {:.2}, {:#?}", report.asked, report.busy, report.classes);
        assert!(report.asked >= 4.0, "{}", report.asked);
        let pinned = class(&report, Priority::Pinned);
        assert!(pinned.met >= 0.99 && pinned.done > 30, "{pinned:?}");
        assert!(report.classes.iter().all(|class| class.tokens > 0), "{:#?}", report.classes);
        assert_eq!(report.classes.iter().map(|class| class.refused).sum::<u64>(), 0);
    }
}

#[test]
fn requests_are_refused_only_at_the_limit_and_pinned_ones_never() {
    let mix = Mix::everyday().times(600.0);
    let report = sound(simulate_from(&profile("ipad-m3"), &mix, NOON, minutes(3), 1).unwrap());
    assert!(class(&report, Priority::Background).refused > 0, "{:#?}", report.classes);
    assert_eq!(class(&report, Priority::Pinned).refused, 0);
    assert!(report.classes.iter().all(|class| class.done > 0), "{:#?}", report.classes);
}

#[test]
fn a_busy_phone_gets_hot_and_continues() {
    let mix = Mix::everyday().times(20.0);
    let report = sound(simulate_from(&profile("iphone-a17"), &mix, NOON, minutes(40), 4).unwrap());
    let share = |heat: Heat| report.heat[heat as usize].1;
    assert!(share(Heat::Nominal) > 0.02 && share(Heat::Serious) > 0.1, "{:?}", report.heat);
    assert!(class(&report, Priority::Pinned).met >= 0.99, "{:?}", class(&report, Priority::Pinned));
}

#[test]
fn the_seed_determines_the_day() {
    let day = |seed| simulate_from(&profile("ipad-m3"), &Mix::everyday(), NOON, minutes(30), seed).unwrap();
    let first = day(1);
    assert_eq!(first, day(1));
    assert_ne!(first.classes, day(2).classes);
}

#[test]
fn invalid_profiles_are_refused_with_the_reason() {
    let text = std::fs::read_to_string(path("iphone-a17")).unwrap();
    for (from, to, word) in [
        ("cores = 6", "cores = 0", "cores"),
        ("cores = 6", "core = 6", "core"),
        ("rise = 22.0", "rise = nan", "heat.rise"),
        ("marks = [37.0", "marks = [42.0", "heat.marks"),
        ("slowdown = [1.0", "slowdown = [0.5", "heat.slowdown"),
        ("budget = 1_200_000_000", "budget = 7_000_000_000", "memory"),
        ("per_hour = 6.0", "per_hour = -1.0", "others.per_hour"),
    ] {
        assert!(text.contains(from), "{from}");
        let error = Profile::parse("spoiled", &text.replace(from, to)).unwrap_err().to_string();
        assert!(error.contains(word) && error.contains("spoiled"), "{error}");
    }
    let missing = Profile::open("nowhere.toml").unwrap_err().to_string();
    assert!(missing.contains("nowhere.toml"), "{missing}");
    let tiny = text.replace("budget = 1_200_000_000", "budget = 100_000_000");
    let tiny = Profile::parse("tiny", &tiny).unwrap();
    assert!(simulate(&tiny, &Mix::everyday(), 1.0, 1).is_err(), "three models do not fit into 100 MB");
    assert!(simulate(&profile("ipad-m3"), &Mix::everyday(), f64::NAN, 1).is_err());
}
