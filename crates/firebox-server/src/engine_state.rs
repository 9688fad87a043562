//! `/v1/engine`: what runs, what waits, what is in memory, and for what.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use firebox_model::Streamed;
use firebox_runtime::engine::UnderWay;
use firebox_runtime::telemetry::{
    Counter, Distribution, Drawn, Gauge, Histogram, Kind, ModelSnapshot, Timeline,
};
use firebox_runtime::{Account, device};
use firebox_store::SegmentId;
use futures_core::Stream;
use serde_json::{Value, json};
use tokio::sync::mpsc::{Receiver, channel};
use tokio::time::{MissedTickBehavior, interval};
use utoipa_axum::routes;

use crate::app::{App, Routes, blocking};
use crate::catalog::Listed;
use crate::error::ApiError;
use crate::served::Served;
use crate::{events as sent, heads};

/// From one look of somebody who watches to the next.
const BEAT: Duration = Duration::from_millis(250);
/// Who watches asks for as much as a small request every time.
const MOST_WATCHERS: usize = 16;
/// What is drawn while somebody watches is forgotten after so many events; a fast small model draws a few thousand a second.
const EVENTS: usize = 1 << 15;
/// Nanoseconds between two passes that are told as one, and that one takes at most.
const CLOSE: u64 = 2_000_000;
const LONGEST: u64 = 50_000_000;
/// What somebody is told who looks for the first time.
const LATEST: usize = 400;

pub(crate) fn routes() -> Routes {
    Routes::new().routes(routes!(state)).routes(routes!(events))
}

/// The plan, the budget and the schedule as they are now.
#[utoipa::path(
    get,
    path = "/v1/engine",
    tag = "server",
    responses((status = 200, description = "What there is", body = Object), ApiError)
)]
async fn state(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let (value, _) = blocking(move || look(&app, 0, true)).await?;
    Ok(Json(value))
}

/// The same four times a second, and what has happened since the last time.
#[utoipa::path(
    get,
    path = "/v1/engine/events",
    tag = "server",
    responses((status = 200, description = "One look after the other", body = String, content_type = "text/event-stream"), ApiError)
)]
async fn events(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let Some(watcher) = app.watching.enter(app.telemetry.timeline()) else {
        let message = format!("{MOST_WATCHERS} watch the engine, and no more may; close one of them");
        return Err(ApiError::too_many(message));
    };
    let (sender, told) = channel(1);
    tokio::spawn(async move {
        let _watcher = watcher;
        let mut beats = interval(BEAT);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut from, mut stopping, mut first) = (0, app.stop.watch(), true);
        loop {
            tokio::select! {
                _ = beats.tick() => {}
                _ = stopping.wait_for(|stop| *stop) => return,
                () = sender.closed() => return,
            }
            let (seen, whole) = (app.clone(), std::mem::take(&mut first));
            let Ok((value, next)) = blocking(move || look(&seen, from, whole)).await else { return };
            from = next;
            if sender.send(value).await.is_err() {
                return;
            }
        }
    });
    Ok(sent::response(Looks(told)))
}

/// Who watches the engine. What it does is drawn for as long as somebody does, and costs nothing before and after.
#[derive(Debug, Clone, Default)]
pub(crate) struct Watching(Arc<Mutex<Watchers>>);

#[derive(Debug, Default)]
struct Watchers {
    there: usize,
    /// Whether the timeline is on because of them. Somebody else who started it has it to the end.
    draws: bool,
}

/// One of them.
struct Watcher {
    watching: Watching,
    timeline: Timeline,
}

impl Watching {
    /// One more, unless there are too many.
    fn enter(&self, timeline: &Timeline) -> Option<Watcher> {
        let mut watchers = self.watchers();
        if watchers.there == MOST_WATCHERS {
            return None;
        }
        watchers.there += 1;
        if !timeline.is_on() {
            timeline.start(EVENTS);
            watchers.draws = true;
        }
        Some(Watcher { watching: self.clone(), timeline: timeline.clone() })
    }

