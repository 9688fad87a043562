//! Errors of the server, and their mapping to responses of OpenAI's API.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use firebox_engine::EngineError;
use firebox_model::ModelError;
use firebox_runtime::{CacheError, GrammarError, MemoryError, RuntimeError, ScheduleError};
use firebox_text::TextError;
use serde_json::{Value, json};

/// Why a server could not start, or had to end.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address cannot be listened at.
    #[error(
        "cannot listen at {address}: {source}; is another server running there? --port 0 takes any free port"
    )]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
    /// The system provides no threads or no signals.
    #[error("the server cannot run: {source}")]
    System {
        /// The system's error.
        #[from]
        source: io::Error,
    },
    /// No model was given.
    #[error("no model to serve; name one or more")]
    NoModels,
    /// An API key is malformed.
    #[error("an API key is empty or not printable ASCII; use letters, digits and punctuation")]
    Key,
    /// A key file is unusable.
    #[error("{}: {reason}; write one key a line, and `admin` behind one that may load heads", path.display())]
    KeyFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The certificate or its key is unusable.
    #[error("{}: {reason}; TLS needs a chain of certificates and a private key, both as PEM", path.display())]
    Tls {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Everyone in the network could use the server.
    #[error(
        "{address} can be reached by other machines, and no key is needed: give one with --api-key or --api-key-file, listen at \
         127.0.0.1, or let all of them in with --insecure"
    )]
    Exposed {
        /// The address.
        address: SocketAddr,
    },
    /// An allowed origin is malformed.
    #[error(
        "{origin:?} is not an origin; write one as browsers send it, such as https://app.example or http://localhost:3000, \
         without a path"
    )]
    Origin {
        /// The given text.
        origin: String,
    },
    /// An allowed host is malformed.
    #[error(
        "{host:?} is not a host name; write one such as models.example, without a scheme, a port or a path"
    )]
    Host {
        /// The given text.
        host: String,
    },
    /// A pipeline cannot be served.
    #[error("pipeline {name}: {reason}")]
    Pipeline {
        /// Its name.
        name: String,
        /// What is wrong with it, and what helps.
        reason: String,
    },
    /// A model cannot be served.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The engine ended after a failure, and the server with it.
    #[error("the engine failed and ended: {reason}; start the server again")]
    EngineEnded {
        /// What the panic says.
        reason: String,
    },
}

impl From<RuntimeError> for ServerError {
    fn from(error: RuntimeError) -> Self {
        Self::Engine(error.into())
    }
}

