//! Tests of metrics, their export and the timeline.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use firebox_memory::Account;
use serde_json::Value;

use super::*;

#[test]
fn two_telemetries_share_nothing() {
    let (one, other) = (Telemetry::default(), Telemetry::default());
    one.model("same").add(Counter::Passes, 3);
    other.model("same").add(Counter::Passes, 4);
    assert_eq!(one.model("same").count(Counter::Passes), 3);
    assert_eq!(one.snapshot().models.len(), 1);
}

#[test]
fn a_gauge_is_held_until_its_guard_is_dropped() {
    let telemetry = Telemetry::default();
    let model = telemetry.model("a");
    let session = telemetry.session(&model, "1");
    let held = session.hold(Gauge::WaitingRequests);
    assert_eq!((model.level(Gauge::WaitingRequests), session.level(Gauge::WaitingRequests)), (1, 1));
    drop(held);
    assert_eq!((model.level(Gauge::WaitingRequests), session.level(Gauge::WaitingRequests)), (0, 0));
}

#[test]
fn sources_add_to_snapshots_until_they_return_false() {
    let telemetry = Telemetry::default();
    let meters = telemetry.model("a");
    let known = Arc::new(5);
    let weak = Arc::downgrade(&known);
    for _ in 0..2 {
        let weak = weak.clone();
        telemetry.ask(&meters, "something", move |snapshot| match weak.upgrade() {
            Some(known) => {
                snapshot.add(Counter::StreamedParts, *known);
                true
            }
            None => false,
        });
    }
    let parts = || telemetry.snapshot().models[0].count(Counter::StreamedParts);
    assert_eq!(parts(), 5, "who asks twice is told once");
    drop(known);
    assert_eq!(parts(), 0);
}

/// Returns a snapshot with every kind of value.
fn full() -> Snapshot {
    let telemetry = Telemetry::default();
    let budget = Budget::new(1 << 20);
    let _held = budget.charge(Account::Streams, 4096).unwrap();
    telemetry.watch_budget("host", &budget);
    telemetry.watch_budget("part", &budget.slice(100).unwrap());
    telemetry.watch_budget("unlimited", &Budget::unlimited());
    for name in ["a", "b \"quoted\" \\ and\nbroken"] {
        let meters = telemetry.model(name);
        meters.add(Counter::GeneratedTokens, 12);
        meters.add_time(Counter::PassTime, Duration::from_millis(1500));
        meters.set(Gauge::BatchLimit, 8);
        for micros in [3, 900, 80_000, 80_000, 2_000_000] {
            meters.took(Histogram::InterToken, Duration::from_micros(micros));
        }
        for sequences in [1, 1, 4, 8] {
            meters.record(Histogram::BatchOccupancy, sequences);
        }
        let session = telemetry.session(&meters, "first");
        session.add(Counter::PromptTokens, 4);
    }
    telemetry.snapshot()
}

#[test]
fn a_snapshot_survives_json() {
    let snapshot = full();
    let text = serde_json::to_string(&snapshot).unwrap();
    assert_eq!(serde_json::from_str::<Snapshot>(&text).unwrap(), snapshot);
    assert!(text.contains("\"generated_tokens\":12"), "{text}");
}

#[test]
fn a_slice_has_no_total_of_its_own() {
    let snapshot = full();
    let of = |name: &str| snapshot.budgets.iter().find(|budget| budget.name == name).unwrap();
    assert_eq!((of("host").total, of("host").reserved), (Some(1 << 20), None));
    assert_eq!((of("part").total, of("part").reserved), (None, Some(100)));
    assert!(render(&snapshot).contains("firebox_budget_reserved_bytes{budget=\"part\"} 100\n"));
}

type Labels = BTreeMap<String, String>;

/// Parses the samples of an exposition, by name and labels, and the types of families. Panics if the text violates the
/// format: <https://prometheus.io/docs/instrumenting/exposition_formats/>.
fn parse(text: &str) -> (BTreeMap<(String, Labels), f64>, BTreeMap<String, String>) {
    let is_name = |name: &str| {
        let mut letters = name.chars();
        letters.next().is_some_and(|first| first.is_ascii_alphabetic() || first == '_' || first == ':')
            && letters.all(|letter| letter.is_ascii_alphanumeric() || letter == '_' || letter == ':')
    };
    assert!(text.ends_with('\n'));
    let (mut samples, mut types, mut helped) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
    let mut family = String::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            assert!(is_name(name) && !help.contains('\\') && helped.insert(name), "{line}");
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
            assert!(helped.contains(name) && types.insert(name.to_owned(), kind.to_owned()).is_none());
            family = name.to_owned();
        } else {
            let (name, labels, value) = sample(line);
            assert!(is_name(&name) && name.starts_with(&family), "{line} in {family}");
            let value: f64 = value.parse().unwrap_or_else(|_| panic!("{line}"));
            assert!(samples.insert((name, labels), value).is_none(), "{line} twice");
        }
    }
    (samples, types)
}

fn sample(line: &str) -> (String, Labels, String) {
    let Some((name, rest)) = line.split_once('{') else {
        let (name, value) = line.split_once(' ').unwrap();
        return (name.into(), Labels::new(), value.into());
    };
    let mut labels = Labels::new();
    let mut letters = rest.chars();
    loop {
        let label: String = letters.by_ref().take_while(|letter| *letter != '=').collect();
        assert!(label.chars().all(|letter| letter.is_ascii_lowercase()), "{line}");
        assert_eq!(letters.next(), Some('"'), "{line}");
        let mut value = String::new();
        loop {
            match letters.next().unwrap_or_else(|| panic!("{line}")) {
                '"' => break,
                '\\' => value.push(match letters.next() {
                    Some('n') => '\n',
                    Some(escaped @ ('\\' | '"')) => escaped,
                    other => panic!("{other:?} in {line}"),
                }),
                letter => value.push(letter),
            }
        }
        assert!(labels.insert(label, value).is_none(), "{line}");
        match letters.next() {
            Some(',') => {}
            Some('}') => break,
            other => panic!("{other:?} in {line}"),
        }
    }
    let value = letters.as_str().strip_prefix(' ').unwrap();
    (name.into(), labels, value.into())
}

