//! `/v1/embeddings` and `/v1/rerank`

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use firebox_runtime::EmbedOptions;
use serde_json::{Value, json};
use utoipa_axum::routes;

use crate::app::{App, Routes, blocking};
use crate::asked::Asked;
use crate::completions::{Prompt, prompts};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::schema::{EmbeddingList, EmbeddingRequest, Ranking, RerankRequest};

/// Texts of one request.
const MOST_TEXTS: usize = 2048;

pub(crate) fn routes() -> Routes {
    Routes::new().routes(routes!(embed)).routes(routes!(rerank)).routes(routes!(rerank_short))
}

/// Texts as vectors.
#[utoipa::path(
    post,
    path = "/v1/embeddings",
    tag = "vectors",
    request_body = EmbeddingRequest,
    responses((status = 200, description = "A vector for every text", body = EmbeddingList), ApiError)
)]
async fn embed(State(app): State<Arc<App>>, Asked(body): Asked) -> Result<Json<Value>, ApiError> {
    let fields = Fields::of(&body)?;
    let chosen = app.catalog.find(fields.text("model")?)?;
    let mut texts = Vec::new();
    for prompt in prompts(&fields, "input")? {
        texts.push(match prompt {
            Prompt::Text(text) => text,
            // Models read texts; what tokens spell is read as they are.
            Prompt::Tokens(tokens) => chosen.served.tokenizer()?.decode(&tokens, true),
        });
    }
    expect_few(&fields, "input", texts.len())?;
    if let Some(at) = texts.iter().position(String::is_empty) {
        return Err(fields.wrong(&format!("input[{at}]"), "is empty"));
    }
    let packed = match fields.text("encoding_format")? {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            return Err(fields.wrong("encoding_format", format!("{other:?} is none of float and base64")));
        }
    };
    let dimensions = fields.whole("dimensions", 1, u64::from(u32::MAX))?;
    let _one_at_a_time = app.embedding.acquire().await.map_err(|_| ApiError::over())?;
    let served = chosen.served.clone();
    let (vectors, tokens) = blocking(move || {
        let tokenizer = served.tokenizer()?;
        let mut tokens = 0;
        for text in &texts {
            tokens += tokenizer.encode_literal(text, true)?.len();
        }
        Ok((served.model.embed(&texts, &EmbedOptions::default())?, tokens))
    })
    .await?;
    let width = vectors.first().map_or(0, Vec::len);
    if dimensions.is_some_and(|dimensions| dimensions != width as u64) {
        return Err(fields.wrong("dimensions", format!("vectors of this model have {width}; leave it out")));
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
        "model": chosen.name,
        "usage": { "prompt_tokens": tokens, "total_tokens": tokens },
    })))
}

/// The same as `/v1/rerank`, where some clients look for it.
#[utoipa::path(
    post,
    path = "/rerank",
    tag = "vectors",
    request_body = RerankRequest,
    responses((status = 200, description = "The documents, best first", body = Ranking), ApiError)
)]
async fn rerank_short(app: State<Arc<App>>, asked: Asked) -> Result<Json<Value>, ApiError> {
    rerank(app, asked).await
}

/// Documents by how well they answer a query.
#[utoipa::path(
    post,
    path = "/v1/rerank",
    tag = "vectors",
    request_body = RerankRequest,
    responses((status = 200, description = "The documents, best first", body = Ranking), ApiError)
)]
async fn rerank(State(app): State<Arc<App>>, Asked(body): Asked) -> Result<Json<Value>, ApiError> {
    let fields = Fields::of(&body)?;
    let chosen = app.catalog.find(fields.text("model")?)?;
    let query = fields.needed_text("query")?.to_owned();
    let documents = documents(&fields)?;
    if query.is_empty() {
        return Err(fields.wrong("query", "is empty"));
    }
    if let Some(at) = documents.iter().position(String::is_empty) {
        return Err(fields.wrong(&format!("documents[{at}]"), "is empty"));
    }
    expect_few(&fields, "documents", documents.len())?;
    let most = fields.whole("top_n", 1, u64::from(u32::MAX))?.map_or(usize::MAX, |most| most as usize);
    let shows = fields.truth("return_documents")?.unwrap_or(false);
    let _one_at_a_time = app.embedding.acquire().await.map_err(|_| ApiError::over())?;
    let served = chosen.served.clone();
    let (ranked, documents, tokens) = blocking(move || {
        let tokenizer = served.tokenizer()?;
        let mut tokens = tokenizer.encode_literal(&query, true)?.len();
        for document in &documents {
            tokens += tokenizer.encode_literal(document, true)?.len();
        }
        Ok((served.model.rerank(&query, &documents)?, documents, tokens))
    })
    .await?;
    let results = ranked.iter().take(most).map(|ranked| {
        let mut result = json!({ "index": ranked.document, "relevance_score": ranked.score });
        if shows {
            result["document"] = json!({ "text": documents[ranked.document] });
        }
        result
    });
    Ok(Json(json!({
        "id": format!("rerank-{}", crate::unique()),
        "model": chosen.name,
        "results": results.collect::<Vec<_>>(),
        "usage": { "prompt_tokens": tokens, "total_tokens": tokens },
    })))
}

/// Texts, or objects that have one.
fn documents(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let given = fields.needed_list("documents")?;
    let texts = given.iter().enumerate().map(|(index, document)| {
        let text = document.as_str().or_else(|| document.get("text")?.as_str());
        let wrong =
            || fields.wrong(&format!("documents[{index}]"), "expected a string, or an object with `text`");
        text.map(str::to_owned).ok_or_else(wrong)
    });
    let texts: Vec<String> = texts.collect::<Result<_, _>>()?;
    if texts.is_empty() { Err(fields.wrong("documents", "there is none")) } else { Ok(texts) }
}

fn expect_few(fields: &Fields<'_>, field: &str, count: usize) -> Result<(), ApiError> {
    if count <= MOST_TEXTS {
        return Ok(());
    }
    Err(fields.wrong(field, format!("{count} texts are more than {MOST_TEXTS}; ask in several requests")))
}
