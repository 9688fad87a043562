//! `/health` and `/ready`

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

/// Whether it runs.
#[utoipa::path(
    get,
    path = "/health",
    tag = "server",
    responses((status = 200, description = "It runs", body = Health), ApiError)
)]
async fn health() -> Json<Value> {
    Json(json!({ "status": "ok" }))
}

/// Whether it lets requests in.
#[utoipa::path(
    get,
    path = "/ready",
    tag = "server",
    responses((status = 200, description = "It lets requests in", body = Health), ApiError)
)]
async fn ready(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    if *app.stop.watch().borrow() { Err(ApiError::over()) } else { Ok(Json(json!({ "status": "ready" }))) }
}
