//! `tokenizer.json`, the format of the Hugging Face `tokenizers` crate.

use crate::backend::{Backend, Pipeline, catch_panics};
use crate::decoding::Decoding;
use crate::error::TextError;
use crate::parsed_vocabulary::Parsed;
use crate::ranked_bpe::{Options, RankedBpe};
use crate::special_tokens::SpecialTokens;
use crate::token_table::{TokenEntry, TokenTable};
use crate::tokenizer_json_steps;
use crate::tokenizers_adapter::{CustomModel, WordTokenizer as _};
use crate::vocabulary::Vocabulary;
use serde::de::{Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use tokenizers::{
    AddedToken, DecoderWrapper, Model, NormalizerWrapper, PaddingParams, PostProcessorWrapper,
    PreTokenizerWrapper, TruncationParams,
};

/// The fields that are needed before the vocabulary is read.
#[derive(Deserialize)]
struct Outline {
    model: ModelOutline,
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
struct ModelOutline {
    #[serde(default, rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    dropout: Option<f32>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
}

impl ModelOutline {
    /// Returns whether the model can be handled by [`RankedBpe`].
    fn is_ranked(&self) -> bool {
        let affixes = [&self.continuing_subword_prefix, &self.end_of_word_suffix];
        self.kind.as_deref() == Some("BPE")
            && self.dropout.is_none_or(|dropout| dropout == 0.0)
            && affixes.into_iter().flatten().all(String::is_empty)
    }
}

/// A file whose model is BPE with a list of merges. Unused fields are parsed too, so that damage in them is detected.
#[derive(Deserialize)]
struct RankedFile<'a> {
    #[serde(default = "only_version")]
    version: String,
    #[serde(default, rename = "truncation")]
    _truncation: Option<TruncationParams>,
    #[serde(default, rename = "padding")]
    _padding: Option<PaddingParams>,
    #[serde(default, rename = "decoder")]
    _decoder: Option<DecoderWrapper>,
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Option<NormalizerWrapper>,
    #[serde(default)]
    pre_tokenizer: Option<PreTokenizerWrapper>,
    #[serde(default)]
    post_processor: Option<PostProcessorWrapper>,
    #[serde(borrow)]
    model: RankedModel<'a>,
}

#[derive(Deserialize)]
struct Added {
    /// The id of the model's token of the same spelling, or the next free one.
    #[serde(rename = "id")]
    _id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

fn only_version() -> String {
    "1.0".to_owned()
}

#[derive(Deserialize)]
struct RankedModel<'a> {
    #[serde(default)]
    unk_token: Option<String>,
    #[serde(default)]
    fuse_unk: Option<bool>,
    #[serde(default)]
    byte_fallback: Option<bool>,
    #[serde(default)]
    ignore_merges: Option<bool>,
    #[serde(borrow, deserialize_with = "pairs")]
    vocab: Vec<(Cow<'a, str>, u32)>,
    #[serde(borrow)]
    merges: Vec<MergeOutline<'a>>,
}

/// The fields of other models that are checked before `tokenizers`, which trusts them, reads the file.
#[derive(Deserialize)]
struct OtherFile {
    model: OtherModel,
}

#[derive(Deserialize)]
struct OtherModel {
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    unk_token: Option<String>,
    #[serde(default)]
    unk_id: Option<usize>,
    vocab: VocabularyOutline,
    #[serde(default)]
    merges: Vec<IgnoredAny>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum VocabularyOutline {
    /// Of Unigram models.
    List(Vec<(String, f64)>),
    /// Of other models.
    Table(IgnoredAny),
}

enum MergeOutline<'a> {
    Pair(Cow<'a, str>, Cow<'a, str>),
    Line(Cow<'a, str>),
}

/// A text borrowed from the input if possible.
#[derive(Deserialize)]
struct Borrowed<'a>(#[serde(borrow)] Cow<'a, str>);

/// The entries of a table in file order.
fn pairs<'de, D: Deserializer<'de>>(source: D) -> Result<Vec<(Cow<'de, str>, u32)>, D::Error> {
    struct Entries;
    impl<'de> Visitor<'de> for Entries {
        type Value = Vec<(Cow<'de, str>, u32)>;

        fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
            to.write_str("a table of tokens and ids")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut table: A) -> Result<Self::Value, A::Error> {
            let mut entries = Vec::new();
            while let Some((Borrowed(token), id)) = table.next_entry()? {
                entries.push((token, id));
            }
            Ok(entries)
        }
    }
    source.deserialize_map(Entries)
}

/// Implemented by hand, because the derived version would first buffer the value to find its variant.
impl<'de: 'a, 'a> Deserialize<'de> for MergeOutline<'a> {
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = MergeOutline<'de>;

            fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
                to.write_str("two tokens")
            }

            fn visit_borrowed_str<E>(self, line: &'de str) -> Result<Self::Value, E> {
                Ok(MergeOutline::Line(line.into()))
            }

            fn visit_str<E>(self, line: &str) -> Result<Self::Value, E> {
                Ok(MergeOutline::Line(line.to_owned().into()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut pair: A) -> Result<Self::Value, A::Error> {
                let mut token = |at| pair.next_element()?.ok_or_else(|| A::Error::invalid_length(at, &self));
                let (Borrowed(left), Borrowed(right)) = (token(0)?, token(1)?);
                match pair.next_element::<IgnoredAny>()? {
                    None => Ok(MergeOutline::Pair(left, right)),
                    Some(_) => Err(A::Error::invalid_length(3, &self)),
                }
            }
        }
        source.deserialize_any(Either)
    }
}

