//! `/v1/sessions`: persistent conversations, and control of their memory.

mod answer_stream;
mod archive;
pub(crate) mod registry;
#[cfg(test)]
pub(crate) mod schema;
mod session_request;
mod session_tree;
mod transcript;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use axum::routing;
use firebox_runtime::Capacity;
use serde_json::{Value, json};

use crate::app::{App, Routes};
use crate::blocking::blocking;
use crate::body_memory::ParsedBody;
use crate::error::ApiError;
use crate::extract::{Caller, JsonBody};
use crate::json_fields::JsonFields;
use crate::{api_keys, sampling_params, sse};
use session_request::{JsonResult, SessionRequest};
use session_tree::{SessionOptions, SessionTree};

/// Facts that a new session may have.
const MAX_FACTS: usize = 256;

pub(crate) fn routes() -> Routes {
    Routes::new()
        .route("/v1/sessions", routing::get(list).post(begin))
        .route("/v1/sessions/{id}", routing::get(get).delete(end))
        .route("/v1/sessions/{id}/say", routing::post(say_in))
        .route("/v1/sessions/{id}/fork", routing::post(fork))
        .route("/v1/sessions/{id}/rewind", routing::post(rewind))
        .route("/v1/sessions/{id}/head", routing::post(head))
        .route("/v1/sessions/{id}/turns/{turn}", routing::post(turn))
        .route("/v1/sessions/{id}/facts", routing::post(add_fact))
        .route("/v1/sessions/{id}/facts/{fact}", routing::post(supersede))
        .route("/v1/sessions/{id}/branches/{branch}", routing::post(switch))
        .route("/v1/sessions/{id}/branches/{branch}/promote", routing::post(promote))
        .route("/v1/sessions/{id}/branches/{branch}", routing::delete(drop_branch))
        .route("/v1/sessions/{id}/save", routing::post(save))
        .route("/v1/sessions/saved/{name}", routing::delete(remove_saved))
}

/// The sessions of the key, and the names of its saved ones.
#[cfg_attr(test, utoipa::path(
    get,
    path = "/v1/sessions",
    tag = "sessions",
    responses((status = 200, description = "Those there are", body = schema::SessionList), ApiError)
))]
pub(crate) async fn list(State(app): State<Arc<App>>, Caller(scope): Caller) -> JsonResult {
    let summary = |held: Arc<registry::SessionHandle>| {
        let mut value = held.value();
        if let Value::Object(fields) = &mut value {
            fields.retain(|name, _| !matches!(name.as_str(), "turns" | "branches"));
        }
        value
    };
    let sessions: Vec<Value> = app.sessions.of_scope(&scope).into_iter().map(summary).collect();
    let owner = api_keys::owner(&scope);
    let named = app.clone();
    let saved = blocking(move || Ok(named.sessions.archive.names(&owner))).await?;
    Ok(Json(json!({ "object": "list", "data": sessions, "saved": saved })))
}

