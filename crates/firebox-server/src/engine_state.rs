//! `/v1/engine`: running and waiting requests, and the use of memory.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use axum::routing;
use firebox_engine::RequestStatus;
use firebox_model::StreamedWeights;
use firebox_runtime::telemetry::{
    Counter, Distribution, Gauge, Histogram, Kind, ModelSnapshot, TimelineEvent,
};
use firebox_runtime::{Account, device};
use firebox_store::SegmentId;
use futures_core::Stream;
use serde_json::{Value, json};
use tokio::sync::mpsc::{Receiver, channel};
use tokio::time::{MissedTickBehavior, interval};

use crate::app::{App, Routes};
use crate::blocking::blocking;
use crate::catalog::CatalogEntry;
use crate::engine_watchers::MAX_WATCHERS;
use crate::error::ApiError;
use crate::served_model::ServedModel;
use crate::{heads, sse};

/// Time between two snapshots of a watcher.
const SNAPSHOT_INTERVAL: Duration = Duration::from_millis(250);
/// Decode passes closer than this, in nanoseconds, are merged, up to `MAX_MERGED_NS`.
const MERGE_GAP_NS: u64 = 2_000_000;
const MAX_MERGED_NS: u64 = 50_000_000;
/// Events in the first snapshot of a watcher.
const FIRST_SNAPSHOT_EVENTS: usize = 400;

pub(crate) fn routes() -> Routes {
    Routes::new().route("/v1/engine", routing::get(state)).route("/v1/engine/events", routing::get(events))
}

/// A snapshot of models, memory and schedule.
#[cfg_attr(test, utoipa::path(
    get,
    path = "/v1/engine",
    tag = "server",
    responses((status = 200, description = "A snapshot", body = Object), ApiError)
))]
pub(crate) async fn state(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let (value, _) = blocking(move || snapshot(&app, 0, true)).await?;
    Ok(Json(value))
}

/// Streams snapshots four times a second, with the events since the previous one.
#[cfg_attr(test, utoipa::path(
    get,
    path = "/v1/engine/events",
    tag = "server",
    responses((status = 200, description = "Snapshots", body = crate::schema::StreamEvent, content_type = "text/event-stream"), ApiError)
))]
pub(crate) async fn events(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let Some(watcher) = app.watchers.enter(app.telemetry.timeline()) else {
        let message = format!("{MAX_WATCHERS} clients watch the engine, the most allowed; close one");
        return Err(ApiError::too_many(message));
    };
    let (sender, receiver) = channel(1);
    tokio::spawn(async move {
        let _watcher = watcher;
        let mut ticks = interval(SNAPSHOT_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut from, mut stopping, mut first) = (0, app.stop.watch(), true);
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                _ = stopping.wait_for(|stop| *stop) => return,
                () = sender.closed() => return,
            }
            let (seen, is_first) = (app.clone(), std::mem::take(&mut first));
            let Ok((value, next)) = blocking(move || snapshot(&seen, from, is_first)).await else { return };
            from = next;
            if sender.send(value).await.is_err() {
                return;
            }
        }
    });
    Ok(sse::response(SnapshotStream(receiver)))
}

/// Snapshots as server-sent events.
struct SnapshotStream(Receiver<Value>);

impl Stream for SnapshotStream {
    type Item = Result<Vec<u8>, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let value = ready!(self.0.poll_recv(context));
        Poll::Ready(value.map(|value| Ok(format!("data: {value}\n\n").into_bytes())))
    }
}

/// Returns a snapshot with the timeline's events from `from` on, and the event to continue from. The first
/// snapshot of a watcher includes what does not change.
fn snapshot(app: &App, from: u64, is_first: bool) -> Result<(Value, u64), ApiError> {
    let timeline = app.telemetry.timeline();
    let (events, next) = timeline.since(from, is_shown);
    let mut events = merge_decode_passes(events);
    if is_first && events.len() > FIRST_SNAPSHOT_EVENTS {
        events.drain(..events.len() - FIRST_SNAPSHOT_EVENTS);
    }
    let snapshot = app.telemetry.snapshot();
    let (requests, schedule) = app.engine.with_core(|core| (core.requests(), core.counters().clone()))?;
    let models: Vec<Value> =
        app.catalog.entries().map(|entry| model(entry, snapshot.model(&entry.name), is_first)).collect();
    let accounts = accounts(&snapshot, &models);
    let value = json!({
        "object": "engine",
        "process": snapshot.process,
        "budgets": accounts,
        "models": models,
        "requests": requests.iter().map(request).collect::<Vec<_>>(),
        "schedule": {
            "quanta": schedule.quanta,
            "layers": schedule.layers,
            "busy_ms": schedule.busy.as_secs_f64() * 1e3,
            "overruns": schedule.overruns,
            "preemptions": schedule.preemptions,
            "demotions": schedule.demotions,
            "waits": schedule.waits,
            "slips": schedule.classes.iter().map(|class| class.slips).sum::<u64>(),
        },
        "sessions": app.sessions.count(),
        "timeline": {
            "now_us": timeline.now().map(|now| now / 1000),
            "events": events.iter().map(event_value).collect::<Vec<_>>(),
        },
    });
    Ok((value, next))
}