/// An error in the format of OpenAI's API.
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

    /// A malformed or unacceptable request.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// An invalid field.
    pub fn field(param: impl Into<String>, message: impl AsRef<str>) -> Self {
        let param = param.into();
        let message = format!("{param}: {}", message.as_ref());
        Self { param: Some(param), ..Self::invalid(message) }
    }

    /// Fields without an effect, on a server that refuses them.
    pub fn ignored_fields(names: &str) -> Self {
        let first = names.split(", ").next().unwrap_or_default();
        Self::field(
            first,
            format!("this server refuses fields that it would ignore: {names}; leave them out"),
        )
    }

    pub fn invalid_key() -> Self {
        let message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`";
        let status = StatusCode::UNAUTHORIZED;
        Self { code: Some("invalid_api_key"), ..Self::new(status, "authentication_error", message) }
    }

    pub fn forbidden(message: &str) -> Self {
        Self::new(StatusCode::FORBIDDEN, "permission_error", message)
    }

    pub fn no_model(name: &str, there: &[String]) -> Self {
        let message = format!("there is no model {name:?}; there are: {}", there.join(", "));
        let error = Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message);
        Self { code: Some("model_not_found"), param: Some("model".into()), ..error }
    }

    pub fn no_route(path: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", format!("there is nothing at {path}"))
    }

    pub fn method_not_allowed(message: &str) -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
    }

    pub fn request_timeout(message: &str) -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message)
    }

    /// A response that exceeded the time limit of requests.
    pub fn deadline_exceeded(most: Duration) -> Self {
        let message = format!(
            "the answer took longer than the {} s that a request may take; ask for fewer tokens or texts",
            most.as_secs_f64()
        );
        Self::new(StatusCode::GATEWAY_TIMEOUT, "server_error", message)
    }

    pub fn too_large(most: usize) -> Self {
        let message = format!("the body exceeds {most} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    }

    /// A small body whose values would take much memory.
    pub fn too_many_values(most: usize) -> Self {
        let message = format!(
            "the body has too many values; together they may take {most} bytes of memory: send fewer of them, or several \
             requests"
        );
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    }

    /// A prompt longer than memory could ever hold.
    pub fn prompt_too_long(tokens: usize, room: usize) -> Self {
        let message = format!(
            "{tokens} tokens do not fit into the {room} that there is memory for; shorten the prompt, or start the server \
             with more --memory"
        );
        Self { code: Some("context_length_exceeded"), ..Self::invalid(message) }
    }

    /// Something that does not exist, or belongs to another key.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
    }

    /// An action that a running one excludes.
    pub fn conflict(message: &str) -> Self {
        Self::new(StatusCode::CONFLICT, "invalid_request_error", message)
    }

    pub fn too_many(message: impl Into<String>) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
    }

    /// A body for which there is no room beside those of other requests.
    pub fn bodies_full(most: usize) -> Self {
        Self::too_many(format!(
            "the bodies of requests take {most} bytes together, or half of that from one key; ask again when others \
             have ended"
        ))
    }

    /// Used-up storage, which waiting does not free.
    pub fn storage_full(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INSUFFICIENT_STORAGE, "invalid_request_error", message)
    }

    pub fn stopping() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", "the server is stopping; try again soon")
    }

    /// The engine's thread does not answer.
    pub fn engine_unavailable(message: impl Into<String>) -> Self {
        let unavailable = Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message);
        Self { code: Some("engine_unavailable"), ..unavailable }
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// Reports a grammar's error for the field that gave it.
    pub fn with_grammar_field(mut self, field: &str) -> Self {
        if self.param.as_deref() == Some("response_format") {
            self.param = Some(field.into());
        }
        self
    }

    /// Reports a head's error for the field `head`, unless the error is temporary.
    pub fn with_head_field(self) -> Self {
        match self.status {
            StatusCode::SERVICE_UNAVAILABLE => self,
            _ => Self::field("head", self.message),
        }
    }

    /// Returns what happened and what helps.
    pub fn message(&self) -> String {
        self.message.clone()
    }

    /// Returns the body of the response.
    pub fn value(&self) -> Value {
        let Self { kind, code, param, message, .. } = self;
        json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
    }

    /// Returns the error as an event of a stream.
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

impl From<&EngineError> for ApiError {
    fn from(error: &EngineError) -> Self {
        let message = error.to_string();
        match error {
            EngineError::Runtime(error) => Self::from(error),
            EngineError::Together { source } => Self::from(&**source),
            EngineError::NotOpened { source, .. } => Self { message, ..Self::from(&**source) },
            EngineError::HeadUnavailable { source, .. } => Self { message, ..Self::from(&**source) },
            EngineError::Schedule(
                ScheduleError::QueueFull { .. } | ScheduleError::ClientQueueFull { .. },
            ) => {
                let full = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
                Self { code: Some("queue_full"), ..full }
            }
            EngineError::Stalled { .. } => Self { code: Some("stalled"), ..Self::request_timeout(&message) },
            EngineError::EngineOver => Self::stopping(),
            EngineError::EngineFailed { .. } => Self::engine_unavailable(message),
            EngineError::Late { .. } => Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message),
            _ => Self::internal(message),
        }
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        Self::from(&error)
    }
}

impl From<&RuntimeError> for ApiError {
    fn from(error: &RuntimeError) -> Self {
        let message = error.to_string();
        match error {
            RuntimeError::ContextFull { .. } | RuntimeError::Model(ModelError::TooLong { .. }) => {
                Self { code: Some("context_length_exceeded"), ..Self::invalid(message) }
            }
            RuntimeError::Setting { setting, value, reason } => {
                Self::field(*setting, format!("{value}: {reason}"))
            }
            // Generation got stuck in a grammar that nothing can satisfy.
            RuntimeError::Constraint(
                GrammarError::Grammar { .. }
                | GrammarError::Vocabulary { .. }
                | GrammarError::NoTokenizer
                | GrammarError::Stuck { .. },
            ) => Self { param: Some("response_format".into()), ..Self::invalid(message) },
            RuntimeError::Text(error) => Self::from(error),
            RuntimeError::Cache(CacheError::TurnTooLong { .. } | CacheError::FactsFull { .. })
            | RuntimeError::Model(ModelError::Token { .. } | ModelError::NoTokens)
            | RuntimeError::NoTokenizer { .. }
            | RuntimeError::NoHead { .. }
            | RuntimeError::Kind { .. } => Self::invalid(message),
            RuntimeError::HeadTimeout { .. }
            | RuntimeError::Memory(MemoryError::OverBudget { .. } | MemoryError::TooLittleMemory { .. })
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

    fn unavailable(source: RuntimeError) -> EngineError {
        EngineError::HeadUnavailable { name: "code".into(), source: Arc::new(source) }
    }

    #[test]
    fn temporary_errors_are_unavailable() {
        let late = || RuntimeError::HeadTimeout { name: "code".into(), waited: Duration::from_secs(1) };
        let full = || CacheError::PoolExhausted { pages: 1 };
        let passing = [
            late().into(),
            unavailable(late()),
            RuntimeError::from(full()).into(),
            RuntimeError::from(ModelError::Cache(full())).into(),
            unavailable(full().into()),
        ];
        for error in passing {
            let told = ApiError::from(&error);
            assert_eq!(told.status, StatusCode::SERVICE_UNAVAILABLE, "{error}");
            assert_eq!((told.clone().with_head_field(), &*told.message), (told.clone(), &*error.to_string()));
        }
    }

    #[test]
    fn an_unavailable_head_is_reported_for_its_field() {
        let missing = unavailable(RuntimeError::NoHead { name: "code".into() });
        assert_eq!(ApiError::from(&missing).status, StatusCode::BAD_REQUEST);
        for error in [missing, unavailable(RuntimeError::Cancelled)] {
            let told = ApiError::from(&error).with_head_field();
            assert_eq!((told.status, told.param.as_deref()), (StatusCode::BAD_REQUEST, Some("head")));
            assert!(told.message.contains(&error.to_string()), "{}", told.message);
        }
    }
}
