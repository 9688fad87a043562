//! `/v1/heads`: which heads models have, and where each is.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use firebox_runtime::heads::{HeadRack, HeadState};
use serde_json::{Value, json};
use utoipa_axum::routes;

use crate::app::{App, Routes, blocking};
use crate::asked::Asked;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::served::Served;
use crate::sessions::schema::{HeadEntry, HeadList, LoadHead};

pub(crate) fn routes() -> Routes {
    Routes::new().routes(routes!(list, load))
}

/// The heads of all models.
#[utoipa::path(
    get,
    path = "/v1/heads",
    tag = "models",
    responses((status = 200, description = "All there are", body = HeadList), ApiError)
)]
async fn list(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let heads = blocking(move || Ok(app.catalog.served().flat_map(|served| of(served)).collect::<Vec<_>>()));
    Ok(Json(json!({ "object": "list", "data": heads.await? })))
}

/// Brings a head into memory before somebody needs it, or lets it go.
#[utoipa::path(
    post,
    path = "/v1/heads",
    tag = "models",
    request_body = LoadHead,
    responses((status = 200, description = "The head as it is then", body = HeadEntry), ApiError)
)]
async fn load(State(app): State<Arc<App>>, Asked(body): Asked) -> Result<Json<Value>, ApiError> {
    let fields = Fields::of(&body)?;
    let served = app.catalog.find(fields.text("model")?).await?.served;
    let name = fields.needed_text("head")?.to_owned();
    let loads = fields.truth("loaded")?.unwrap_or(true);
    let known = |rack: &HeadRack| rack.names().contains(&name);
    if !served.model.heads().is_some_and(known) {
        return Err(ApiError::nowhere(format!("{} has no head {name:?}", served.name)));
    }
    blocking(move || {
        let Some(rack) = served.model.heads() else { return Err(ApiError::nowhere("there are no heads")) };
        if loads {
            // What is worn for a moment is in memory from then on.
            if let Some(reason) = rack.wear(&name).instead {
                return Err(ApiError::from(&*reason).of_head());
            }
        } else {
            rack.let_go(&name);
        }
        let found = of(&served).into_iter().find(|head| head["head"] == *name);
        found.map(Json).ok_or_else(|| ApiError::nowhere(format!("head {name:?} has just gone")))
    })
    .await
}

/// The heads of a model.
pub(crate) fn of(served: &Served) -> Vec<Value> {
    let Some(rack) = served.model.heads() else { return Vec::new() };
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
            "bytes": rack.bytes_of(&name).ok(),
        })
    };
    rack.states().into_iter().map(value).collect()
}
