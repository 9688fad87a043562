//! `/health` and `/ready`: whether the engine runs, and whether the server accepts requests.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::routing;
use firebox_engine::{Engine, EngineHealth};
use firebox_runtime::telemetry;
use serde_json::{Value, json};

use crate::app::{App, Routes};
use crate::error::ApiError;
#[cfg(test)]
use crate::schema::Health;

pub(crate) fn routes() -> Routes {
    Routes::new().route("/health", routing::get(health)).route("/ready", routing::get(ready))
}

/// Reports whether the engine runs. It is restarting for a moment after a failure, and that is no reason to restart the
/// process.
#[cfg_attr(test, utoipa::path(
    get,
    path = "/health",
    tag = "server",
    responses((status = 200, description = "It runs", body = Health), ApiError)
))]
pub(crate) async fn health(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    match app.engine.health() {
        EngineHealth::Restarting => Ok(Json(json!({ "status": "restarting" }))),
        health => status(&health, "ok"),
    }
}

/// Reports whether the server accepts requests.
#[cfg_attr(test, utoipa::path(
    get,
    path = "/ready",
    tag = "server",
    responses((status = 200, description = "It lets requests in", body = Health), ApiError)
))]
pub(crate) async fn ready(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    if *app.stop.watch().borrow() {
        return Err(ApiError::stopping());
    }
    status(&app.engine.health(), "ready")
}

fn status(health: &EngineHealth, running: &str) -> Result<Json<Value>, ApiError> {
    let problem = match health {
        EngineHealth::Running => return Ok(Json(json!({ "status": running }))),
        EngineHealth::Stalled { since } => {
            format!("the engine has been in one step for {:.0} s; restart the server", since.as_secs_f64())
        }
        EngineHealth::Restarting => "the engine failed and starts again; try again soon".into(),
        _ => "the engine has ended; restart the server".into(),
    };
    Err(ApiError::engine_unavailable(problem))
}

/// Renders how often the engine failed, for Prometheus.
pub(crate) fn metrics(engine: &Engine) -> String {
    let help = "Panics of the engine's thread, each of which failed all requests at hand.";
    telemetry::render_counter("firebox_engine_failures_total", help, [], [([], engine.failures())])
}