    fn watchers(&self) -> MutexGuard<'_, Watchers> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let mut watchers = self.watching.watchers();
        watchers.there -= 1;
        if watchers.there == 0 && std::mem::take(&mut watchers.draws) {
            self.timeline.stop();
        }
    }
}

/// One look after the other.
struct Looks(Receiver<Value>);

impl Stream for Looks {
    type Item = Result<Vec<u8>, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let value = ready!(self.0.poll_recv(context));
        Poll::Ready(value.map(|value| Ok(format!("data: {value}\n\n").into_bytes())))
    }
}

/// Everything as it is, what was drawn since an event, and the event to go on from. What does not change is told to those
/// who look for the first time.
fn look(app: &App, from: u64, whole: bool) -> Result<(Value, u64), ApiError> {
    let timeline = app.telemetry.timeline();
    let (drawn, next) = timeline.since(from, is_told);
    let mut drawn = joined(drawn);
    if whole && drawn.len() > LATEST {
        drawn.drain(..drawn.len() - LATEST);
    }
    let snapshot = app.telemetry.snapshot();
    let (requests, schedule) = app.engine.with_host(|host| (host.requests(), host.counters().clone()))?;
    let models: Vec<Value> =
        app.catalog.listed().map(|listed| model(listed, snapshot.model(&listed.name), whole)).collect();
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
            "events": drawn.iter().map(event).collect::<Vec<_>>(),
        },
    });
    Ok((value, next))
}

/// What is worth drawing: layers and reads are too many.
fn is_told(kind: Kind) -> bool {
    !matches!(
        kind,
        Kind::Layer | Kind::Logits | Kind::Read | Kind::ReadExpert | Kind::Wait | Kind::WaitExpert
    )
}

/// Passes of answers that follow each other closely are one to the eye, and there may be thousands of them a second.
fn joined(drawn: Vec<Drawn>) -> Vec<Drawn> {
    let mut joined: Vec<Drawn> = Vec::with_capacity(drawn.len());
    for event in drawn {
        let end = event.at + event.took;
        match joined.last_mut() {
            Some(last)
                if event.kind == Kind::Decode
                    && last.kind == Kind::Decode
                    && last.model == event.model
                    && event.at.saturating_sub(last.at + last.took) < CLOSE
                    && end - last.at < LONGEST =>
            {
                last.took = end - last.at;
                last.numbers[1] += event.numbers[1];
            }
            _ => joined.push(event),
        }
    }
    joined
}

fn event(drawn: &Drawn) -> Value {
    let numbers: serde_json::Map<String, Value> = drawn
        .kind
        .numbers()
        .iter()
        .zip(drawn.numbers)
        .map(|(name, number)| ((*name).to_owned(), number.into()))
        .collect();
    json!({
        "kind": drawn.kind.name(),
        "category": drawn.kind.category(),
        "model": drawn.model,
        "at_us": drawn.at / 1000,
        "took_us": drawn.took / 1000,
        "numbers": numbers,
    })
}

fn request(asked: &UnderWay) -> Value {
    json!({
        "model": asked.model,
        "waits": asked.waits,
        "prompt_tokens": asked.prompt_tokens,
        "generated_tokens": asked.generated_tokens,
    })
}

fn model(listed: &Listed, snapshot: Option<&ModelSnapshot>, whole: bool) -> Value {
    let count = |counter| snapshot.map_or(0, |snapshot| snapshot.count(counter));
    let gauge = |gauge| snapshot.and_then(|snapshot| snapshot.gauges.get(&gauge)).copied().unwrap_or(0);
    let spread = |histogram| {
        snapshot.and_then(|snapshot| snapshot.meters.histograms.get(&histogram)).map(distribution)
    };
    let served = listed.served();
    let mut value = json!({
        "name": listed.name,
        "opened": served.is_some(),
        "priority": listed.priority,
        "context": served.and_then(|served| served.context),
        "generated_tokens": count(Counter::GeneratedTokens),
        "prompt_tokens": count(Counter::PromptTokens),
        "cached_tokens": count(Counter::CachedTokens),
        "evicted_turns": count(Counter::EvictedTurns),
        "head_swaps": count(Counter::WarmHeadSwaps) + count(Counter::ColdHeadSwaps),
        "streamed_bytes": count(Counter::StreamedBytes),
        "major_faults": count(Counter::MajorFaults),
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
        "heads": served.map(|served| heads::of(served)).unwrap_or_default(),
    });
    if whole && let Some(fit) = served.and_then(|served| served.model.fit()) {
        value["plan"] = json!({ "layers": fit.plan(), "rates": fit.rates() });
    }
    value
}