impl MergeOutline<'_> {
    fn parts(&self) -> Option<(&str, &str)> {
        match self {
            MergeOutline::Pair(left, right) => Some((left, right)),
            MergeOutline::Line(line) => line.split_once(' ').filter(|(_, right)| !right.contains(' ')),
        }
    }

    /// Returns whether it is the version line of a merges file.
    fn is_heading(&self) -> bool {
        matches!(self, MergeOutline::Line(line) if line.starts_with("#version"))
    }

    fn spelled(&self) -> String {
        match self {
            MergeOutline::Pair(left, right) => format!("{left} {right}"),
            MergeOutline::Line(line) => line.to_string(),
        }
    }
}

pub(crate) fn parse(bytes: &[u8]) -> Result<Parsed, TextError> {
    let outline: Outline = serde_json::from_slice(bytes).map_err(|error| invalid(&error))?;
    let steps = [&outline.normalizer, &outline.pre_tokenizer, &outline.post_processor];
    steps.into_iter().chain(&outline.decoder).try_for_each(tokenizer_json_steps::check)?;
    let decoding = Decoding::from_json(outline.decoder.as_ref())?;
    if outline.model.is_ranked() {
        let (pipeline, unk) = ranked(bytes)?;
        let vocabulary = pipeline.get_model().0.vocabulary().clone();
        let entries = entries(&pipeline, vocabulary.iter().map(borrowed));
        let pieces = TokenTable::new(entries, Some(vocabulary.clone()), decoding)?;
        return finished(Backend::Ranked(Box::new(pipeline)), pieces, unk);
    }
    let (pipeline, unk) = other(bytes)?;
    let pieces = TokenTable::new(
        entries(&pipeline, pipeline.get_vocab(false).into_iter().map(owned)),
        None,
        decoding,
    )?;
    finished(Backend::Hub(Box::new(pipeline)), pieces, unk)
}

/// The steps and the merges of a file whose model is BPE with a list of merges.
pub(crate) struct RankedOutline {
    pub normalizer: Value,
    pub pre_tokenizer: Value,
    pub merges: Vec<(String, String)>,
    pub byte_fallback: bool,
    pub ignore_merges: bool,
}

/// Reads the outline of a file that was parsed before. Other models are refused.
pub(crate) fn outline(bytes: &[u8]) -> Result<RankedOutline, TextError> {
    let outline: Outline = serde_json::from_slice(bytes).map_err(|error| invalid(&error))?;
    if !outline.model.is_ranked() {
        let kind = outline.model.kind.as_deref().unwrap_or("unknown");
        let reason = format!("its model is {kind}, and not BPE with a list of merges");
        return Err(TextError::NotWritten { form: "GGUF metadata", reason });
    }
    let RankedFile { model, .. } = serde_json::from_slice(bytes).map_err(|error| invalid(&error))?;
    let merges = model.merges.iter().filter(|merge| !merge.is_heading()).filter_map(MergeOutline::parts);
    Ok(RankedOutline {
        normalizer: outline.normalizer,
        pre_tokenizer: outline.pre_tokenizer,
        merges: merges.map(|(left, right)| (left.to_owned(), right.to_owned())).collect(),
        byte_fallback: model.byte_fallback.unwrap_or(false),
        ignore_merges: model.ignore_merges.unwrap_or(false),
    })
}

fn invalid(reason: &dyn fmt::Display) -> TextError {
    TextError::InvalidTokenizerJson { reason: reason.to_string() }
}

/// Attributes an error in the reader of `tokenizers` to the file.
fn reading<T>(read: impl FnOnce() -> Result<T, TextError>) -> Result<T, TextError> {
    catch_panics(read).map_err(|error| match error {
        TextError::Encode { reason } => TextError::InvalidTokenizerJson { reason },
        other => other,
    })
}

