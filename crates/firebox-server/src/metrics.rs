//! `/metrics`: metrics for Prometheus.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use firebox_runtime::telemetry;
use utoipa_axum::routes;

use crate::app::{App, Routes};
use crate::error::ApiError;

pub(crate) fn routes() -> Routes {
    Routes::new().routes(routes!(metrics))
}

/// Metrics for Prometheus.
#[utoipa::path(
    get,
    path = "/metrics",
    tag = "server",
    responses((status = 200, description = "Counters, in the text format of Prometheus", body = String, content_type = "text/plain"), ApiError)
)]
async fn metrics(State(app): State<Arc<App>>) -> impl IntoResponse {
    let text = telemetry::render(&app.telemetry.snapshot());
    ([(header::CONTENT_TYPE, telemetry::CONTENT_TYPE)], text)
}
