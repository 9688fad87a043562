//! `/v1/embeddings` and `/v1/rerank`: texts as vectors, and documents by relevance.

use std::num::NonZero;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use axum::routing;
use firebox_runtime::EmbedOptions;
use serde_json::{Value, json};

use crate::app::{App, Routes};
use crate::blocking::with_permit;
use crate::catalog::SelectedModel;
use crate::completions::{Prompt, prompts};
use crate::embedding_body::EmbeddingBody;
use crate::error::ApiError;
use crate::extract::{Caller, JsonBody};
use crate::json_fields::JsonFields;
#[cfg(test)]
use crate::schema::{EmbeddingList, EmbeddingRequest, Ranking, RerankRequest};
use crate::text_vectors::{TextVectors, batches, encoder_place, lengths};
use crate::tokens::check_token_ids;

/// Texts of one request.
const MAX_TEXTS: usize = 2048;

pub(crate) fn routes() -> Routes {
    Routes::new()
        .route("/v1/embeddings", routing::post(embed))
        .route("/v1/rerank", routing::post(rerank))
        .route("/rerank", routing::post(rerank_short))
}

/// Embeds texts.
#[cfg_attr(test, utoipa::path(
    post,
    path = "/v1/embeddings",
    tag = "vectors",
    request_body = EmbeddingRequest,
    responses((status = 200, description = "A vector for every text", body = EmbeddingList), ApiError)
))]
pub(crate) async fn embed(
    State(app): State<Arc<App>>,
    Caller(scope): Caller,
    JsonBody(body): JsonBody,
) -> Result<Response, ApiError> {
    let fields = JsonFields::new(&body)?;
    let selected = app.catalog.find(fields.string("model")?).await?;
    let given = prompts(&fields, "input")?;
    check_count(&fields, "input", given.len())?;
    let alone = given.len() == 1;
    let mut texts = Vec::with_capacity(given.len());
    for (index, prompt) in given.into_iter().enumerate() {
        texts.push(match prompt {
            Prompt::Text(text) => text,
            // The model reads text, so tokens are decoded first.
            Prompt::Tokens(tokens) => {
                let tokenizer = selected.served.tokenizer()?;
                let field = if alone { "input".into() } else { format!("input[{index}]") };
                check_token_ids(&fields, &field, &tokens, tokenizer)?;
                tokenizer.decode(&tokens, true)
            }
        });
    }
    if let Some(at) = texts.iter().position(String::is_empty) {
        return Err(fields.error(&format!("input[{at}]"), "is empty"));
    }
    let is_packed = match fields.string("encoding_format")? {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            return Err(fields.error("encoding_format", format!("{other:?} is neither float nor base64")));
        }
    };
    let width = selected.served.model.embedding_width();
    let dimensions = fields.integer("dimensions", 1, u64::from(u32::MAX))?;
    if dimensions.is_some_and(|dimensions| dimensions > width as u64) {
        return Err(
            fields.error("dimensions", format!("this model's embeddings have {width}; ask for no more"))
        );
    }
    let dimensions = dimensions.and_then(|dimensions| NonZero::new(dimensions as usize));
    let options = EmbedOptions { dimensions, ..EmbedOptions::default() };
    let vectors = TextVectors::begin(&app, &selected, scope, texts, options).await?;
    EmbeddingBody::response(vectors, &selected.name, is_packed).await
}

/// An alias of `/v1/rerank`.
#[cfg_attr(test, utoipa::path(
    post,
    path = "/rerank",
    tag = "vectors",
    request_body = RerankRequest,
    responses((status = 200, description = "The documents, best first", body = Ranking), ApiError)
))]
pub(crate) async fn rerank_short(
    app: State<Arc<App>>,
    caller: Caller,
    asked: JsonBody,
) -> Result<Json<Value>, ApiError> {
    rerank(app, caller, asked).await
}

