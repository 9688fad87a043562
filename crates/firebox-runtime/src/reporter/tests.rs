//! Tests of what reporters count and trace.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use firebox_model::StreamedConfig;
use firebox_store::{Checkpoint, ReadAt, ReadMethod, StoreError};
use serde_json::Value;

use crate::telemetry::{Counter, Gauge, Histogram, TIMELINE_EVENTS, Telemetry};
use crate::{AfterEviction, Generation, GenerationConfig, Model, Role, Session, WholeTurns, device};

fn fixture(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/reference").join(name)
}

fn model(name: &str) -> Model {
    Model::open(fixture(name), &device("cpu").unwrap()).unwrap()
}

fn generate(session: &mut Session, prompt: &[u32], tokens: usize) {
    let config = GenerationConfig { max_tokens: Some(tokens), ignore_end: true, ..Default::default() };
    let mut generation = Generation::begin(session, None, prompt, config).unwrap();
    while generation.next_piece().unwrap().is_some() {}
    generation.finish().unwrap();
}

#[test]
fn sessions_count_for_their_model() {
    let telemetry = Telemetry::default();
    let model = model("llama").with_telemetry(&telemetry, "small");
    let mut one = model.session().unwrap();
    generate(&mut one, &[5, 6, 7], 4);
    {
        let mut other = model.session().unwrap();
        generate(&mut other, &[5, 6, 7, 8, 9], 3);
        assert_eq!(telemetry.snapshot().models[0].sessions.len(), 2);
    }
    let snapshot = telemetry.snapshot();
    let counted = snapshot.model("small").unwrap();
    let of = |counter| (one.meters().count(counter), counted.count(counter));
    assert_eq!(of(Counter::PromptTokens), (3, 8));
    assert_eq!(of(Counter::GeneratedTokens), (4, 7));
    assert_eq!(of(Counter::FinishedRequests), (1, 2));
    // The last token of an answer takes no pass.
    assert_eq!(of(Counter::Passes), (0, 4 + 3));
    assert_eq!(counted.count(Counter::Rows), 8 + 3 + 2);
    let distribution = |histogram: Histogram| counted.meters.histograms[&histogram].count();
    assert_eq!(distribution(Histogram::TimeToFirstToken), 2);
    assert_eq!(distribution(Histogram::InterToken), 3 + 2);
    assert_eq!(distribution(Histogram::BatchOccupancy), 3 + 2);
    assert_eq!(counted.gauges[&Gauge::Sessions], 1, "one session has ended");
    assert_eq!(counted.gauges[&Gauge::RunningRequests], 0);
    assert!(counted.count(Counter::PassTime) > 0);
}

#[test]
fn evictions_and_fallbacks_are_counted() {
    let model = model("llama");
    let mut session =
        model.session().unwrap().with_turn_capacity(30, WholeTurns { after: AfterEviction::KeepPositions });
    for _ in 0..4 {
        session.begin_turn(&[Role::User]).unwrap();
        session.feed(&[7; 12]).unwrap();
    }
    let meters = model.meters();
    assert_eq!((meters.count(Counter::EvictedTurns), meters.count(Counter::EvictedTokens)), (2, 24));
    session.use_head("absent");
    session.use_head(crate::OWN_HEAD);
    assert_eq!(meters.count(Counter::HeadFallbacks), 1);
    assert_eq!(meters.count(Counter::WarmHeadSwaps), 1);
}

/// A disk on which every read takes two milliseconds.
#[derive(Debug)]
struct Slow(Arc<dyn ReadAt>);

impl ReadAt for Slow {
    fn read_at(&self, file: usize, buffer: &mut [u8], start: u64) -> Result<usize, StoreError> {
        std::thread::sleep(Duration::from_millis(2));
        self.0.read_at(file, buffer, start)
    }
}

fn spans(trace: &Value, name: &str) -> Vec<(f64, f64, u64)> {
    let events = trace["traceEvents"].as_array().unwrap().iter();
    let named = events.filter(|event| event["name"] == name && event["ph"] == "X");
    let span = |event: &Value| {
        let (at, took) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
        (at, at + took, event["tid"].as_u64().unwrap())
    };
    named.map(span).collect()
}

