use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use firebox_model::ModelError;
use firebox_runtime::{CacheError, ConstraintError, RuntimeError};
use firebox_text::TextError;
use serde_json::{Value, json};

/// Why a server could not begin, or had to end.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// Nobody can be heard at the address.
    #[error(
        "cannot listen at {address}: {source}; is another server running there? --port 0 takes any free port"
    )]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system says.
        source: io::Error,
    },
    /// The system gave no threads, or no signals.
    #[error("the server cannot run: {source}")]
    System {
        /// What the system says.
        #[from]
        source: io::Error,
    },
    /// There is nothing to serve.
    #[error("no model to serve; name one or more")]
    NoModels,
    /// A key is no key.
    #[error(
        "an API key is empty or has characters that no header carries; use letters, digits and punctuation"
    )]
    Key,
    /// A file of keys cannot be used.
    #[error("{}: {reason}; write one key a line", path.display())]
    KeyFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// What was to be an origin is none that a browser would send.
    #[error(
        "{origin:?} is no origin; write one as browsers send it, such as https://app.example or http://localhost:3000, \
         without a path"
    )]
    Origin {
        /// What was given.
        origin: String,
    },
    /// What was to be the name of a host is none.
    #[error(
        "{host:?} is no name of a host; write one such as models.example, without a scheme, a port or a path"
    )]
    Host {
        /// What was given.
        host: String,
    },
    /// A model could not be taken in.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
}

