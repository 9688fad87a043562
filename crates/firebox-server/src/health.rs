//! `/health` and `/ready`: whether the server runs and accepts requests.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};
use utoipa_axum::routes;

use crate::app::{App, Routes};
use crate::error::ApiError;
use crate::schema::Health;

pub(crate) fn routes() -> Routes {
    Routes::new().routes(routes!(health)).routes(routes!(ready))
}

/// Reports that the server runs.
#[utoipa::path(
    get,
    path = "/health",
    tag = "server",
    responses((status = 200, description = "It runs", body = Health), ApiError)
)]
async fn health() -> Json<Value> {
    Json(json!({ "status": "ok" }))
}

/// Reports that the server accepts requests.
#[utoipa::path(
    get,
    path = "/ready",
    tag = "server",
    responses((status = 200, description = "It lets requests in", body = Health), ApiError)
)]
async fn ready(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    if *app.stop.watch().borrow() {
        Err(ApiError::stopping())
    } else {
        Ok(Json(json!({ "status": "ready" })))
    }
}