/// The pipeline of a file with BPE merges, and the spelling of its unknown token.
fn ranked(bytes: &[u8]) -> Result<(Pipeline<CustomModel<RankedBpe>>, Option<String>), TextError> {
    reading(|| {
        let file: RankedFile<'_> = serde_json::from_slice(bytes).map_err(|error| invalid(&error))?;
        if file.version != only_version() {
            return Err(invalid(&format!("it is of version {}, and not of 1.0", file.version)));
        }
        let mut model = file.model;
        model.merges.retain(|merge| !merge.is_heading());
        let is_pair = |merge: &MergeOutline<'_>| matches!(merge, MergeOutline::Pair(..));
        let are_pairs = model.merges.first().is_some_and(is_pair);
        let merges = model.merges.iter().enumerate().map(|(index, merge)| {
            let parts = merge.parts().filter(|_| is_pair(merge) == are_pairs);
            let reason = "it is not a pair of tokens, written as the others are";
            parts.ok_or_else(|| TextError::InvalidMerge { index, merge: merge.spelled(), reason })
        });
        let options = Options {
            unk_token: model.unk_token.clone(),
            fuse_unk: model.fuse_unk.unwrap_or(false),
            byte_fallback: model.byte_fallback.unwrap_or(false),
            ignore_merges: model.ignore_merges.unwrap_or(false),
        };
        let mut pipeline =
            Pipeline::new(CustomModel(RankedBpe::new(Vocabulary::new(model.vocab)?, merges, options)?));
        pipeline.with_normalizer(file.normalizer).map_err(|error| invalid(&error))?;
        pipeline.with_pre_tokenizer(file.pre_tokenizer);
        pipeline.with_post_processor(file.post_processor);
        let added = file.added_tokens.into_iter().map(|added| added.token);
        pipeline.add_tokens(added).map_err(|error| invalid(&error))?;
        Ok((pipeline, model.unk_token))
    })
}

/// The pipeline of a file with a model of the `tokenizers` crate, and the spelling of its unknown token.
fn other(bytes: &[u8]) -> Result<(tokenizers::Tokenizer, Option<String>), TextError> {
    let file: OtherFile = serde_json::from_slice(bytes).map_err(|error| invalid(&error))?;
    check_model(&file.model)?;
    let unk = unknown_token(&file.model);
    drop(file);
    let mut pipeline = reading(|| tokenizers::Tokenizer::from_bytes(bytes).map_err(|error| invalid(&error)))?;
    // Truncation and padding serve batches in training, not prompts.
    pipeline.with_padding(None);
    pipeline.with_truncation(None).map_err(|error| invalid(&error))?;
    Ok((pipeline, unk))
}

fn finished(backend: Backend, pieces: TokenTable, unk: Option<String>) -> Result<Parsed, TextError> {
    // `Replace` patterns that match between characters make later steps panic. Whether one does depends on the text, so a few
    // characters of every kind are tried. Characters without a token are no fault.
    for text in ["a", " a1.\n", "é▁ B"] {
        backend.check_text(text).map_err(|error| invalid(&error))?;
    }
    let unk = unk.and_then(|token| backend.token_to_id(&token));
    let named = SpecialTokens { unk, ..SpecialTokens::default() };
    Ok(Parsed { backend, pieces, frame: None, named, ends: Vec::new() })
}

fn borrowed((token, id): (&str, u32)) -> (Cow<'_, str>, u32) {
    (token.into(), id)
}

fn owned((token, id): (String, u32)) -> (Cow<'static, str>, u32) {
    (token.into(), id)
}

fn check_model(model: &OtherModel) -> Result<(), TextError> {
    if let VocabularyOutline::List(pieces) = &model.vocab
        && let Some((token, _)) = pieces.iter().find(|(_, score)| !score.is_finite())
    {
        return Err(invalid(&format!("the score of `{token}` is not a finite number")));
    }
    if !model.merges.is_empty()
        && model.continuing_subword_prefix.as_ref().is_some_and(|prefix| !prefix.is_empty())
    {
        return Err(invalid(&"merges together with a `continuing_subword_prefix` are not supported"));
    }
    Ok(())
}

/// The spelling of the unknown token.
fn unknown_token(model: &OtherModel) -> Option<String> {
    match (&model.unk_token, &model.vocab) {
        (Some(token), _) => Some(token.clone()),
        (None, VocabularyOutline::List(pieces)) => pieces.get(model.unk_id?).map(|(token, _)| token.clone()),
        (None, VocabularyOutline::Table(IgnoredAny)) => None,
    }
}

