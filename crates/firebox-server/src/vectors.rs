//! `/v1/embeddings` and `/v1/rerank`

use std::ops::Range;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use firebox_runtime::{EmbedOptions, Ranked};
use firebox_text::Tokenizer;
use serde_json::{Value, json};
use utoipa_axum::routes;

use crate::app::{App, Routes, blocking, in_turn};
use crate::asked::Asked;
use crate::completions::{Prompt, prompts};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::schema::{EmbeddingList, EmbeddingRequest, Ranking, RerankRequest};
use crate::tokens::expect_known;

/// Texts of one request.
const MOST_TEXTS: usize = 2048;

/// Tokens of texts that are computed until it is the turn of another request: as many as go through the layers at once.
const TURN: usize = 1024;

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
    let chosen = app.catalog.find(fields.text("model")?).await?;
    let given = prompts(&fields, "input")?;
    expect_few(&fields, "input", given.len())?;
    let alone = given.len() == 1;
    let mut texts = Vec::with_capacity(given.len());
    for (index, prompt) in given.into_iter().enumerate() {
        texts.push(match prompt {
            Prompt::Text(text) => text,
            // Models read texts; what tokens spell is read as they are.
            Prompt::Tokens(tokens) => {
                let tokenizer = chosen.served.tokenizer()?;
                let field = if alone { "input".into() } else { format!("input[{index}]") };
                expect_known(&fields, &field, &tokens, tokenizer)?;
                tokenizer.decode(&tokens, true)
            }
        });
    }
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
    let (texts, served) = (Arc::new(texts), chosen.served.clone());
    let lengths = lengths(served.tokenizer()?, &texts).await?;
    let tokens: usize = lengths.iter().sum();
    let mut vectors = Vec::new();
    for range in turns(&lengths) {
        let (texts, served) = (texts.clone(), served.clone());
        let embed = move || Ok(served.model.embed(&texts[range], &EmbedOptions::default())?);
        vectors.extend(in_turn(&app.embedding, embed).await?);
    }
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
    let chosen = app.catalog.find(fields.text("model")?).await?;
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
    let (documents, served) = (Arc::new(documents), chosen.served.clone());
    let asked: usize = lengths(served.tokenizer()?, &Arc::new(vec![query.clone()])).await?.iter().sum();
    let lengths = lengths(served.tokenizer()?, &documents).await?;
    let tokens = asked + lengths.iter().sum::<usize>();
    // A cross-encoder reads each beside the query; others read that once in every turn.
    let is_cross = served.model.encoder().is_ok_and(|encoder| encoder.labels().is_some());
    let beside = if is_cross { asked } else { 0 };
    let together: Vec<usize> = lengths.iter().map(|length| length + beside).collect();
    let mut ranked: Vec<Ranked> = Vec::new();
    for range in turns(&together) {
        let (documents, served, query) = (documents.clone(), served.clone(), query.clone());
        let rank = move || {
            let first = range.start;
            let ranked = served.model.rerank(&query, &documents[range])?;
            Ok(ranked.into_iter().map(move |one| Ranked { document: one.document + first, ..one }))
        };
        ranked.extend(in_turn(&app.embedding, rank).await?);
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
        "id": format!("rerank-{}", crate::unique()),
        "model": chosen.name,
        "results": results.collect::<Vec<_>>(),
        "usage": { "prompt_tokens": tokens, "total_tokens": tokens },
    })))
}

/// How many tokens each text has.
async fn lengths(tokenizer: &Arc<Tokenizer>, texts: &Arc<Vec<String>>) -> Result<Vec<usize>, ApiError> {
    let (tokenizer, texts) = (tokenizer.clone(), texts.clone());
    let of = move |text: &String| Ok(tokenizer.encode_literal(text, true)?.len());
    blocking(move || texts.iter().map(of).collect()).await
}

/// Neighbours that are computed in one turn.
fn turns(lengths: &[usize]) -> Vec<Range<usize>> {
    let (mut turns, mut start, mut tokens) = (Vec::new(), 0, 0);
    for (at, length) in lengths.iter().enumerate() {
        if at > start && tokens + length > TURN {
            turns.push(start..at);
            (start, tokens) = (at, 0);
        }
        tokens += length;
    }
    if start < lengths.len() {
        turns.push(start..lengths.len());
    }
    turns
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_has_as_many_texts_as_go_through_the_layers_at_once() {
        assert!(turns(&[]).is_empty());
        assert_eq!(turns(&[5000, 1]), [0..1, 1..2]);
        assert_eq!(turns(&[1000, 24, 1, 3000, 7]), [0..2, 2..3, 3..4, 4..5]);
        assert_eq!(turns(&[1; 3000]), [0..1024, 1024..2048, 2048..3000]);
    }
}