/// Creates a session, or restores a saved one.
#[cfg_attr(test, utoipa::path(
    post,
    path = "/v1/sessions",
    tag = "sessions",
    request_body = schema::NewSession,
    responses((status = 200, description = "The session", body = schema::Session), ApiError)
))]
pub(crate) async fn begin(
    State(app): State<Arc<App>>,
    Caller(scope): Caller,
    JsonBody(body): JsonBody,
) -> JsonResult {
    let fields = JsonFields::new(&body)?;
    let selected = app.catalog.find(fields.string("model")?).await?;
    let engine = app.engine.clone();
    let context = selected.served.require_context()?.min(selected.served.model.planned_tokens());
    if let Some(name) = fields.string("restore")? {
        for other in ["system", "facts", "turn_tokens", "fact_tokens", "relevance"] {
            if fields.get(other).is_some() {
                return Err(fields.error(other, "is restored from the file; leave it out"));
            }
        }
        if let Some(head) = &selected.head {
            let reason = format!("the head is restored from the file; leave `:{head}` out");
            return Err(fields.error("model", reason));
        }
        let folder = app.sessions.archive.folder(&api_keys::owner(&scope))?;
        let path = archive::file(&folder, name, "restore")?;
        if !path.is_file() {
            return Err(archive::no_saved(name));
        }
        let served = selected.served.clone();
        let held =
            app.sessions.begin(&scope, served, move |served| SessionTree::restore(served, &engine, &path));
        return Ok(Json(held.await?.value()));
    }
    let whole =
        |name: &str, from| Ok::<_, ApiError>(fields.integer(name, from, 1 << 32)?.map(|most| most as usize));
    let capacity = Capacity::new(context, whole("turn_tokens", 16)?, whole("fact_tokens", 0)?);
    if !capacity.fits(context) {
        let Capacity { turns, facts } = capacity;
        let reason =
            format!("{turns} for turns and {facts} for facts exceed the model's context of {context} tokens");
        return Err(fields.error("turn_tokens", reason));
    }
    let facts: Vec<String> = fields.strings("facts")?.into_iter().map(str::to_owned).collect();
    if facts.len() > MAX_FACTS {
        return Err(fields.error("facts", format!("more than {MAX_FACTS}")));
    }
    if facts.iter().any(|fact| fact.trim().is_empty()) {
        return Err(fields.error("facts", "one of them is empty"));
    }
    let system = fields.string("system")?.filter(|system| !system.is_empty()).map(str::to_owned);
    let relevance = fields.boolean("relevance")?.unwrap_or(false);
    let options = SessionOptions { system, facts, head: selected.head.clone(), capacity, relevance };
    let served = selected.served.clone();
    let held =
        app.sessions.begin(&scope, served, move |served| SessionTree::new(served, &engine, options)).await?;
    Ok(Json(held.value()))
}

/// A session with its turns, facts and branches.
#[cfg_attr(test, utoipa::path(
    get,
    path = "/v1/sessions/{id}",
    tag = "sessions",
    params(("id" = String, Path, description = "The session")),
    responses((status = 200, description = "The session", body = schema::Session), ApiError)
))]
pub(crate) async fn get(request: SessionRequest) -> JsonResult {
    Ok(Json(request.find()?.value()))
}

/// Deletes a session. Its saved files stay.
#[cfg_attr(test, utoipa::path(
    delete,
    path = "/v1/sessions/{id}",
    tag = "sessions",
    params(("id" = String, Path, description = "The session")),
    responses((status = 200, description = "It is gone", body = schema::Deleted), ApiError)
))]
pub(crate) async fn end(SessionRequest { app, scope, params: id }: SessionRequest) -> JsonResult {
    app.sessions.end(&scope, &id)?;
    Ok(Json(json!({ "id": id, "object": "session", "deleted": true })))
}

/// Sends a message to a session and answers it, whole or streamed.
#[cfg_attr(test, utoipa::path(
    post,
    path = "/v1/sessions/{id}/say",
    tag = "sessions",
    params(("id" = String, Path, description = "The session")),
    request_body = schema::SessionQuestion,
    responses((status = 200, description = "The answer, or events with its parts", content((schema::SessionAnswer = "application/json"), (crate::schema::StreamEvent = "text/event-stream"))), ApiError)
))]
pub(crate) async fn say_in(request: SessionRequest, JsonBody(body): JsonBody) -> Result<Response, ApiError> {
    sse::respond(body["stream"] == true, sse::DONE, answer(request, body)).await
}

async fn answer(request: SessionRequest, body: ParsedBody) -> Result<Response, ApiError> {
    let fields = JsonFields::new(&body)?;
    let content = fields.required_string("content")?.to_owned();
    if content.trim().is_empty() {
        return Err(fields.error("content", "is empty"));
    }
    let chat_only = [
        ("n", 1.into()),
        ("logprobs", Value::Bool(false)),
        ("tools", json!([])),
        ("tool_choice", "none".into()),
    ];
    fields.reject_unsupported(chat_only, "is not supported in sessions; use /v1/chat/completions")?;
    let streams = fields.boolean("stream")?.unwrap_or(false);
    let lookup = sampling_params::lookup(&fields)?;
    let (guard, SessionRequest { app, scope, .. }) = (request.lock()?, request);
    let mut config = sampling_params::generation_config(&fields, &guard.tree.served)?;
    // The session evicts turns before the context is full.
    config.context = None;
    config.loop_guard |= fields.get("loop_guard").is_none() && !config.ignore_end;
    let (field, grammar) = (sampling_params::grammar_field(&fields), config.grammar.as_ref());
    let compiled = app.compile_grammar(field, grammar, &guard.tree.served, &scope).await?;
    let mut request = guard.tree.served.request(Vec::new()).with_config(config);
    request = request.in_scope(&scope).for_client(app.client(&scope)).with_compiled_grammar(compiled);
    request.lookup = lookup;
    let answer = answer_stream::AnswerStream::begin(guard, &app.engine, content, request).await?;
    if streams {
        return Ok(answer.into_response());
    }
    Ok(Json(answer.collect().await?).into_response())
}