#[test]
fn prometheus_parses_the_text() {
    let snapshot = full();
    let text = render(&snapshot);
    let (samples, types) = parse(&text);
    for model in &snapshot.models {
        let labels = Labels::from([("model".to_owned(), model.name.clone())]);
        let value = |name: &str| samples[&(name.to_owned(), labels.clone())];
        assert_eq!(value("firebox_generated_tokens_total"), 12.0);
        assert_eq!(value("firebox_prompt_tokens_total"), 4.0);
        assert_eq!(value("firebox_pass_seconds_total"), 1.5);
        assert_eq!(value("firebox_batch_limit"), 8.0);
        assert_eq!(value("firebox_sessions"), 0.0, "the session is gone");
        assert_eq!(value("firebox_inter_token_seconds_count"), 5.0);
        assert!((value("firebox_inter_token_seconds_sum") - 2.160903).abs() < 1e-9);
    }
    let account = |name: &str| {
        let labels = [("budget", "host"), ("account", name)];
        let labels = labels.into_iter().map(|(label, value)| (label.to_owned(), value.to_owned()));
        samples[&("firebox_budget_held_bytes".to_owned(), labels.collect())]
    };
    assert_eq!((account("streams"), account("weights")), (4096.0, 0.0));
    for (name, _) in types.iter().filter(|(_, kind)| *kind == "histogram") {
        let mut series: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
        for ((_, labels), count) in
            samples.iter().filter(|((found, _), _)| *found == format!("{name}_bucket"))
        {
            series.entry(&labels["model"]).or_default().push((labels["le"].parse().unwrap(), *count));
        }
        assert_eq!(series.len(), 2, "{name}");
        for buckets in series.values_mut() {
            buckets.sort_by(|one, other| one.0.total_cmp(&other.0));
            assert!(buckets.is_sorted_by(|one, other| one.1 <= other.1), "{name}: {buckets:?}");
            assert_eq!(buckets.last().unwrap().0, f64::INFINITY);
        }
    }
    // A time below a bound is counted in its bucket, and so is a number of sequences.
    let below = |name: &str, bound: &str| {
        let labels =
            [("model", "a"), ("le", bound)].map(|(label, value)| (label.to_owned(), value.to_owned()));
        samples[&(format!("firebox_{name}_bucket"), Labels::from(labels))]
    };
    assert_eq!(below("inter_token_seconds", "0.001024"), 2.0);
    assert_eq!(below("batch_occupancy", "1"), 2.0);
    assert_eq!(below("batch_occupancy", "7"), 3.0);
}

#[test]
fn the_oldest_events_are_dropped() {
    let timeline = Timeline::default();
    let track = timeline.track("a");
    let now = Instant::now();
    timeline.span(Kind::Layer, track, [0, 0], now, now);
    assert_eq!(timeline.counts(), (0, 0));
    timeline.start(3);
    for layer in 0..5 {
        timeline.span(Kind::Layer, track, [layer, 0], Instant::now(), Instant::now());
    }
    assert_eq!(timeline.counts(), (3, 2));
    timeline.span(Kind::KeptParts, track, [9, 0], Instant::now(), Instant::now());
    let mut file = Vec::new();
    timeline.write(&mut file).unwrap();
    let trace: Value = serde_json::from_slice(&file).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let layers: Vec<_> = events.iter().filter_map(|event| event["args"]["layer"].as_u64()).collect();
    assert_eq!(layers, [3, 4]);
    let level = events.iter().find(|event| event["ph"] == "C").unwrap();
    assert_eq!((&level["args"], &level["name"]), (&serde_json::json!({ "a": 9 }), &"kept parts".into()));
    let thread = std::thread::current().name().unwrap_or("thread 0").to_owned();
    assert!(events.iter().any(|event| event["ph"] == "M" && event["args"]["name"] == thread.as_str()));
}

/// A repeated query returns each event once.
#[test]
fn each_query_returns_the_new_events() {
    let timeline = Timeline::default();
    let track = timeline.track("a");
    assert_eq!((timeline.since(0, |_| true), timeline.now()), ((Vec::new(), 0), None));
    timeline.start(4);
    let draw = |kind, number| timeline.span(kind, track, [number, 0], Instant::now(), Instant::now());
    draw(Kind::Decode, 0);
    draw(Kind::Layer, 1);
    let told = |from| {
        let (drawn, next) = timeline.since(from, |kind| kind != Kind::Layer);
        (drawn.iter().map(|event| event.numbers[0]).collect::<Vec<_>>(), next)
    };
    assert_eq!(told(0), (vec![0], 2));
    assert_eq!(told(2), (vec![], 2));
    (2..8).for_each(|number| draw(Kind::Decode, number));
    assert_eq!(told(2), (vec![4, 5, 6, 7], 8), "the oldest are gone");
    assert_eq!(told(6), (vec![6, 7], 8));
    timeline.start(4);
    draw(Kind::Decode, 9);
    assert_eq!(told(8), (vec![9], 1), "it was switched on again");
    assert_eq!(timeline.since(0, |_| true).0[0].model, "a");
}