/// Leaves out layers and reads, which are too many.
fn is_shown(kind: Kind) -> bool {
    !matches!(
        kind,
        Kind::Layer | Kind::Logits | Kind::Read | Kind::ReadExpert | Kind::Wait | Kind::WaitExpert
    )
}

/// Merges decode passes that follow each other closely: there may be thousands a second.
fn merge_decode_passes(events: Vec<TimelineEvent>) -> Vec<TimelineEvent> {
    let mut joined: Vec<TimelineEvent> = Vec::with_capacity(events.len());
    for event in events {
        let end = event.at + event.took;
        match joined.last_mut() {
            Some(last)
                if event.kind == Kind::Decode
                    && last.kind == Kind::Decode
                    && last.model == event.model
                    && event.at.saturating_sub(last.at + last.took) < MERGE_GAP_NS
                    && end - last.at < MAX_MERGED_NS =>
            {
                last.took = end - last.at;
                last.numbers[1] += event.numbers[1];
            }
            _ => joined.push(event),
        }
    }
    joined
}

fn event_value(event: &TimelineEvent) -> Value {
    let numbers: serde_json::Map<String, Value> = event
        .kind
        .numbers()
        .iter()
        .zip(event.numbers)
        .map(|(name, number)| ((*name).to_owned(), number.into()))
        .collect();
    json!({
        "kind": event.kind.name(),
        "category": event.kind.category(),
        "model": event.model,
        "at_us": event.at / 1000,
        "took_us": event.took / 1000,
        "numbers": numbers,
    })
}

fn request(asked: &RequestStatus) -> Value {
    json!({
        "model": asked.model,
        "waits": asked.waits,
        "prompt_tokens": asked.prompt_tokens,
        "generated_tokens": asked.generated_tokens,
    })
}

fn model(entry: &CatalogEntry, snapshot: Option<&ModelSnapshot>, is_first: bool) -> Value {
    let count = |counter| snapshot.map_or(0, |snapshot| snapshot.count(counter));
    let gauge = |gauge| snapshot.and_then(|snapshot| snapshot.gauges.get(&gauge)).copied().unwrap_or(0);
    let spread = |histogram| {
        snapshot.and_then(|snapshot| snapshot.meters.histograms.get(&histogram)).map(distribution)
    };
    let served = entry.served();
    let mut value = json!({
        "name": entry.name,
        "opened": served.is_some(),
        "priority": entry.priority,
        "context": served.and_then(|served| served.context),
        "generated_tokens": count(Counter::GeneratedTokens),
        "prompt_tokens": count(Counter::PromptTokens),
        "cached_tokens": count(Counter::CachedTokens),
        "evicted_turns": count(Counter::EvictedTurns),
        "head_swaps": count(Counter::WarmHeadSwaps) + count(Counter::ColdHeadSwaps),
        "streamed_bytes": count(Counter::StreamedBytes),
        "major_faults": count(Counter::MajorPageFaults),
        "running": gauge(Gauge::RunningRequests),
        "waiting": gauge(Gauge::WaitingRequests),
        "sessions": gauge(Gauge::Sessions),
        "batch_limit": gauge(Gauge::BatchLimit),
        "cache_bytes": gauge(Gauge::KeysAndValues),
        "heads_bytes": gauge(Gauge::Heads),
        "time_to_first_token": spread(Histogram::TimeToFirstToken),
        "inter_token": spread(Histogram::InterToken),
        "queue_wait": spread(Histogram::QueueWait),
        "segments": served.map(|served| segments(served)).unwrap_or_default(),
        "heads": served.map(|served| heads::entries_of(served)).unwrap_or_default(),
    });
    if is_first && let Some(fit) = served.and_then(|served| served.model.residency()) {
        value["plan"] = json!({ "layers": fit.plan(), "rates": fit.rates() });
    }
    value
}

/// Summarizes a distribution, in milliseconds.
fn distribution(distribution: &Distribution) -> Value {
    let milliseconds = |micros: Option<f64>| micros.map(|micros| micros / 1e3);
    json!({
        "count": distribution.count(),
        "sum_ms": distribution.sum() as f64 / 1e3,
        "p50_ms": milliseconds(distribution.quantile(0.5)),
        "p99_ms": milliseconds(distribution.quantile(0.99)),
    })
}