/// Forks the active branch, before a turn or at its end, and switches to the fork.
#[cfg_attr(test, utoipa::path(
    post,
    path = "/v1/sessions/{id}/fork",
    tag = "sessions",
    params(("id" = String, Path, description = "The session")),
    request_body = schema::ForkAt,
    responses((status = 200, description = "The session as it is then", body = schema::Session), ApiError)
))]
pub(crate) async fn fork(request: SessionRequest, JsonBody(body): JsonBody) -> JsonResult {
    let turn = number(&JsonFields::new(&body)?, "turn")?;
    request.change(move |tree| tree.fork(turn).map(drop)).await
}

/// Rewinds the active branch to before a turn.
#[cfg_attr(test, utoipa::path(
    post,
    path = "/v1/sessions/{id}/rewind",
    tag = "sessions",
    params(("id" = String, Path, description = "The session")),
    request_body = schema::RewindTo,
    responses((status = 200, description = "The session as it is then", body = schema::Session), ApiError)
))]
pub(crate) async fn rewind(request: SessionRequest, JsonBody(body): JsonBody) -> JsonResult {
    let fields = JsonFields::new(&body)?;
    let turn = number(&fields, "turn")?.ok_or_else(|| fields.error("turn", "is missing"))?;
    request.change(move |tree| tree.rewind(turn)).await
}

/// Selects the head that answers; null selects the model's own.
#[cfg_attr(test, utoipa::path(
    post,
    path = "/v1/sessions/{id}/head",
    tag = "sessions",
    params(("id" = String, Path, description = "The session")),
    request_body = schema::WearHead,
    responses((status = 200, description = "The session as it is then", body = schema::Session), ApiError)
))]
pub(crate) async fn head(request: SessionRequest, JsonBody(body): JsonBody) -> JsonResult {
    let head = JsonFields::new(&body)?.string("head")?.map(str::to_owned);
    let (guard, swap) = request.lock()?.change(move |tree| tree.set_head(head.as_deref())).await?;
    let mut value = guard.release().value();
    value["swap"] = swap;
    Ok(Json(value))
}

/// Pins or hides a turn.
#[cfg_attr(test, utoipa::path(
    post,
    path = "/v1/sessions/{id}/turns/{turn}",
    tag = "sessions",
    params(("id" = String, Path, description = "The session"), ("turn" = u64, Path, description = "The turn")),
    request_body = schema::MarkTurn,
    responses((status = 200, description = "The session as it is then", body = schema::Session), ApiError)
))]
pub(crate) async fn turn(request: SessionRequest<(String, String)>, JsonBody(body): JsonBody) -> JsonResult {
    let fields = JsonFields::new(&body)?;
    let (pinned, hidden) = (fields.boolean("pinned")?, fields.boolean("hidden")?);
    request.change("turn", move |tree, turn| tree.mark(turn, pinned, hidden)).await
}

/// Adds a fact.
#[cfg_attr(test, utoipa::path(
    post,
    path = "/v1/sessions/{id}/facts",
    tag = "sessions",
    params(("id" = String, Path, description = "The session")),
    request_body = schema::FactText,
    responses((status = 200, description = "The session as it is then", body = schema::Session), ApiError)
))]
pub(crate) async fn add_fact(request: SessionRequest, JsonBody(body): JsonBody) -> JsonResult {
    let text = fact(&JsonFields::new(&body)?)?;
    request.change(move |tree| tree.add_fact(&text).map(drop)).await
}

/// Supersedes a fact.
#[cfg_attr(test, utoipa::path(
    post,
    path = "/v1/sessions/{id}/facts/{fact}",
    tag = "sessions",
    params(("id" = String, Path, description = "The session"), ("fact" = u64, Path, description = "The fact")),
    request_body = schema::FactText,
    responses((status = 200, description = "The session as it is then", body = schema::Session), ApiError)
))]
pub(crate) async fn supersede(
    request: SessionRequest<(String, String)>,
    JsonBody(body): JsonBody,
) -> JsonResult {
    let text = fact(&JsonFields::new(&body)?)?;
    request.change("fact", move |tree, old| tree.supersede(old, &text).map(drop)).await
}

