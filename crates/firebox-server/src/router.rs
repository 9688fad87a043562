//! The router of the whole API, with its middleware.

use std::sync::Arc;

use axum::Router;
use axum::http::Uri;
use axum::middleware::{from_fn, from_fn_with_state};

use crate::app::{App, Routes};
use crate::error::ApiError;
use crate::{
    chat, completions, console, deadline, embeddings, engine_state, heads, health, metrics, middleware,
    models, openapi, responses, sessions, tokens,
};

/// Routes that need no key.
fn public_routes() -> Routes {
    Routes::new().merge(health::routes()).merge(openapi::routes()).merge(console::routes())
}

/// Routes that compute. They need a key and are subject to the request timeout.
fn inference_routes() -> Routes {
    Routes::new()
        .merge(chat::routes())
        .merge(responses::routes())
        .merge(completions::routes())
        .merge(embeddings::routes())
        .route_layer(from_fn(middleware::name_ignored_fields))
        .merge(sessions::routes())
}

/// Routes that report state. They need a key and have no timeout.
fn status_routes() -> Routes {
    Routes::new()
        .merge(tokens::routes())
        .merge(models::routes())
        .merge(metrics::routes())
        .merge(heads::routes())
        .merge(engine_state::routes())
}

/// Builds the router of the whole API.
pub(crate) fn router(app: Arc<App>) -> Router {
    let inference = inference_routes().route_layer(from_fn_with_state(app.clone(), deadline::enforce));
    let keyed = inference
        .merge(status_routes())
        .route_layer(from_fn_with_state(app.clone(), middleware::authenticate));
    let router = public_routes()
        .merge(keyed)
        .fallback(|uri: Uri| async move { ApiError::no_route(uri.path()) })
        .with_state(app.clone());
    // The outermost layer also covers responses that no route produces, such as the fallback's.
    Router::new().fallback_service(router).layer(from_fn_with_state(app, middleware::check_origin))
}
