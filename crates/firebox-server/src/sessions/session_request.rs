//! The extractor of requests about a session.

use std::sync::Arc;

use axum::Json;
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::registry::{SessionGuard, SessionHandle};
use super::session_tree::SessionTree;
use crate::app::App;
use crate::error::ApiError;
use crate::extract::{Caller, PathParams};

/// The response of a session's route.
pub(crate) type JsonResult = Result<Json<Value>, ApiError>;

/// A request about a session of the caller, or something in it, by the parameters of its path.
#[derive(Debug)]
pub(crate) struct SessionRequest<T = String> {
    pub app: Arc<App>,
    pub scope: String,
    pub params: T,
}

impl<T: DeserializeOwned + Send> FromRequestParts<Arc<App>> for SessionRequest<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        let Caller(scope) = Caller::from_request_parts(parts, app).await?;
        let PathParams(params) = PathParams::from_request_parts(parts, app).await?;
        Ok(Self { app: app.clone(), scope, params })
    }
}

impl SessionRequest {
    /// Finds the session.
    pub fn find(&self) -> Result<Arc<SessionHandle>, ApiError> {
        self.app.sessions.find(&self.scope, &self.params)
    }

    /// Locks the session.
    pub fn lock(&self) -> Result<SessionGuard, ApiError> {
        self.app.sessions.lock(&self.scope, &self.params)
    }

    /// Changes the session and returns its new state.
    pub async fn change(
        self,
        act: impl FnOnce(&mut SessionTree) -> Result<(), ApiError> + Send + 'static,
    ) -> JsonResult {
        let (guard, ()) = self.lock()?.change(act).await?;
        Ok(Json(guard.release().value()))
    }
}

impl SessionRequest<(String, String)> {
    /// Parses the number of something in the session.
    pub fn with_number(self, what: &str) -> Result<(SessionRequest, u64), ApiError> {
        let Self { app, scope, params: (params, number) } = self;
        let found = number.parse().map_err(|_| ApiError::not_found(format!("there is no {what} {number:?}")));
        Ok((SessionRequest { app, scope, params }, found?))
    }

    /// Changes something in the session and returns its new state.
    pub async fn change(
        self,
        what: &str,
        act: impl FnOnce(&mut SessionTree, u64) -> Result<(), ApiError> + Send + 'static,
    ) -> JsonResult {
        let (request, number) = self.with_number(what)?;
        request.change(move |tree| act(tree, number)).await
    }
}
