//! `/v1/heads`: the heads of models and their state.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::routing;
use firebox_runtime::heads::{HeadPool, HeadState};
use serde_json::{Value, json};

use crate::app::{App, Routes};
use crate::blocking::blocking;
use crate::error::ApiError;
use crate::extract::{Admin, JsonBody};
use crate::json_fields::JsonFields;
use crate::served_model::ServedModel;
#[cfg(test)]
use crate::sessions::schema::{HeadEntry, HeadList, LoadHead};

pub(crate) fn routes() -> Routes {
    Routes::new().route("/v1/heads", routing::get(list).post(load))
}

/// The heads of all models.
#[cfg_attr(test, utoipa::path(
    get,
    path = "/v1/heads",
    tag = "models",
    responses((status = 200, description = "All there are", body = HeadList), ApiError)
))]
pub(crate) async fn list(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let heads =
        blocking(move || Ok(app.catalog.served().flat_map(|served| entries_of(served)).collect::<Vec<_>>()));
    Ok(Json(json!({ "object": "list", "data": heads.await? })))
}

/// Loads a head into memory before it is needed, or evicts it, for all keys. Needs an admin key.
#[cfg_attr(test, utoipa::path(
    post,
    path = "/v1/heads",
    tag = "models",
    request_body = LoadHead,
    responses((status = 200, description = "The head as it is then", body = HeadEntry), ApiError)
))]
pub(crate) async fn load(
    State(app): State<Arc<App>>,
    _: Admin,
    JsonBody(body): JsonBody,
) -> Result<Json<Value>, ApiError> {
    let fields = JsonFields::new(&body)?;
    let served = app.catalog.find(fields.string("model")?).await?.served;
    let name = fields.required_string("head")?.to_owned();
    let loads = fields.boolean("loaded")?.unwrap_or(true);
    let known = |head_pool: &HeadPool| head_pool.names().contains(&name);
    if !served.model.heads().is_some_and(known) {
        return Err(ApiError::not_found(format!("{} has no head {name:?}", served.name)));
    }
    blocking(move || {
        let Some(head_pool) = served.model.heads() else {
            return Err(ApiError::not_found("the model has no heads"));
        };
        if loads {
            // A head that is acquired once stays in memory.
            if let Some(reason) = head_pool.acquire(&name).fallback_reason {
                return Err(ApiError::from(&*reason).with_head_field());
            }
        } else {
            head_pool.evict(&name);
        }
        let found = entries_of(&served).into_iter().find(|head| head["head"] == *name);
        found.map(Json).ok_or_else(|| ApiError::not_found(format!("head {name:?} was removed meanwhile")))
    })
    .await
}

/// Returns the heads of a model.
pub(crate) fn entries_of(served: &ServedModel) -> Vec<Value> {
    let Some(head_pool) = served.model.heads() else { return Vec::new() };
    let value = |(name, state): (String, HeadState)| {
        let (state, reason) = match state {
            HeadState::Active => ("active", None),
            HeadState::Warm => ("warm", None),
            HeadState::Loading => ("loading", None),
            HeadState::OnDisk => ("on disk", None),
            HeadState::Failed { reason } => ("failed", Some(reason.to_string())),
        };
        json!({
            "object": "head",
            "id": format!("{}:{name}", served.name),
            "model": served.name,
            "head": name,
            "state": state,
            "reason": reason,
            "bytes": head_pool.bytes_of(&name).ok(),
        })
    };
    head_pool.states().into_iter().map(value).collect()
}