/// An error as OpenAI's API tells it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ApiError {
    pub status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
    /// The field at fault.
    param: Option<String>,
    message: String,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, code: None, param: None, message: message.into() }
    }

    /// A request that makes no sense.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// The same, because of a field.
    pub fn field(param: impl Into<String>, message: impl AsRef<str>) -> Self {
        let param = param.into();
        let message = format!("{param}: {}", message.as_ref());
        Self { param: Some(param), ..Self::invalid(message) }
    }

    pub fn key() -> Self {
        let message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`";
        let status = StatusCode::UNAUTHORIZED;
        Self { code: Some("invalid_api_key"), ..Self::new(status, "authentication_error", message) }
    }

    pub fn stranger(message: &str) -> Self {
        Self::new(StatusCode::FORBIDDEN, "permission_error", message)
    }

    pub fn no_model(name: &str, there: &[String]) -> Self {
        let message = format!("there is no model {name:?}; there are: {}", there.join(", "));
        let error = Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message);
        Self { code: Some("model_not_found"), param: Some("model".into()), ..error }
    }

    pub fn no_page(path: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", format!("there is nothing at {path}"))
    }

    pub fn not_allowed(message: &str) -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
    }

    pub fn slow(message: &str) -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message)
    }

    /// An answer that would have gone on for longer than a request may take.
    pub fn late(most: Duration) -> Self {
        let message = format!(
            "the answer took longer than the {} s that a request may take; ask for fewer tokens or texts",
            most.as_secs_f64()
        );
        Self::new(StatusCode::GATEWAY_TIMEOUT, "server_error", message)
    }

    pub fn too_large(most: usize) -> Self {
        let message = format!("the body is too large; at most {most} bytes are taken");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    }

    /// A body of few bytes that would become many.
    pub fn too_heavy(most: usize) -> Self {
        let message = format!(
            "the body has too many values; together they may take {most} bytes of memory: send fewer of them, or several \
             requests"
        );
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    }

    /// A prompt that is longer than there could be memory for, whatever else gave up its own.
    pub fn no_room(tokens: usize, room: usize) -> Self {
        let message = format!(
            "{tokens} tokens do not fit into the {room} that there is memory for; shorten the prompt, or start the server \
             with more --memory"
        );
        Self { code: Some("context_length_exceeded"), ..Self::invalid(message) }
    }

    /// Something that is not there, or is somebody else's.
    pub fn nowhere(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
    }

    /// What cannot be done while something else is.
    pub fn conflict(message: &str) -> Self {
        Self::new(StatusCode::CONFLICT, "invalid_request_error", message)
    }

    pub fn too_many(message: impl Into<String>) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
    }

    /// There is no room left for what somebody keeps, and none comes by waiting.
    pub fn no_storage(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INSUFFICIENT_STORAGE, "invalid_request_error", message)
    }

    pub fn over() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", "the server is stopping; try again soon")
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// The same where another field is at fault for a grammar.
    pub fn of_form(mut self, field: &str) -> Self {
        if self.param.as_deref() == Some("response_format") {
            self.param = Some(field.into());
        }
        self
    }

    /// The same about a head that was asked for by a field. What will be over soon is not the field's fault.
    pub fn of_head(self) -> Self {
        match self.status {
            StatusCode::SERVICE_UNAVAILABLE => self,
            _ => Self::field("head", self.message),
        }
    }

    /// As it is sent.
    pub fn value(&self) -> Value {
        let Self { kind, code, param, message, .. } = self;
        json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
    }

    /// As a stream that has begun tells it.
    pub fn event(&self) -> String {
        let mut value = self.value();
        value["type"] = "error".into();
        format!("data: {value}\n\n")
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.value())).into_response();
        let more = match self.status {
            StatusCode::UNAUTHORIZED => Some((header::WWW_AUTHENTICATE, "Bearer")),
            StatusCode::TOO_MANY_REQUESTS => Some((header::RETRY_AFTER, "1")),
            _ => None,
        };
        if let Some((name, value)) = more {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        response
    }
}

impl From<&RuntimeError> for ApiError {
    fn from(error: &RuntimeError) -> Self {
        let message = error.to_string();
        match error {
            RuntimeError::Together { source } => Self::from(&**source),
            RuntimeError::NotOpened { source, .. } | RuntimeError::HeadNotWorn { source, .. } => {
                Self { message, ..Self::from(&**source) }
            }
            RuntimeError::QueueFull { .. } => {
                let full = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
                Self { code: Some("queue_full"), ..full }
            }
            RuntimeError::ContextFull { .. } | RuntimeError::Model(ModelError::TooLong { .. }) => {
                Self { code: Some("context_length_exceeded"), ..Self::invalid(message) }
            }
            RuntimeError::Setting { setting, value, reason } => {
                Self::field(*setting, format!("{value}: {reason}"))
            }
            // A text that cannot go on was asked for in a form that nothing has.
            RuntimeError::Constraint(
                ConstraintError::Grammar { .. }
                | ConstraintError::Vocabulary { .. }
                | ConstraintError::NoTokenizer
                | ConstraintError::Stuck { .. },
            ) => Self { param: Some("response_format".into()), ..Self::invalid(message) },
            RuntimeError::Text(error) => Self::from(error),
            RuntimeError::Cache(CacheError::TurnTooLong { .. } | CacheError::FactsFull { .. })
            | RuntimeError::Model(ModelError::Token { .. } | ModelError::NoTokens)
            | RuntimeError::NoTokenizer { .. }
            | RuntimeError::NoHead { .. }
            | RuntimeError::Kind { .. } => Self::invalid(message),
            RuntimeError::EngineOver => Self::over(),
            RuntimeError::Late { .. }
            | RuntimeError::HeadLate { .. }
            | RuntimeError::OverBudget { .. }
            | RuntimeError::TooLittleMemory { .. }
            | RuntimeError::TooLittleShared { .. }
            | RuntimeError::Cache(CacheError::PoolExhausted { .. })
            | RuntimeError::Model(ModelError::Cache(CacheError::PoolExhausted { .. })) => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
            }
            _ => Self::internal(message),
        }
    }
}

impl From<RuntimeError> for ApiError {
    fn from(error: RuntimeError) -> Self {
        Self::from(&error)
    }
}

impl From<&TextError> for ApiError {
    fn from(error: &TextError) -> Self {
        let message = error.to_string();
        match error {
            TextError::RefusedByTemplate { .. }
            | TextError::RenderChatTemplate { .. }
            | TextError::TemplateLimit { .. }
            | TextError::UnsupportedContent { .. } => {
                Self { param: Some("messages".into()), ..Self::invalid(message) }
            }
            TextError::Encode { .. } => Self::invalid(message),
            _ => Self::internal(message),
        }
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> Self {
        Self::from(&error)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn not_worn(source: RuntimeError) -> RuntimeError {
        RuntimeError::HeadNotWorn { name: "code".into(), source: Arc::new(source) }
    }

    #[test]
    fn what_will_be_over_soon_may_be_asked_again() {
        let late = || RuntimeError::HeadLate { name: "code".into(), waited: Duration::from_secs(1) };
        let full = || CacheError::PoolExhausted { pages: 1 };
        let passing = [
            late(),
            not_worn(late()),
            full().into(),
            ModelError::Cache(full()).into(),
            not_worn(full().into()),
        ];
        for error in passing {
            let told = ApiError::from(&error);
            assert_eq!(told.status, StatusCode::SERVICE_UNAVAILABLE, "{error}");
            assert_eq!((told.clone().of_head(), &*told.message), (told.clone(), &*error.to_string()));
        }
    }

    #[test]
    fn a_head_that_is_not_there_is_the_fault_of_who_asks() {
        let missing = not_worn(RuntimeError::NoHead { name: "code".into() });
        assert_eq!(ApiError::from(&missing).status, StatusCode::BAD_REQUEST);
        for error in [missing, not_worn(RuntimeError::Cancelled)] {
            let told = ApiError::from(&error).of_head();
            assert_eq!((told.status, told.param.as_deref()), (StatusCode::BAD_REQUEST, Some("head")));
            assert!(told.message.contains(&error.to_string()), "{}", told.message);
        }
    }
}
