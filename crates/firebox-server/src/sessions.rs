//! `/v1/sessions`: conversations that stay, and what can be done with what they remember.

mod about;
mod archive;
mod dialogue;
mod registry;
mod say;
pub(crate) mod schema;
mod transcript;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use firebox_runtime::Capacity;
use serde_json::{Value, json};
use utoipa_axum::routes;

use crate::app::{App, Routes, blocking};
use crate::asked::{Asked, Caller};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::{events, wishes};
use about::About;
use dialogue::{Dialogue, Wish};
pub(crate) use registry::Sessions;
pub use registry::SessionsConfig;

/// Facts that a session may begin with.
const MOST_FACTS: usize = 256;

type Answered = Result<Json<Value>, ApiError>;

pub(crate) fn routes() -> Routes {
    Routes::new()
        .routes(routes!(list, begin))
        .routes(routes!(get, end))
        .routes(routes!(say_in))
        .routes(routes!(fork))
        .routes(routes!(rewind))
        .routes(routes!(head))
        .routes(routes!(turn))
        .routes(routes!(add_fact))
        .routes(routes!(supersede))
        .routes(routes!(switch))
        .routes(routes!(promote))
        .routes(routes!(drop_branch))
        .routes(routes!(save))
        .routes(routes!(remove_saved))
}

/// The sessions of a key, and the names of those it has saved.
#[utoipa::path(
    get,
    path = "/v1/sessions",
    tag = "sessions",
    responses((status = 200, description = "Those there are", body = schema::SessionList), ApiError)
)]
async fn list(State(app): State<Arc<App>>, Caller(scope): Caller) -> Answered {
    let summary = |held: Arc<registry::Held>| {
        let mut value = held.value();
        if let Value::Object(fields) = &mut value {
            fields.retain(|name, _| !matches!(name.as_str(), "turns" | "branches"));
        }
        value
    };
    let sessions: Vec<Value> = app.sessions.of(&scope).into_iter().map(summary).collect();
    let owner = app.keys.owner(&scope);
    let named = app.clone();
    let saved = blocking(move || Ok(named.sessions.archive.names(&owner))).await?;
    Ok(Json(json!({ "object": "list", "data": sessions, "saved": saved })))
}

/// Begins a session, or restores one that was saved.
#[utoipa::path(
    post,
    path = "/v1/sessions",
    tag = "sessions",
    request_body = schema::NewSession,
    responses((status = 200, description = "The session", body = schema::Session), ApiError)
)]
async fn begin(State(app): State<Arc<App>>, Caller(scope): Caller, Asked(body): Asked) -> Answered {
    let fields = Fields::of(&body)?;
    let chosen = app.catalog.find(fields.text("model")?).await?;
    let engine = app.engine.clone();
    let context = chosen.served.expect_context()?.min(chosen.served.model.planned_tokens());
    if let Some(name) = fields.text("restore")? {
        for other in ["system", "facts", "turn_tokens", "fact_tokens", "relevance"] {
            if fields.get(other).is_some() {
                return Err(fields.wrong(other, "is part of what is restored; leave it out"));
            }
        }
        if let Some(head) = &chosen.head {
            let reason = format!("the head is part of what is restored; leave `:{head}` out");
            return Err(fields.wrong("model", reason));
        }
        let folder = app.sessions.archive.folder(&app.keys.owner(&scope))?;
        let path = archive::file(&folder, name, "restore")?;
        if !path.is_file() {
            return Err(archive::no_saved(name));
        }
        let served = chosen.served.clone();
        let held =
            app.sessions.begin(&scope, served, move |served| Dialogue::restore(served, &engine, &path));
        return Ok(Json(held.await?.value()));
    }
    let whole =
        |name: &str, from| Ok::<_, ApiError>(fields.whole(name, from, 1 << 32)?.map(|most| most as usize));
    let capacity = Capacity::of(context, whole("turn_tokens", 16)?, whole("fact_tokens", 0)?);
    if !capacity.fits(context) {
        let Capacity { turns, facts } = capacity;
        let reason = format!(
            "{turns} of turns and {facts} of facts are more than the {context} tokens of the model's context"
        );
        return Err(fields.wrong("turn_tokens", reason));
    }
    let facts: Vec<String> = fields.texts("facts")?.into_iter().map(str::to_owned).collect();
    if facts.len() > MOST_FACTS {
        return Err(fields.wrong("facts", format!("more than {MOST_FACTS}")));
    }
    if facts.iter().any(|fact| fact.trim().is_empty()) {
        return Err(fields.wrong("facts", "one of them is empty"));
    }
    let system = fields.text("system")?.filter(|system| !system.is_empty()).map(str::to_owned);
    let relevance = fields.truth("relevance")?.unwrap_or(false);
    let wish = Wish { system, facts, head: chosen.head.clone(), capacity, relevance };
    let served = chosen.served.clone();
    let held =
        app.sessions.begin(&scope, served, move |served| Dialogue::begin(served, &engine, wish)).await?;
    Ok(Json(held.value()))
}