/// Switches to another branch.
#[cfg_attr(test, utoipa::path(
    post,
    path = "/v1/sessions/{id}/branches/{branch}",
    tag = "sessions",
    params(("id" = String, Path, description = "The session"), ("branch" = u64, Path, description = "The branch")),
    responses((status = 200, description = "The session as it is then", body = schema::Session), ApiError)
))]
pub(crate) async fn switch(request: SessionRequest<(String, String)>) -> JsonResult {
    request.change("branch", SessionTree::switch).await
}

/// Replaces a branch's parent by the branch.
#[cfg_attr(test, utoipa::path(
    post,
    path = "/v1/sessions/{id}/branches/{branch}/promote",
    tag = "sessions",
    params(("id" = String, Path, description = "The session"), ("branch" = u64, Path, description = "The branch")),
    responses((status = 200, description = "The session as it is then", body = schema::Session), ApiError)
))]
pub(crate) async fn promote(request: SessionRequest<(String, String)>) -> JsonResult {
    request.change("branch", SessionTree::promote).await
}

/// Deletes a branch and its descendants.
#[cfg_attr(test, utoipa::path(
    delete,
    path = "/v1/sessions/{id}/branches/{branch}",
    tag = "sessions",
    params(("id" = String, Path, description = "The session"), ("branch" = u64, Path, description = "The branch")),
    responses((status = 200, description = "The session as it is then", body = schema::Session), ApiError)
))]
pub(crate) async fn drop_branch(request: SessionRequest<(String, String)>) -> JsonResult {
    request.change("branch", SessionTree::drop_branch).await
}

/// Saves the active branch to a file, from which this or another process may continue.
#[cfg_attr(test, utoipa::path(
    post,
    path = "/v1/sessions/{id}/save",
    tag = "sessions",
    params(("id" = String, Path, description = "The session")),
    request_body = schema::SaveAs,
    responses((status = 200, description = "The session as it is then", body = schema::Session), ApiError)
))]
pub(crate) async fn save(request: SessionRequest, JsonBody(body): JsonBody) -> JsonResult {
    let fields = JsonFields::new(&body)?;
    let app = request.app.clone();
    let owner = api_keys::owner(&request.scope);
    let folder = app.sessions.archive.folder(&owner)?;
    let name = fields.required_string("name")?.to_owned();
    archive::check_name(&name, "name")?;
    request.find()?;
    // Acquired before the session is locked, so that it can be used while waiting.
    let turn = app.sessions.archive.save_permit(&owner).await?;
    let saved = name.clone();
    let changed = request.change(move |tree| {
        let _turn = turn;
        app.sessions.archive.save((&*folder, &*name), |path| tree.save(path))
    });
    changed.await.map(|Json(mut value)| {
        value["saved"] = saved.into();
        Json(value)
    })
}

/// Deletes a saved session. Sessions restored from it stay.
#[cfg_attr(test, utoipa::path(
    delete,
    path = "/v1/sessions/saved/{name}",
    tag = "sessions",
    params(("name" = String, Path, description = "What it was saved as")),
    responses((status = 200, description = "It is gone", body = schema::Deleted), ApiError)
))]
pub(crate) async fn remove_saved(SessionRequest { app, scope, params: name }: SessionRequest) -> JsonResult {
    let folder = app.sessions.archive.folder(&api_keys::owner(&scope))?;
    let path = archive::file(&folder, &name, "name")?;
    let gone = json!({ "id": name, "object": "session", "deleted": true });
    blocking(move || archive::remove(&path, &name)).await?;
    Ok(Json(gone))
}

fn number(fields: &JsonFields<'_>, field: &str) -> Result<Option<u64>, ApiError> {
    fields.integer(field, 0, u64::MAX)
}

fn fact(fields: &JsonFields<'_>) -> Result<String, ApiError> {
    let text = fields.required_string("text")?;
    if text.trim().is_empty() {
        return Err(fields.error("text", "is empty"));
    }
    Ok(text.to_owned())
}