/// Returns the segments of a model's weights, with the resident share of each; the kernel knows it for mapped
/// ones.
fn segments(served: &ServedModel) -> Vec<Value> {
    let decoder = served.model.decoder().ok();
    let streamed = decoder.as_ref().and_then(|decoder| decoder.streamed());
    let on_cpu =
        decoder.as_ref().is_none_or(|decoder| device("cpu").is_ok_and(|cpu| cpu == *decoder.device()));
    let parts = served.residency();
    // The bytes of some parts of a streamed model, and the share of them in memory.
    let kept = |streamed: &StreamedWeights, read: Range<usize>| {
        let sum =
            |parts: &mut dyn Iterator<Item = usize>| parts.map(|part| streamed.part_bytes(part)).sum::<u64>();
        let (all, kept) = (sum(&mut read.clone()), sum(&mut read.filter(|part| streamed.is_resident(*part))));
        (all, kept as f64 / all.max(1) as f64)
    };
    // The unembedding is streamed like the layers, whichever segment holds it.
    let unembedding = |streamed: &StreamedWeights| {
        let (all, kept) = kept(streamed, streamed.block_parts()..streamed.parts());
        let is_apart = parts.iter().any(|(id, bytes, _)| *id == SegmentId::Final && *bytes >= all / 2);
        (if is_apart { SegmentId::Final } else { SegmentId::Embed }, kept)
    };
    let unembedding = streamed.map(unembedding);
    let of = |(id, bytes, share): &(SegmentId, u64, f64)| {
        let block = match (streamed, id) {
            (Some(streamed), SegmentId::Layer(layer)) => {
                streamed.blocks().get(*layer).map(|read| kept(streamed, read.clone()).1)
            }
            _ => None,
        };
        let kept = block.or(unembedding.filter(|(place, _)| place == id).map(|(_, kept)| kept));
        let (state, resident) = match kept {
            Some(0.0) => ("streamed", 0.0),
            Some(kept) => ("resident", kept),
            // On other devices weights are copies.
            None if !on_cpu && *id != SegmentId::Rows => ("resident", 1.0),
            None => ("mapped", *share),
        };
        json!({ "id": id.to_string(), "bytes": bytes, "state": state, "resident": resident })
    };
    parts.iter().map(of).collect()
}

/// Returns memory by account. Without a budget, the known parts are reported.
fn accounts(snapshot: &firebox_runtime::telemetry::Snapshot, models: &[Value]) -> Vec<Value> {
    if !snapshot.budgets.is_empty() {
        let budgets = snapshot.budgets.iter();
        return budgets.map(|budget| json!(budget)).collect();
    }
    let sum = |of: &dyn Fn(&Value) -> u64| models.iter().map(of).sum::<u64>();
    let weights = sum(&|model| {
        let in_memory = |segment: &Value| {
            segment["bytes"].as_u64().unwrap_or(0) as f64 * segment["resident"].as_f64().unwrap_or(0.0)
        };
        let segments = model["segments"].as_array().map_or(0.0, |all| all.iter().map(in_memory).sum());
        segments as u64 + model["heads_bytes"].as_u64().unwrap_or(0)
    });
    let streams = sum(&|model| model["cache_bytes"].as_u64().unwrap_or(0));
    let resident = snapshot.process.resident_bytes.unwrap_or(weights + streams);
    let program = resident.saturating_sub(weights + streams);
    let held: BTreeMap<Account, u64> =
        [(Account::Weights, weights), (Account::Streams, streams), (Account::Program, program)].into();
    vec![json!({
        "name": "process",
        "total": null,
        "most_held": snapshot.process.peak_resident_bytes.unwrap_or(resident),
        "held": held,
    })]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_decode_passes_are_merged() {
        let event = |kind, model: &str, at: u64, took: u64| TimelineEvent {
            kind,
            model: model.into(),
            at: at * 1_000_000,
            took: took * 1_000_000,
            numbers: [1, 1],
        };
        let steps = (0..30).map(|at| event(Kind::Decode, "a", at * 4, 3));
        let merged = merge_decode_passes(
            steps.chain([event(Kind::Decode, "b", 119, 1), event(Kind::Prefill, "b", 120, 1)]).collect(),
        );
        let rows: u64 = merged.iter().map(|event| event.numbers[1]).sum();
        assert_eq!((merged.len(), rows), (3 + 2, 32), "{merged:?}");
        assert!(merged.iter().all(|event| event.took <= MAX_MERGED_NS));
        assert_eq!(
            merge_decode_passes(vec![event(Kind::Decode, "a", 0, 1), event(Kind::Decode, "a", 9, 1)]).len(),
            2
        );
    }
}
