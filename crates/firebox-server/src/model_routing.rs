//! Requests to a pipeline: its router reads the question and chooses the model that answers.

use axum::response::Response;
use firebox_runtime::RuntimeError;
use firebox_runtime::heads::Router;
use firebox_text::{Message, TemplateOptions};

use crate::app::App;
use crate::blocking::with_permit;
use crate::catalog::SelectedModel;
use crate::error::ApiError;
use crate::pipeline::{FALLBACK, Pipeline};

/// Answers a request by the model of this name. If a pipeline is called so, its router reads the question and chooses the
/// model; the fallback answers if the choice is not clear, or if the chosen model fails before its answer begins.
pub(crate) async fn answer<A>(
    app: &App,
    name: Option<&str>,
    question: impl FnOnce() -> Result<Option<String>, ApiError>,
    attempt: impl Fn(SelectedModel) -> A,
) -> Result<Response, ApiError>
where
    A: Future<Output = Result<Response, ApiError>>,
{
    let Some(pipeline) = name.and_then(|name| app.catalog.pipeline(name)) else {
        return attempt(app.catalog.find(name).await?).await;
    };
    let route = match question()? {
        // Without its router the pipeline has only its fallback.
        Some(question) => choose(app, pipeline, question).await.unwrap_or(None),
        None => None,
    };
    if let Some((label, model)) = route.and_then(|label| pipeline.spec.specialists.get_key_value(&label))
        && let Ok(selected) = app.catalog.find(Some(model)).await
        && let Ok(response) = attempt(selected).await
    {
        return Ok(pipeline.report(response, label));
    }
    let response = attempt(app.catalog.find(Some(&pipeline.spec.fallback)).await?).await?;
    Ok(pipeline.report(response, FALLBACK))
}

/// Returns the text that a router reads of a conversation: the last message of the user.
pub(crate) fn question(messages: &[Message]) -> Option<String> {
    messages.iter().rev().find(|message| message.role == "user").map(Message::text)
}

/// Returns the label that a pipeline's router gives a question, if a specialist has it and it is probable enough.
async fn choose(app: &App, pipeline: &Pipeline, question: String) -> Result<Option<String>, ApiError> {
    let (model, head) = pipeline.router();
    let (model, head) = (model.to_owned(), head.to_owned());
    let served = app.catalog.find(Some(&model)).await?.served;
    let engine = app.engine.clone();
    let computing = served.computing.clone();
    let likelihoods = with_permit(&computing, move || {
        let session = engine.with_core(move |core| core.session(&model))??;
        let prompt = served.prompt(&[Message::user(question)], &TemplateOptions::default())?;
        let router = Router::named(&session, &head).ok_or(RuntimeError::NoHead { name: head })?;
        Ok(router.likelihoods(&session, &prompt)?)
    });
    let likeliest = likelihoods.await?.into_iter().next();
    let label = likeliest.filter(|found| found.probability >= pipeline.spec.confidence);
    Ok(label.map(|found| found.label).filter(|label| pipeline.spec.specialists.contains_key(label)))
}
