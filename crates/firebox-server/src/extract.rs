//! Extractors of requests: body, path and caller.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};

use axum::body::{Body, HttpBody as _};
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::request::Parts;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::timeout;

use crate::app::{App, LONG_TEXT};
use crate::body_memory::{BodyCharge, ParsedBody};
use crate::error::ApiError;
use crate::json_limits::check_memory;
use crate::request_fields::Endpoint;

/// The JSON body of a request.
#[derive(Debug)]
pub(crate) struct JsonBody(pub ParsedBody);

/// The names of a body's fields that have no effect, which the response tells. Middleware puts it into the request.
#[derive(Debug, Clone, Default)]
pub(crate) struct IgnoredFields(pub Arc<OnceLock<String>>);

/// The scope of the request's key. Prefix caches and sessions of different scopes are separate.
#[derive(Debug, Clone)]
pub(crate) struct Caller(pub String);

/// The parameters in a request's path.
#[derive(Debug)]
pub(crate) struct PathParams<T>(pub T);

impl<T: DeserializeOwned + Send> FromRequestParts<Arc<App>> for PathParams<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        let path = Path::from_request_parts(parts, app).await;
        path.map(|Path(names)| Self(names))
            .map_err(|error| ApiError::invalid(format!("the path is invalid: {}", error.body_text())))
    }
}

impl FromRequest<Arc<App>> for JsonBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let endpoint = Endpoint::at(request.uri().path());
        let ignored = request.extensions().get::<IgnoredFields>().cloned();
        let scope = request.extensions().get().map_or_else(String::new, |Caller(scope)| scope.clone());
        let mut charge = app.body_memory.begin(&scope);
        let read = read(request.into_body(), app.limits.body, &mut charge);
        let bytes = timeout(app.limits.body_timeout, read).await;
        let bytes =
            bytes.unwrap_or_else(|_| Err(ApiError::request_timeout("the body did not come in time")))?;
        let (most, length) = (app.limits.body, bytes.len());
        let parse = move || {
            let values = check_memory(&bytes, most)?;
            charge.grow(values + bytes.len())?;
            let value: Value = serde_json::from_slice(&bytes)
                .map_err(|error| ApiError::invalid(format!("the body is not JSON: {error}")))?;
            charge.shrink(bytes.len());
            Ok((value, charge))
        };
        let (value, charge) = match length < LONG_TEXT {
            true => parse()?,
            false => app.text_work.run(&scope, parse).await?,
        };
        if let (Some(ignored), Some(names)) =
            (ignored, endpoint.and_then(|endpoint| endpoint.ignored(&value)))
        {
            if app.limits.strict_fields {
                return Err(ApiError::ignored_fields(&names));
            }
            // The cell is that of this request, so it is empty.
            let _ = ignored.0.set(names);
        }
        Ok(Self(ParsedBody::new(value, charge)))
    }
}

async fn read(mut body: Body, most: usize, charge: &mut BodyCharge) -> Result<Vec<u8>, ApiError> {
    if body.size_hint().lower() > most as u64 {
        return Err(ApiError::too_large(most));
    }
    let mut bytes = Vec::new();
    while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        let frame = frame.map_err(|error| ApiError::invalid(format!("the body is incomplete: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        if data.len() > most - bytes.len() {
            return Err(ApiError::too_large(most));
        }
        charge.grow(data.len())?;
        bytes.extend_from_slice(&data);
    }
    Ok(bytes)
}

/// The right to change what all keys share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Admin;

impl FromRequestParts<Arc<App>> for Admin {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<App>) -> Result<Self, ApiError> {
        parts.extensions.get().copied().ok_or_else(|| {
            ApiError::forbidden(
                "this changes what all keys share and needs an admin key; start the server with --admin-key, or with `admin` \
                 behind a key of its file",
            )
        })
    }
}

impl FromRequestParts<Arc<App>> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<App>) -> Result<Self, ApiError> {
        // Every route with a caller is behind `middleware::authenticate`, which inserts it.
        parts.extensions.get().cloned().ok_or_else(ApiError::invalid_key)
    }
}