fn entries<'a, M: Model>(
    pipeline: &Pipeline<M>,
    tokens: impl Iterator<Item = (Cow<'a, str>, u32)>,
) -> Vec<TokenEntry<'a>> {
    let added = pipeline.get_added_tokens_decoder();
    let special: HashSet<u32> = added.iter().filter(|(_, token)| token.special).map(|(&id, _)| id).collect();
    let entry = |(text, id)| TokenEntry { special: special.contains(&id), id, text, added: false };
    let mut entries: Vec<TokenEntry<'_>> = tokens.map(entry).collect();
    entries.extend(added.into_iter().map(|(id, token)| TokenEntry {
        id,
        special: token.special,
        text: token.content.into(),
        added: true,
    }));
    entries
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn file() -> Value {
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": [
                { "id": 7, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
                  "normalized": false, "special": true },
                { "id": 2, "content": "c", "single_word": false, "lstrip": false, "rstrip": false,
                  "normalized": true, "special": false },
            ],
            "normalizer": null,
            "pre_tokenizer": { "type": "Whitespace" },
            "post_processor": null,
            "decoder": null,
            "model": {
                "type": "BPE", "dropout": null, "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": false,
                "continuing_subword_prefix": null, "end_of_word_suffix": null, "ignore_merges": false,
                "vocab": { "<unk>": 9, "b": 1, "a": 0, "c": 2, "ab": 4, "abc": 6, "b c": 5 },
                "merges": ["a b", "ab c"],
            },
        })
    }

    /// A file with one value changed or removed.
    fn changed(place: &str, content: Option<Value>) -> Vec<u8> {
        let mut file = file();
        let (parent, field) = place.rsplit_once('/').unwrap();
        let fields = file.pointer_mut(parent).unwrap().as_object_mut().unwrap();
        match content {
            Some(content) => fields.insert(field.to_owned(), content),
            None => fields.remove(field),
        };
        file.to_string().into_bytes()
    }

    /// The result for a file here and with `tokenizers`: whether it is accepted, and the tokens of a text if it can be spelled.
    fn both(file: &[u8]) -> [Option<Option<Vec<u32>>>; 2] {
        let text = "abc ab<|end|>cxxab ba";
        let ours = parse(file).ok().map(|parsed| parsed.backend.encode(text, true).ok());
        let theirs = tokenizers::Tokenizer::from_bytes(file).ok();
        let ids = |encoding: tokenizers::Encoding| encoding.get_ids().to_vec();
        [ours, theirs.map(|theirs| theirs.encode_fast(text, true).map(ids).ok())]
    }

    #[test]
    fn complete_files_are_read_as_by_tokenizers() {
        let without = [
            "/version",
            "/truncation",
            "/added_tokens",
            "/pre_tokenizer",
            "/model",
            "/model/vocab",
            "/model/merges",
            "/model/type",
            "/model/unk_token",
        ];
        let without = without.into_iter().map(|place| (place, None));
        let with = [
            ("/version", json!("2.0")),
            ("/version", Value::Null),
            ("/truncation", json!(5)),
            ("/padding", json!({ "strategy": "none such" })),
            ("/decoder", json!({ "type": "Replace", "pattern": { "String": "a" } })),
            ("/normalizer", json!({ "type": "Lowercase" })),
            ("/added_tokens", json!([{ "content": "x" }])),
            ("/model/dropout", json!(0.0)),
            ("/model/ignore_merges", json!(true)),
            ("/model/fuse_unk", json!(false)),
            ("/model/unk_token", json!("[none]")),
            ("/model/end_of_word_suffix", json!("c")),
            ("/model/vocab", json!([])),
            ("/model/vocab", json!({ "a": -1 })),
            ("/model/merges", json!([])),
            ("/model/merges", json!([["a", "b"], ["ab", "c"]])),
            ("/model/merges", json!([["a", "b"], "ab c"])),
            ("/model/merges", json!([["a", "b", "c"]])),
            ("/model/merges", json!(["a b", "a b c"])),
            ("/model/merges", json!(["#version: 0.2", "b c", "a b"])),
            ("/model/merges", json!(["b b"])),
            ("/model/merges", json!([3])),
        ];
        for (place, content) in without.chain(with.into_iter().map(|(place, content)| (place, Some(content))))
        {
            let told = format!("{place}: {content:?}");
            let [ours, theirs] = both(&changed(place, content));
            assert_eq!(ours, theirs, "{told}");
        }
        let [ours, theirs] = both(file().to_string().as_bytes());
        assert!(ours.as_ref().is_some_and(Option::is_some));
        assert_eq!(ours, theirs);
    }

    /// `tokenizers` keeps the last one. No tool writes such files, so it is unknown which one is meant.
    #[test]
    fn a_duplicate_token_is_refused() {
        let file = file().to_string().replacen("\"b\":1", "\"b\":1,\"b\":8", 1);
        let error = parse(file.as_bytes()).err().unwrap();
        assert!(matches!(error, TextError::DuplicateToken { token, first: 1, second: 8 } if token == "b"));
    }
}
