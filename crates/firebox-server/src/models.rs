//! `/v1/models`: the models and their heads.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::routing;
use serde_json::{Value, json};

use crate::app::{App, Routes};
use crate::error::ApiError;
use crate::extract::PathParams;
#[cfg(test)]
use crate::schema::{ModelEntry, ModelList};

pub(crate) fn routes() -> Routes {
    // Some names contain a `/`, which not every client escapes.
    let named = Routes::new()
        .route("/v1/models/{model}", routing::get(model))
        .route("/v1/models/{owner}/{*name}", routing::get(owned));
    named.route("/v1/models", routing::get(models))
}

/// Lists the models, and their heads as `model:head`.
#[cfg_attr(test, utoipa::path(
    get,
    path = "/v1/models",
    tag = "models",
    responses((status = 200, description = "All there are", body = ModelList), ApiError)
))]
pub(crate) async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "object": "list", "data": app.catalog.values(app.started) }))
}

/// A model or head.
#[cfg_attr(test, utoipa::path(
    get,
    path = "/v1/models/{model}",
    tag = "models",
    params(("model" = String, Path, description = "A model, or `model:head`")),
    responses((status = 200, description = "The model", body = ModelEntry), ApiError)
))]
pub(crate) async fn model(
    State(app): State<Arc<App>>,
    PathParams(model): PathParams<String>,
) -> Result<Json<Value>, ApiError> {
    let mut known = app.catalog.values(app.started).into_iter();
    let found = known.find(|value| value["id"] == *model);
    found.map(Json).ok_or_else(|| ApiError::no_model(&model, &app.catalog.names()))
}

async fn owned(
    state: State<Arc<App>>,
    PathParams((owner, name)): PathParams<(String, String)>,
) -> Result<Json<Value>, ApiError> {
    model(state, PathParams(format!("{owner}/{name}"))).await
}
