//! `/v1/models`

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::routing::get;
use serde_json::{Value, json};
use utoipa_axum::routes;

use crate::app::{App, Routes};
use crate::asked::Named;
use crate::error::ApiError;
use crate::schema::{ModelEntry, ModelList};

pub(crate) fn routes() -> Routes {
    // Some names have a `/` in them, and not every client writes it as `%2F`.
    let named = Routes::new().routes(routes!(model)).route("/v1/models/{owner}/{*name}", get(owned));
    named.routes(routes!(models))
}

/// The models, and their heads as `model:head`.
#[utoipa::path(
    get,
    path = "/v1/models",
    tag = "models",
    responses((status = 200, description = "All there are", body = ModelList), ApiError)
)]
async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "object": "list", "data": app.catalog.values(app.began) }))
}

/// One of them.
#[utoipa::path(
    get,
    path = "/v1/models/{model}",
    tag = "models",
    params(("model" = String, Path, description = "A model, or `model:head`")),
    responses((status = 200, description = "The model", body = ModelEntry), ApiError)
)]
async fn model(State(app): State<Arc<App>>, Named(model): Named<String>) -> Result<Json<Value>, ApiError> {
    let mut known = app.catalog.values(app.began).into_iter();
    let found = known.find(|value| value["id"] == *model);
    found.map(Json).ok_or_else(|| ApiError::no_model(&model, &app.catalog.names()))
}

async fn owned(
    state: State<Arc<App>>,
    Named((owner, name)): Named<(String, String)>,
) -> Result<Json<Value>, ApiError> {
    model(state, Named(format!("{owner}/{name}"))).await
}