/// Ranks documents by relevance to a query.
#[cfg_attr(test, utoipa::path(
    post,
    path = "/v1/rerank",
    tag = "vectors",
    request_body = RerankRequest,
    responses((status = 200, description = "The documents, best first", body = Ranking), ApiError)
))]
pub(crate) async fn rerank(
    State(app): State<Arc<App>>,
    Caller(scope): Caller,
    JsonBody(body): JsonBody,
) -> Result<Json<Value>, ApiError> {
    let fields = JsonFields::new(&body)?;
    let selected = app.catalog.find(fields.string("model")?).await?;
    let query = fields.required_string("query")?.to_owned();
    let documents = documents(&fields)?;
    if query.is_empty() {
        return Err(fields.error("query", "is empty"));
    }
    if let Some(at) = documents.iter().position(String::is_empty) {
        return Err(fields.error(&format!("documents[{at}]"), "is empty"));
    }
    check_count(&fields, "documents", documents.len())?;
    let most = fields.integer("top_n", 1, u64::from(u32::MAX))?.map_or(usize::MAX, |most| most as usize);
    let shows = fields.boolean("return_documents")?.unwrap_or(false);
    let documents = Arc::new(documents);
    let (tokens, mut ranked) = match selected.served.context {
        Some(_) => by_cosine(&app, &selected, scope, query, &documents).await?,
        None => by_encoder(&app, &scope, &selected, query, &documents).await?,
    };
    ranked.sort_by(|one, other| other.1.total_cmp(&one.1).then(one.0.cmp(&other.0)));
    let results = ranked.iter().take(most).map(|&(document, score)| {
        let mut result = json!({ "index": document, "relevance_score": score });
        if shows {
            result["document"] = json!({ "text": documents[document] });
        }
        result
    });
    Ok(Json(json!({
        "id": format!("rerank-{}", crate::ids::random_id()),
        "model": selected.name,
        "results": results.collect::<Vec<_>>(),
        "usage": { "prompt_tokens": tokens, "total_tokens": tokens },
    })))
}

/// Scores documents by the cosine of their vector and the query's, and returns the tokens of all with the scores.
async fn by_cosine(
    app: &Arc<App>,
    selected: &SelectedModel,
    scope: String,
    query: String,
    documents: &[String],
) -> Result<(usize, Vec<(usize, f32)>), ApiError> {
    let texts = [query].into_iter().chain(documents.iter().cloned()).collect();
    let mut vectors = TextVectors::begin(app, selected, scope, texts, EmbedOptions::default()).await?;
    let (mut asked, mut scores) = (Vec::new(), Vec::with_capacity(documents.len()));
    while let Some(more) = vectors.next().await.transpose()? {
        for text in more {
            match text.text.checked_sub(1) {
                None => asked = text.vector,
                Some(document) => {
                    scores.push((document, text.vector.iter().zip(&asked).map(|(a, b)| a * b).sum()));
                }
            }
        }
    }
    Ok((vectors.tokens, scores))
}

/// Scores documents by an encoder, batch by batch, and returns the tokens of all with the scores.
async fn by_encoder(
    app: &Arc<App>,
    scope: &str,
    SelectedModel { served, .. }: &SelectedModel,
    query: String,
    documents: &Arc<Vec<String>>,
) -> Result<(usize, Vec<(usize, f32)>), ApiError> {
    let _place = encoder_place(app)?;
    let asked: usize =
        lengths(app, scope, served.tokenizer()?, &Arc::new(vec![query.clone()])).await?.iter().sum();
    let lengths = lengths(app, scope, served.tokenizer()?, documents).await?;
    let tokens = asked + lengths.iter().sum::<usize>();
    // A cross-encoder reads the query with each document; other models read it once a batch.
    let is_cross = served.model.encoder().is_ok_and(|encoder| encoder.labels().is_some());
    let beside = if is_cross { asked } else { 0 };
    let together: Vec<usize> = lengths.iter().map(|length| length + beside).collect();
    let mut scores = Vec::with_capacity(documents.len());
    for range in batches(&together) {
        let (documents, served, query) = (documents.clone(), served.clone(), query.clone());
        let rank = move || {
            let first = range.start;
            let ranked = served.model.rerank(&query, &documents[range])?;
            Ok(ranked.into_iter().map(move |one| (first + one.document, one.score)))
        };
        scores.extend(with_permit(&app.encoder_permits, rank).await?);
    }
    Ok((tokens, scores))
}

/// Reads documents: strings, or objects with `text`.
fn documents(fields: &JsonFields<'_>) -> Result<Vec<String>, ApiError> {
    let given = fields.required_list("documents")?;
    let texts = given.iter().enumerate().map(|(index, document)| {
        let text = document.as_str().or_else(|| document.get("text")?.as_str());
        let wrong =
            || fields.error(&format!("documents[{index}]"), "expected a string, or an object with `text`");
        text.map(str::to_owned).ok_or_else(wrong)
    });
    let texts: Vec<String> = texts.collect::<Result<_, _>>()?;
    if texts.is_empty() { Err(fields.error("documents", "is empty")) } else { Ok(texts) }
}

fn check_count(fields: &JsonFields<'_>, field: &str, count: usize) -> Result<(), ApiError> {
    if count <= MAX_TEXTS {
        return Ok(());
    }
    Err(fields.error(field, format!("{count} texts are more than {MAX_TEXTS}; ask in several requests")))
}