/// A session: its turns, facts and branches.
#[utoipa::path(
    get,
    path = "/v1/sessions/{id}",
    tag = "sessions",
    params(("id" = String, Path, description = "The session")),
    responses((status = 200, description = "The session", body = schema::Session), ApiError)
)]
async fn get(about: About) -> Answered {
    Ok(Json(about.find()?.value()))
}

/// Ends a session. What was saved of it stays.
#[utoipa::path(
    delete,
    path = "/v1/sessions/{id}",
    tag = "sessions",
    params(("id" = String, Path, description = "The session")),
    responses((status = 200, description = "It is gone", body = schema::Deleted), ApiError)
)]
async fn end(About { app, scope, named: id }: About) -> Answered {
    app.sessions.end(&scope, &id)?;
    Ok(Json(json!({ "id": id, "object": "session", "deleted": true })))
}

/// Says something in a session, and answers it, whole or as it comes.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/say",
    tag = "sessions",
    params(("id" = String, Path, description = "The session")),
    request_body = schema::SessionQuestion,
    responses((status = 200, description = "The answer, or events with its parts", content((schema::SessionAnswer = "application/json"), (String = "text/event-stream"))), ApiError)
)]
async fn say_in(about: About, Asked(body): Asked) -> Result<Response, ApiError> {
    events::soon(body["stream"] == true, events::DONE, answer(about, body)).await
}

async fn answer(about: About, body: Value) -> Result<Response, ApiError> {
    let fields = Fields::of(&body)?;
    let content = fields.needed_text("content")?.to_owned();
    if content.trim().is_empty() {
        return Err(fields.wrong("content", "there is nothing in it to answer"));
    }
    let of_chats = [
        ("n", 1.into()),
        ("logprobs", Value::Bool(false)),
        ("tools", json!([])),
        ("tool_choice", "none".into()),
    ];
    fields.expect_unasked(of_chats, "is not there in sessions; ask by /v1/chat/completions")?;
    let stream = fields.truth("stream")?.unwrap_or(false);
    let (taken, About { app, scope, .. }) = (about.take()?, about);
    let mut config = wishes::config(&fields, &taken.dialogue.served)?;
    // Turns are forgotten before there are more than fit.
    config.context = None;
    app.check(wishes::form_field(&fields), config.grammar.as_ref(), &taken.dialogue.served).await?;
    let saying = say::Saying::begin(taken, &app.engine, &scope, content, config).await?;
    if stream {
        return Ok(saying.stream());
    }
    Ok(Json(saying.whole().await?).into_response())
}

/// A branch that leaves the active one, before a turn or where it is now.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/fork",
    tag = "sessions",
    params(("id" = String, Path, description = "The session")),
    request_body = schema::ForkAt,
    responses((status = 200, description = "The session as it is then", body = schema::Session), ApiError)
)]
async fn fork(about: About, Asked(body): Asked) -> Answered {
    let turn = number(&Fields::of(&body)?, "turn")?;
    about.change(move |dialogue| dialogue.fork(turn).map(drop)).await
}

/// Goes back to before a turn.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/rewind",
    tag = "sessions",
    params(("id" = String, Path, description = "The session")),
    request_body = schema::RewindTo,
    responses((status = 200, description = "The session as it is then", body = schema::Session), ApiError)
)]
async fn rewind(about: About, Asked(body): Asked) -> Answered {
    let fields = Fields::of(&body)?;
    let turn = number(&fields, "turn")?.ok_or_else(|| fields.wrong("turn", "is missing"))?;
    about.change(move |dialogue| dialogue.rewind(turn)).await
}

/// Changes the head that answers; null is the model's own.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/head",
    tag = "sessions",
    params(("id" = String, Path, description = "The session")),
    request_body = schema::WearHead,
    responses((status = 200, description = "The session as it is then", body = schema::Session), ApiError)
)]
async fn head(about: About, Asked(body): Asked) -> Answered {
    let head = Fields::of(&body)?.text("head")?.map(str::to_owned);
    let (taken, swap) = about.take()?.change(move |dialogue| dialogue.wear(head.as_deref())).await?;
    let mut value = taken.let_go().value();
    value["swap"] = swap;
    Ok(Json(value))
}

/// Pins a turn, or hides it from what comes.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/turns/{turn}",
    tag = "sessions",
    params(("id" = String, Path, description = "The session"), ("turn" = u64, Path, description = "The turn")),
    request_body = schema::MarkTurn,
    responses((status = 200, description = "The session as it is then", body = schema::Session), ApiError)
)]
async fn turn(about: About<(String, String)>, Asked(body): Asked) -> Answered {
    let fields = Fields::of(&body)?;
    let (pinned, hidden) = (fields.truth("pinned")?, fields.truth("hidden")?);
    about.change("turn", move |dialogue, turn| dialogue.mark(turn, pinned, hidden)).await
}