/// Times in milliseconds.
fn distribution(distribution: &Distribution) -> Value {
    let milliseconds = |micros: Option<f64>| micros.map(|micros| micros / 1e3);
    json!({
        "count": distribution.count(),
        "sum_ms": distribution.sum() as f64 / 1e3,
        "p50_ms": milliseconds(distribution.quantile(0.5)),
        "p99_ms": milliseconds(distribution.quantile(0.99)),
    })
}

/// The parts of a model's weights, and how much of each is in memory: as the kernel says, where they are mapped.
fn segments(served: &Served) -> Vec<Value> {
    let decoder = served.model.decoder().ok();
    let streamed = decoder.as_ref().and_then(|decoder| decoder.streamed());
    let on_cpu =
        decoder.as_ref().is_none_or(|decoder| device("cpu").is_ok_and(|cpu| cpu == *decoder.device()));
    let parts = served.residency();
    // Of some of the parts in which it is read, how many bytes they have, and the share of them that is kept.
    let kept = |streamed: &Streamed, read: Range<usize>| {
        let sum =
            |parts: &mut dyn Iterator<Item = usize>| parts.map(|part| streamed.kept_bytes(part)).sum::<u64>();
        let (all, kept) = (sum(&mut read.clone()), sum(&mut read.filter(|part| streamed.is_kept(*part))));
        (all, kept as f64 / all.max(1) as f64)
    };
    // It is read like the layers are, wherever the checkpoint has it.
    let unembedding = |streamed: &Streamed| {
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
            // Elsewhere weights are copies.
            None if !on_cpu => ("resident", 1.0),
            None => ("mapped", *share),
        };
        json!({ "id": id.to_string(), "bytes": bytes, "state": state, "resident": resident })
    };
    parts.iter().map(of).collect()
}

/// What memory is held for. A model that was not fitted into a budget is told by what it is known to take.
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
    fn it_is_drawn_while_somebody_watches() {
        let (watching, timeline) = (Watching::default(), Timeline::default());
        let first = watching.enter(&timeline).unwrap();
        let began = timeline.now().unwrap();
        let second = watching.enter(&timeline).unwrap();
        assert!(timeline.now().unwrap() >= began, "it did not begin again");
        drop(first);
        assert!(timeline.is_on());
        drop(second);
        assert!(!timeline.is_on());
        let all: Vec<_> = std::iter::from_fn(|| watching.enter(&timeline)).collect();
        assert_eq!((all.len(), timeline.is_on()), (MOST_WATCHERS, true));
        drop(all);
        // Somebody else's goes on.
        timeline.start(EVENTS);
        drop(watching.enter(&timeline));
        assert!(timeline.is_on());
    }

    #[test]
    fn passes_are_joined_that_nobody_could_tell_apart() {
        let drawn = |kind, model: &str, at: u64, took: u64| Drawn {
            kind,
            model: model.into(),
            at: at * 1_000_000,
            took: took * 1_000_000,
            numbers: [1, 1],
        };
        let steps = (0..30).map(|at| drawn(Kind::Decode, "a", at * 4, 3));
        let told = joined(
            steps.chain([drawn(Kind::Decode, "b", 119, 1), drawn(Kind::Prefill, "b", 120, 1)]).collect(),
        );
        let rows: u64 = told.iter().map(|event| event.numbers[1]).sum();
        assert_eq!((told.len(), rows), (3 + 2, 32), "{told:?}");
        assert!(told.iter().all(|event| event.took <= LONGEST));
        assert_eq!(joined(vec![drawn(Kind::Decode, "a", 0, 1), drawn(Kind::Decode, "a", 9, 1)]).len(), 2);
    }
}
