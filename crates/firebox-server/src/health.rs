//! `/health` and `/ready`: whether the server runs and accepts requests.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::routing;
use serde_json::{Value, json};

use crate::app::{App, Routes};
use crate::error::ApiError;
#[cfg(test)]
use crate::schema::Health;

pub(crate) fn routes() -> Routes {
    Routes::new().route("/health", routing::get(health)).route("/ready", routing::get(ready))
}

/// Reports that the server runs.
#[cfg_attr(test, utoipa::path(
    get,
    path = "/health",
    tag = "server",
    responses((status = 200, description = "It runs", body = Health), ApiError)
))]
pub(crate) async fn health() -> Json<Value> {
    Json(json!({ "status": "ok" }))
}

/// Reports that the server accepts requests.
#[cfg_attr(test, utoipa::path(
    get,
    path = "/ready",
    tag = "server",
    responses((status = 200, description = "It lets requests in", body = Health), ApiError)
))]
pub(crate) async fn ready(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    if *app.stop.watch().borrow() {
        Err(ApiError::stopping())
    } else {
        Ok(Json(json!({ "status": "ready" })))
    }
}