#[test]
fn a_trace_shows_layers_in_passes_and_reading_beside_them() {
    let checkpoint = Checkpoint::open(fixture("llama")).unwrap();
    let source: Arc<dyn ReadAt> = Arc::new(Slow(checkpoint.disk(ReadMethod::Buffered)));
    let config = StreamedConfig { source: Some(source), ..StreamedConfig::default() };
    let model = Model::streamed(checkpoint, &device("cpu").unwrap(), &config).unwrap();
    let telemetry = Telemetry::default();
    let model = model.with_telemetry(&telemetry, "streamed");
    let layers = model.decoder().unwrap().layers();
    let mut session = model.session().unwrap();
    generate(&mut session, &[5, 6], 2);
    let mut nothing = Vec::new();
    telemetry.timeline().write(&mut nothing).unwrap();
    let nothing: Value = serde_json::from_slice(&nothing).unwrap();
    assert_eq!(nothing["traceEvents"].as_array().unwrap().len(), 0, "the timeline is off");

    telemetry.timeline().start(TIMELINE_EVENTS);
    generate(&mut session, &[5, 6, 7], 8);
    telemetry.timeline().stop();
    generate(&mut session, &[5, 6, 7], 2);
    let mut file = Vec::new();
    telemetry.timeline().write(&mut file).unwrap();
    let trace: Value = serde_json::from_slice(&file).unwrap();

    // The first feed has one more token, the last one of the previous answer.
    let passes = [spans(&trace, "prefill"), spans(&trace, "decode")];
    assert_eq!(passes.each_ref().map(Vec::len), [1, 7]);
    let passes = passes.concat();
    let inside = |one: &(f64, f64, u64), other: &(f64, f64, u64)| {
        other.0 <= one.0 && one.1 <= other.1 && one.2 == other.2
    };
    let in_layers = spans(&trace, "layer");
    assert_eq!(in_layers.len(), passes.len() * layers);
    for layer in in_layers.iter().chain(&spans(&trace, "logits")) {
        assert!(passes.iter().any(|pass| inside(layer, pass)), "{layer:?} of {passes:?}");
    }
    // Events of one thread are nested.
    let all: Vec<_> = ["prefill", "decode", "layer", "logits", "wait"]
        .iter()
        .flat_map(|name| spans(&trace, name))
        .collect();
    for (one, other) in all.iter().flat_map(|one| all.iter().map(move |other| (one, other))) {
        let apart = one.2 != other.2 || one.1 <= other.0 || other.1 <= one.0;
        assert!(apart || inside(one, other) || inside(other, one), "{one:?} {other:?}");
    }
    let reads = spans(&trace, "read");
    let meet = |one: &(f64, f64, u64), other: &(f64, f64, u64)| {
        one.0 < other.1 && other.0 < one.1 && one.2 != other.2
    };
    // Reads that no pass waits for overlap with layers of other threads.
    assert!(reads.iter().any(|read| in_layers.iter().any(|layer| meet(read, layer))), "{reads:?}");
    let bytes = |event: &&Value| event["name"] == "read" && event["args"]["bytes"].as_u64() > Some(0);
    assert!(trace["traceEvents"].as_array().unwrap().iter().any(|event| bytes(&event)));

    let snapshot = telemetry.snapshot();
    let counted = snapshot.model("streamed").unwrap();
    let asked = counted.count(Counter::PrefetchHits) + counted.count(Counter::PrefetchMisses);
    assert_eq!(
        asked,
        counted.count(Counter::Passes) * model.decoder().unwrap().streamed().unwrap().parts() as u64
    );
    assert!(counted.count(Counter::PrefetchMisses) > 0 && counted.count(Counter::StreamedBytes) > 0);
    assert!(counted.count(Counter::ReadTime) > 0);
    assert_eq!(counted.kept.len() as u64, counted.gauges[&Gauge::Parts]);
}
