//! `/metrics`: metrics for Prometheus.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing;
use firebox_runtime::telemetry;

use crate::app::{App, Routes};
#[cfg(test)]
use crate::error::ApiError;
use crate::{health, pipeline};

pub(crate) fn routes() -> Routes {
    Routes::new().route("/metrics", routing::get(metrics))
}

/// Metrics for Prometheus.
#[cfg_attr(test, utoipa::path(
    get,
    path = "/metrics",
    tag = "server",
    responses((status = 200, description = "Counters, in the text format of Prometheus", body = String, content_type = "text/plain"), ApiError)
))]
pub(crate) async fn metrics(State(app): State<Arc<App>>) -> impl IntoResponse {
    let models = telemetry::render(&app.telemetry.snapshot());
    let text = models + &health::metrics(&app.engine) + &pipeline::metrics(app.catalog.pipelines());
    ([(header::CONTENT_TYPE, telemetry::CONTENT_TYPE)], text)
}
