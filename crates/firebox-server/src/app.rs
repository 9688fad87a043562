use std::sync::Arc;

use axum::http::Uri;
use axum::middleware::from_fn_with_state;
use axum::{Extension, Router};
use firebox_runtime::engine::Engine;
use firebox_runtime::telemetry::Telemetry;
use firebox_runtime::{Constraint, Grammar, RuntimeError};
use tokio::sync::Semaphore;
use utoipa::OpenApi as _;
use utoipa_axum::router::OpenApiRouter;

use crate::catalog::Catalog;
use crate::connection::Limits;
use crate::description::{Common, Description};
use crate::engine_state::Watching;
use crate::error::ApiError;
use crate::served::Served;
use crate::sessions::{self, Sessions};
use crate::{
    Keys, Neighbours, Stop, chat, completions, console, deadline, description, engine_state, gate, heads,
    health, metrics, models, responses, tokens, vectors,
};

/// All that requests need.
#[derive(Debug)]
pub(crate) struct App {
    pub catalog: Catalog,
    pub engine: Engine,
    pub telemetry: Telemetry,
    pub keys: Keys,
    pub limits: Limits,
    /// Grammars are looked at beside the engine, one at a time: what is to do harm there keeps none but its like waiting.
    pub grammars: Arc<Semaphore>,
    /// Vectors are computed beside the engine, some texts of one request at a time.
    pub embedding: Arc<Semaphore>,
    pub sessions: Sessions,
    /// Who watches the engine.
    pub watching: Watching,
    pub stop: Stop,
    /// When it began.
    pub began: u64,
    /// Whether only this machine is listened to.
    pub is_local: bool,
    pub neighbours: Neighbours,
}

impl App {
    /// Refuses a grammar that cannot be used, before the engine sees it, whose thread answers everybody. A field has asked for
    /// it.
    pub async fn check(
        &self,
        field: &str,
        grammar: Option<&Grammar>,
        served: &Served,
    ) -> Result<(), ApiError> {
        let Some(grammar) = grammar.cloned() else { return Ok(()) };
        let (tokenizer, ends) = (served.tokenizer()?.clone(), served.model.end_tokens());
        let check = move || {
            Constraint::new(&grammar, &tokenizer, &ends).map_err(RuntimeError::from)?;
            Ok(())
        };
        in_turn(&self.grammars, check).await.map_err(|error: ApiError| error.of_form(field))
    }
}

/// The routes of one group, and what is told of them.
pub(crate) type Routes = OpenApiRouter<Arc<App>>;

/// For everybody.
fn open() -> Routes {
    Routes::with_openapi(Common::openapi())
        .merge(health::routes())
        .merge(description::routes())
        .merge(console::routes())
}

/// What computes, for those who have a key.
fn computing() -> Routes {
    Routes::new()
        .merge(chat::routes())
        .merge(responses::routes())
        .merge(completions::routes())
        .merge(vectors::routes())
        .merge(sessions::routes())
}

/// What is only looked at, by those who have a key: for as long as they like.
fn looking() -> Routes {
    Routes::new()
        .merge(tokens::routes())
        .merge(models::routes())
        .merge(metrics::routes())
        .merge(heads::routes())
        .merge(engine_state::routes())
}

/// All there is.
pub(crate) fn router(app: Arc<App>) -> Router {
    let computing = computing().route_layer(from_fn_with_state(app.clone(), deadline::keep));
    let keyed = computing.merge(looking()).route_layer(from_fn_with_state(app.clone(), gate::admit));
    let (router, document) = open().merge(keyed).split_for_parts();
    let router = router
        .fallback(|uri: Uri| async move { ApiError::no_page(uri.path()) })
        .layer(Extension(Description::of(&document)))
        .with_state(app.clone());
    // Around it all, where even those answers pass that no route gives.
    Router::new().fallback_service(router).layer(from_fn_with_state(app, gate::neighbours))
}

/// Does what takes long on a thread of its own.
pub(crate) async fn blocking<R: Send + 'static>(
    act: impl FnOnce() -> Result<R, ApiError> + Send + 'static,
) -> Result<R, ApiError> {
    match tokio::task::spawn_blocking(act).await {
        Ok(done) => done,
        Err(_) => Err(ApiError::internal("the request could not be worked on; the server's log says more")),
    }
}

/// The same when it is this request's turn. What a client that leaves has begun keeps the turn until it is done: nobody can
/// have several at once by asking and leaving.
pub(crate) async fn in_turn<R: Send + 'static>(
    turns: &Arc<Semaphore>,
    act: impl FnOnce() -> Result<R, ApiError> + Send + 'static,
) -> Result<R, ApiError> {
    let turn = turns.clone().acquire_owned().await.map_err(|_| ApiError::over())?;
    blocking(move || {
        let _turn = turn;
        act()
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use tokio::sync::oneshot;
    use tokio::time::timeout;

    use super::*;

    #[test]
    fn who_leaves_gives_the_turn_back_once_it_is_done() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let turns = Arc::new(Semaphore::new(1));
            let (begin, begun) = oneshot::channel();
            let (end, ended) = mpsc::channel::<()>();
            let taken = turns.clone();
            let asking = tokio::spawn(async move {
                let work = move || {
                    let _ = begin.send(());
                    let _ = ended.recv();
                    Ok(())
                };
                in_turn(&taken, work).await
            });
            begun.await.unwrap();
            asking.abort();
            assert!(asking.await.unwrap_err().is_cancelled());
            assert_eq!(turns.available_permits(), 0, "what was begun goes on");
            end.send(()).unwrap();
            drop(timeout(Duration::from_secs(20), turns.acquire()).await.unwrap().unwrap());
        });
    }
}
