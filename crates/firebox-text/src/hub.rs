//! `tokenizer.json`, the format of the Hugging Face `tokenizers` crate.

use crate::decoding::Decoding;
use crate::engine::{Engine, shielded};
use crate::error::TextError;
use crate::hub_parts;
use crate::pieces::{Entry, Pieces};
use crate::special::NamedTokens;
use crate::tokenizer::Parsed;
use serde::Deserialize;
use serde_json::Value;
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

/// The parts of the file that are checked before `tokenizers`, which trusts them, reads it.
#[derive(Deserialize)]
struct Outline<'a> {
    #[serde(borrow)]
    model: ModelOutline<'a>,
    #[serde(default)]
    decoder: Option<Value>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
}

#[derive(Deserialize)]
struct ModelOutline<'a> {
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    unk_token: Option<String>,
    #[serde(default)]
    unk_id: Option<usize>,
    /// A table for BPE, WordPiece and WordLevel, a list for Unigram.
    #[serde(borrow)]
    vocab: VocabularyOutline<'a>,
    #[serde(borrow, default)]
    merges: Vec<MergeOutline<'a>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum VocabularyOutline<'a> {
    Table(#[serde(borrow)] HashMap<Cow<'a, str>, u32>),
    List(Vec<(String, f64)>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum MergeOutline<'a> {
    Pair(#[serde(borrow)] Cow<'a, str>, #[serde(borrow)] Cow<'a, str>),
    Line(String),
}

impl MergeOutline<'_> {
    fn parts(&self) -> Option<(&str, &str)> {
        match self {
            MergeOutline::Pair(left, right) => Some((left, right)),
            MergeOutline::Line(line) => line.split_once(' '),
        }
    }

    fn spelled(&self) -> String {
        match self {
            MergeOutline::Pair(left, right) => format!("{left} {right}"),
            MergeOutline::Line(line) => line.clone(),
        }
    }
}

pub(crate) fn parse(bytes: &[u8]) -> Result<Parsed, TextError> {
    let invalid = |reason: String| TextError::InvalidTokenizerJson { reason };
    let outline: Outline<'_> = serde_json::from_slice(bytes).map_err(|error| invalid(error.to_string()))?;
    check_model(&outline.model)?;
    let steps = [&outline.normalizer, &outline.pre_tokenizer, &outline.post_processor];
    steps.into_iter().chain(&outline.decoder).try_for_each(hub_parts::check)?;
    let decoding = Decoding::from_json(outline.decoder.as_ref())?;
    let unk = unknown_token(&outline.model);
    drop(outline);

    let mut pipeline = shielded(|| {
        tokenizers::Tokenizer::from_bytes(bytes)
            .map_err(|error| TextError::Encode { reason: error.to_string() })
    })
    .map_err(|error| match error {
        TextError::Encode { reason } => invalid(reason),
        other => other,
    })?;
    // Both cut or fill what is encoded, for training in batches; a prompt is neither.
    pipeline.with_padding(None);
    pipeline.with_truncation(None).map_err(|error| invalid(error.to_string()))?;

    // Patterns of `Replace` that match between characters confuse the steps that come after them, which panic. Whether a
    // pattern does depends on the text, so a few characters of every kind are tried. That some have no token is no fault.
    for text in ["a", " a1.\n", "é▁ B"] {
        let tried = shielded(|| {
            let _ = pipeline.encode_fast(text, true);
            Ok(())
        });
        tried.map_err(|error| invalid(error.to_string()))?;
    }

    let unk = unk.and_then(|token| pipeline.token_to_id(&token));
    let pieces = Pieces::new(entries(&pipeline), decoding)?;
    let named = NamedTokens { unk, ..NamedTokens::default() };
    Ok(Parsed { engine: Engine::Hub(Box::new(pipeline)), pieces, frame: None, named, ends: Vec::new() })
}

fn check_model(model: &ModelOutline<'_>) -> Result<(), TextError> {
    let vocabulary = match &model.vocab {
        VocabularyOutline::Table(vocabulary) => vocabulary,
        VocabularyOutline::List(pieces) => {
            return match pieces.iter().find(|(_, score)| !score.is_finite()) {
                Some((token, _)) => Err(TextError::InvalidTokenizerJson {
                    reason: format!("the score of `{token}` is not a finite number"),
                }),
                None => Ok(()),
            };
        }
    };
    if !model.merges.is_empty()
        && model.continuing_subword_prefix.as_ref().is_some_and(|prefix| !prefix.is_empty())
    {
        return Err(TextError::InvalidTokenizerJson {
            reason: "merges together with a `continuing_subword_prefix` are not supported".to_owned(),
        });
    }
    let mut merged = String::new();
    for (index, merge) in model.merges.iter().enumerate() {
        let wrong = |reason| TextError::InvalidMerge { index, merge: merge.spelled(), reason };
        let Some((left, right)) = merge.parts() else { return Err(wrong("it is not a pair of tokens")) };
        merged.clear();
        merged.push_str(left);
        merged.push_str(right);
        if ![left, right, &merged].iter().all(|token| vocabulary.contains_key(*token)) {
            return Err(wrong("the vocabulary lacks one of its tokens"));
        }
    }
    Ok(())
}

/// The spelling of the token for what the model cannot spell.
fn unknown_token(model: &ModelOutline<'_>) -> Option<String> {
    match (&model.unk_token, &model.vocab) {
        (Some(token), _) => Some(token.clone()),
        (None, VocabularyOutline::List(pieces)) => pieces.get(model.unk_id?).map(|(token, _)| token.clone()),
        (None, VocabularyOutline::Table(_)) => None,
    }
}

fn entries(pipeline: &tokenizers::Tokenizer) -> Vec<Entry> {
    let added = pipeline.get_added_tokens_decoder();
    let special: HashSet<u32> = added.iter().filter(|(_, token)| token.special).map(|(&id, _)| id).collect();
    let model = pipeline.get_vocab(false).into_iter();
    let mut entries: Vec<Entry> =
        model.map(|(text, id)| Entry { special: special.contains(&id), id, text, added: false }).collect();
    entries.extend(added.into_iter().map(|(id, token)| Entry {
        id,
        special: token.special,
        text: token.content,
        added: true,
    }));
    entries
}