/// Adds a fact.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/facts",
    tag = "sessions",
    params(("id" = String, Path, description = "The session")),
    request_body = schema::FactText,
    responses((status = 200, description = "The session as it is then", body = schema::Session), ApiError)
)]
async fn add_fact(about: About, Asked(body): Asked) -> Answered {
    let text = fact(&Fields::of(&body)?)?;
    about.change(move |dialogue| dialogue.add_fact(&text).map(drop)).await
}

/// Puts a fact in the place of another.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/facts/{fact}",
    tag = "sessions",
    params(("id" = String, Path, description = "The session"), ("fact" = u64, Path, description = "The fact")),
    request_body = schema::FactText,
    responses((status = 200, description = "The session as it is then", body = schema::Session), ApiError)
)]
async fn supersede(about: About<(String, String)>, Asked(body): Asked) -> Answered {
    let text = fact(&Fields::of(&body)?)?;
    about.change("fact", move |dialogue, old| dialogue.supersede(old, &text).map(drop)).await
}

/// Goes on in another branch.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/branches/{branch}",
    tag = "sessions",
    params(("id" = String, Path, description = "The session"), ("branch" = u64, Path, description = "The branch")),
    responses((status = 200, description = "The session as it is then", body = schema::Session), ApiError)
)]
async fn switch(about: About<(String, String)>) -> Answered {
    about.change("branch", Dialogue::switch).await
}

/// Lets a branch take the place of the one it left.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/branches/{branch}/promote",
    tag = "sessions",
    params(("id" = String, Path, description = "The session"), ("branch" = u64, Path, description = "The branch")),
    responses((status = 200, description = "The session as it is then", body = schema::Session), ApiError)
)]
async fn promote(about: About<(String, String)>) -> Answered {
    about.change("branch", Dialogue::promote).await
}

/// Ends a branch and all that have left it.
#[utoipa::path(
    delete,
    path = "/v1/sessions/{id}/branches/{branch}",
    tag = "sessions",
    params(("id" = String, Path, description = "The session"), ("branch" = u64, Path, description = "The branch")),
    responses((status = 200, description = "The session as it is then", body = schema::Session), ApiError)
)]
async fn drop_branch(about: About<(String, String)>) -> Answered {
    about.change("branch", Dialogue::drop_branch).await
}

/// Writes the active branch to a file, for this process or another to go on from.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/save",
    tag = "sessions",
    params(("id" = String, Path, description = "The session")),
    request_body = schema::SaveAs,
    responses((status = 200, description = "The session as it is then", body = schema::Session), ApiError)
)]
async fn save(about: About, Asked(body): Asked) -> Answered {
    let fields = Fields::of(&body)?;
    let app = about.app.clone();
    let owner = app.keys.owner(&about.scope);
    let folder = app.sessions.archive.folder(&owner)?;
    let name = fields.needed_text("name")?.to_owned();
    archive::expect_name(&name, "name")?;
    about.find()?;
    // Waited for before the session is taken, which others may go on with until then.
    let turn = app.sessions.archive.turn(&owner).await?;
    let saved = name.clone();
    let changed = about.change(move |dialogue| {
        let _turn = turn;
        app.sessions.archive.keep((&*folder, &*name), |path| dialogue.save(path))
    });
    changed.await.map(|Json(mut value)| {
        value["saved"] = saved.into();
        Json(value)
    })
}

/// Removes what was saved. Sessions that were restored from it stay.
#[utoipa::path(
    delete,
    path = "/v1/sessions/saved/{name}",
    tag = "sessions",
    params(("name" = String, Path, description = "What it was saved as")),
    responses((status = 200, description = "It is gone", body = schema::Deleted), ApiError)
)]
async fn remove_saved(About { app, scope, named: name }: About) -> Answered {
    let folder = app.sessions.archive.folder(&app.keys.owner(&scope))?;
    let path = archive::file(&folder, &name, "name")?;
    let gone = json!({ "id": name, "object": "session", "deleted": true });
    blocking(move || archive::remove(&path, &name)).await?;
    Ok(Json(gone))
}

fn number(fields: &Fields<'_>, field: &str) -> Result<Option<u64>, ApiError> {
    fields.whole(field, 0, u64::MAX)
}

fn fact(fields: &Fields<'_>) -> Result<String, ApiError> {
    let text = fields.needed_text("text")?;
    if text.trim().is_empty() {
        return Err(fields.wrong("text", "is empty"));
    }
    Ok(text.to_owned())
}
