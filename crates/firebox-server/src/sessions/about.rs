use std::sync::Arc;

use axum::Json;
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use serde::de::DeserializeOwned;

use super::Answered;
use super::dialogue::Dialogue;
use super::registry::{Held, Taken};
use crate::app::App;
use crate::asked::{Caller, Named};
use crate::error::ApiError;

/// What a request is about: a session of whoever asks, or something in it, by the names in its path.
#[derive(Debug)]
pub(super) struct About<T = String> {
    pub app: Arc<App>,
    pub scope: String,
    pub named: T,
}

impl<T: DeserializeOwned + Send> FromRequestParts<Arc<App>> for About<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        let Caller(scope) = Caller::from_request_parts(parts, app).await?;
        let Named(named) = Named::from_request_parts(parts, app).await?;
        Ok(Self { app: app.clone(), scope, named })
    }
}

impl About {
    /// The session.
    pub fn find(&self) -> Result<Arc<Held>, ApiError> {
        self.app.sessions.find(&self.scope, &self.named)
    }

    /// The same, to change it.
    pub fn take(&self) -> Result<Taken, ApiError> {
        self.app.sessions.take(&self.scope, &self.named)
    }

    /// Changes it, and answers with what it is then.
    pub async fn change(
        self,
        act: impl FnOnce(&mut Dialogue) -> Result<(), ApiError> + Send + 'static,
    ) -> Answered {
        let (taken, ()) = self.take()?.change(act).await?;
        Ok(Json(taken.let_go().value()))
    }
}

impl About<(String, String)> {
    /// The session, and the number of what is meant in it.
    pub fn numbered(self, what: &str) -> Result<(About, u64), ApiError> {
        let Self { app, scope, named: (named, number) } = self;
        let found = number.parse().map_err(|_| ApiError::nowhere(format!("there is no {what} {number:?}")));
        Ok((About { app, scope, named }, found?))
    }

    /// Changes the session by something in it, and answers with what it is then.
    pub async fn change(
        self,
        what: &str,
        act: impl FnOnce(&mut Dialogue, u64) -> Result<(), ApiError> + Send + 'static,
    ) -> Answered {
        let (about, number) = self.numbered(what)?;
        about.change(move |dialogue| act(dialogue, number)).await
    }
}
