//! `/v1/embeddings` and `/v1/rerank`: texts as vectors, and documents by relevance.

use std::ops::Range;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::routing;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use firebox_runtime::{EmbedOptions, Ranked};
use firebox_text::Tokenizer;
use serde_json::{Value, json};

use crate::app::{App, Routes};
use crate::blocking::{blocking, with_permit};
use crate::completions::{Prompt, prompts};
use crate::error::ApiError;
use crate::extract::JsonBody;
use crate::json_fields::JsonFields;
#[cfg(test)]
use crate::schema::{EmbeddingList, EmbeddingRequest, Ranking, RerankRequest};
use crate::tokens::check_token_ids;

/// Texts of one request.
const MAX_TEXTS: usize = 2048;

/// Tokens of a batch, after which another request may run. As many as one forward pass takes.
const BATCH_TOKENS: usize = 1024;

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
    JsonBody(body): JsonBody,
) -> Result<Json<Value>, ApiError> {
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
    let packed = match fields.string("encoding_format")? {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            return Err(fields.error("encoding_format", format!("{other:?} is neither float nor base64")));
        }
    };
    let dimensions = fields.integer("dimensions", 1, u64::from(u32::MAX))?;
    let (texts, served) = (Arc::new(texts), selected.served.clone());
    let lengths = lengths(served.tokenizer()?, &texts).await?;
    let tokens: usize = lengths.iter().sum();
    let mut vectors = Vec::new();
    for range in batches(&lengths) {
        let (texts, served) = (texts.clone(), served.clone());
        let embed = move || Ok(served.model.embed(&texts[range], &EmbedOptions::default())?);
        vectors.extend(with_permit(&app.embedding_permits, embed).await?);
    }
    let width = vectors.first().map_or(0, Vec::len);
    if dimensions.is_some_and(|dimensions| dimensions != width as u64) {
        return Err(fields.error("dimensions", format!("this model's embeddings have {width}; leave it out")));
    }
    let data = vectors.iter().enumerate().map(|(index, vector)| {
        let embedding = if packed {
            let bytes: Vec<u8> = vector.iter().flat_map(|element| element.to_le_bytes()).collect();
            Value::String(BASE64_STANDARD.encode(bytes))
        } else {
            json!(vector)
        };
        json!({ "object": "embedding", "index": index, "embedding": embedding })
    });
    Ok(Json(json!({
        "object": "list",
        "data": data.collect::<Vec<_>>(),
        "model": selected.name,
        "usage": { "prompt_tokens": tokens, "total_tokens": tokens },
    })))
}

/// An alias of `/v1/rerank`.
#[cfg_attr(test, utoipa::path(
    post,
    path = "/rerank",
    tag = "vectors",
    request_body = RerankRequest,
    responses((status = 200, description = "The documents, best first", body = Ranking), ApiError)
))]
pub(crate) async fn rerank_short(app: State<Arc<App>>, asked: JsonBody) -> Result<Json<Value>, ApiError> {
    rerank(app, asked).await
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
    let (documents, served) = (Arc::new(documents), selected.served.clone());
    let asked: usize = lengths(served.tokenizer()?, &Arc::new(vec![query.clone()])).await?.iter().sum();
    let lengths = lengths(served.tokenizer()?, &documents).await?;
    let tokens = asked + lengths.iter().sum::<usize>();
    // A cross-encoder reads the query with each document; other models read it once a batch.
    let is_cross = served.model.encoder().is_ok_and(|encoder| encoder.labels().is_some());
    let beside = if is_cross { asked } else { 0 };
    let together: Vec<usize> = lengths.iter().map(|length| length + beside).collect();
    let mut ranked: Vec<Ranked> = Vec::new();
    for range in batches(&together) {
        let (documents, served, query) = (documents.clone(), served.clone(), query.clone());
        let rank = move || {
            let first = range.start;
            let ranked = served.model.rerank(&query, &documents[range])?;
            Ok(ranked.into_iter().map(move |mut one| {
                one.document += first;
                one
            }))
        };
        ranked.extend(with_permit(&app.embedding_permits, rank).await?);
    }
    ranked.sort_by(|one, other| other.score.total_cmp(&one.score).then(one.document.cmp(&other.document)));
    let results = ranked.iter().take(most).map(|ranked| {
        let mut result = json!({ "index": ranked.document, "relevance_score": ranked.score });
        if shows {
            result["document"] = json!({ "text": documents[ranked.document] });
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

/// Returns the length of each text in tokens.
async fn lengths(tokenizer: &Arc<Tokenizer>, texts: &Arc<Vec<String>>) -> Result<Vec<usize>, ApiError> {
    let (tokenizer, texts) = (tokenizer.clone(), texts.clone());
    let of = move |text: &String| Ok(tokenizer.encode_literal(text, true)?.len());
    blocking(move || texts.iter().map(of).collect()).await
}

/// Splits texts into consecutive batches.
fn batches(lengths: &[usize]) -> Vec<Range<usize>> {
    let (mut batches, mut start, mut tokens) = (Vec::new(), 0, 0);
    for (at, length) in lengths.iter().enumerate() {
        if at > start && tokens + length > BATCH_TOKENS {
            batches.push(start..at);
            (start, tokens) = (at, 0);
        }
        tokens += length;
    }
    if start < lengths.len() {
        batches.push(start..lengths.len());
    }
    batches
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_has_at_most_the_tokens_of_one_pass() {
        assert!(batches(&[]).is_empty());
        assert_eq!(batches(&[5000, 1]), [0..1, 1..2]);
        assert_eq!(batches(&[1000, 24, 1, 3000, 7]), [0..2, 2..3, 3..4, 4..5]);
        assert_eq!(batches(&[1; 3000]), [0..1024, 1024..2048, 2048..3000]);
    }
}
