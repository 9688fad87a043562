//! The tokenizer in GGUF metadata.

use serde::{Deserialize, Serialize};

use super::metadata::{List, Metadata, Value};
use crate::error::Fault;

/// The `tokenizer.ggml.*` metadata of a GGUF file.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GgufVocabulary {
    /// `llama` (SentencePiece), `gpt2` (byte-level BPE), `bert` (WordPiece), `t5` (unigram) …
    pub model: String,
    /// The name of the pre-tokenizer.
    pub pre: Option<String>,
    /// Tokens by id.
    pub tokens: Vec<String>,
    /// Scores by id; empty if the model has none.
    pub scores: Vec<f32>,
    /// Types by id (1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte); empty if the model has none.
    pub token_types: Vec<i32>,
    /// Merges in order of priority, each of two pieces with a space between.
    pub merges: Vec<String>,
    /// Beginning of sequence.
    pub bos: Option<u32>,
    /// End of sequence.
    pub eos: Option<u32>,
    /// End of turn.
    pub eot: Option<u32>,
    /// End of message.
    pub eom: Option<u32>,
    /// Unknown token.
    pub unk: Option<u32>,
    /// Padding.
    pub pad: Option<u32>,
    /// Separator.
    pub sep: Option<u32>,
    /// Classification token.
    pub cls: Option<u32>,
    /// Mask token.
    pub mask: Option<u32>,
    /// Whether a sequence begins with `bos`.
    pub add_bos: Option<bool>,
    /// Whether a sequence ends with `eos`.
    pub add_eos: Option<bool>,
    /// Whether a sequence ends with `sep`.
    pub add_sep: Option<bool>,
    /// Whether a leading space is added to text.
    pub add_space_prefix: Option<bool>,
    /// Whether runs of spaces are collapsed.
    pub remove_extra_whitespaces: Option<bool>,
    /// SentencePiece's normalization table.
    pub precompiled_charsmap: Option<Vec<u8>>,
    /// A whole `tokenizer.json`, if the file carries one.
    pub huggingface_json: Option<String>,
}

/// Reads the vocabulary, or None if the file has none.
pub(crate) fn vocabulary(metadata: &Metadata) -> Result<Option<GgufVocabulary>, Fault> {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let Some(model) = metadata.text(&key("model"))?.filter(|model| *model != "none" && *model != "no_vocab")
    else {
        return Ok(None);
    };
    let id = |name: &str| metadata.id(&key(name));
    let flag = |name: &str| metadata.flag(&key(name));
    let vocabulary = GgufVocabulary {
        model: model.to_owned(),
        pre: metadata.text(&key("pre"))?.map(str::to_owned),
        tokens: metadata.texts(&key("tokens"))?.unwrap_or_default().to_vec(),
        scores: metadata.floats(&key("scores"))?.unwrap_or_default().to_vec(),
        token_types: metadata.ints(&key("token_type"))?.unwrap_or_default().to_vec(),
        merges: metadata.texts(&key("merges"))?.unwrap_or_default().to_vec(),
        bos: id("bos_token_id")?,
        eos: id("eos_token_id")?,
        eot: id("eot_token_id")?,
        eom: id("eom_token_id")?,
        unk: id("unknown_token_id")?,
        pad: id("padding_token_id")?,
        // Every file has this misspelling of the key, from the first converter on.
        sep: id("seperator_token_id")?,
        cls: id("cls_token_id")?,
        mask: id("mask_token_id")?,
        add_bos: flag("add_bos_token")?,
        add_eos: flag("add_eos_token")?,
        add_sep: flag("add_sep_token")?,
        add_space_prefix: flag("add_space_prefix")?,
        remove_extra_whitespaces: flag("remove_extra_whitespaces")?,
        precompiled_charsmap: metadata.bytes(&key("precompiled_charsmap"))?.map(<[u8]>::to_vec),
        huggingface_json: metadata.text("tokenizer.huggingface.json")?.map(str::to_owned),
    };
    check(&vocabulary)?;
    Ok(Some(vocabulary))
}

/// Returns the metadata that [`vocabulary`] reads.
pub(crate) fn keys(vocabulary: &GgufVocabulary) -> Vec<(String, Value)> {
    let texts = |texts: &[String]| (!texts.is_empty()).then(|| Value::List(List::Texts(texts.to_vec())));
    let id = |id: Option<u32>| id.map(|id| Value::Unsigned(id.into()));
    let flag = |flag: Option<bool>| flag.map(Value::Bool);
    let list = |list: List, is_empty: bool| (!is_empty).then_some(Value::List(list));
    let GgufVocabulary { scores, token_types, .. } = vocabulary;
    let keys = [
        ("model", Some(Value::Text(vocabulary.model.clone()))),
        ("pre", vocabulary.pre.clone().map(Value::Text)),
        ("tokens", texts(&vocabulary.tokens)),
        ("scores", list(List::F32(scores.clone()), scores.is_empty())),
        ("token_type", list(List::I32(token_types.clone()), token_types.is_empty())),
        ("merges", texts(&vocabulary.merges)),
        ("bos_token_id", id(vocabulary.bos)),
        ("eos_token_id", id(vocabulary.eos)),
        ("eot_token_id", id(vocabulary.eot)),
        ("eom_token_id", id(vocabulary.eom)),
        ("unknown_token_id", id(vocabulary.unk)),
        ("padding_token_id", id(vocabulary.pad)),
        ("seperator_token_id", id(vocabulary.sep)),
        ("cls_token_id", id(vocabulary.cls)),
        ("mask_token_id", id(vocabulary.mask)),
        ("add_bos_token", flag(vocabulary.add_bos)),
        ("add_eos_token", flag(vocabulary.add_eos)),
        ("add_sep_token", flag(vocabulary.add_sep)),
        ("add_space_prefix", flag(vocabulary.add_space_prefix)),
        ("remove_extra_whitespaces", flag(vocabulary.remove_extra_whitespaces)),
        (
            "precompiled_charsmap",
            vocabulary.precompiled_charsmap.clone().map(|map| Value::List(List::Bytes(map))),
        ),
    ];
    let keys = keys.into_iter().filter_map(|(key, value)| Some((format!("tokenizer.ggml.{key}"), value?)));
    let json = vocabulary.huggingface_json.clone().map(Value::Text);
    keys.chain(json.map(|json| ("tokenizer.huggingface.json".to_owned(), json))).collect()
}

/// The type of a token that no text has.
const UNUSED: i32 = 5;

/// Returns a vocabulary with a token for each of so many rows.
pub(crate) fn padded(vocabulary: &GgufVocabulary, rows: usize) -> Result<GgufVocabulary, Fault> {
    let count = vocabulary.tokens.len();
    if count > rows {
        return Err(Fault::unsupported(
            "tokenizer.ggml.tokens",
            format!(
                "{count} tokens for {rows} rows of the embedding; use the tokenizer that the model was made with"
            ),
        ));
    }
    let mut padded = vocabulary.clone();
    padded.tokens.extend((count..rows).map(|id| format!("[PAD{id}]")));
    if padded.token_types.is_empty() && count < rows {
        padded.token_types = vec![1; count];
    }
    if !padded.token_types.is_empty() {
        padded.token_types.resize(rows, UNUSED);
    }
    if !padded.scores.is_empty() {
        padded.scores.resize(rows, 0.0);
    }
    Ok(padded)
}

/// Refuses ids and tables that do not match the token list, and scores that are not numbers.
pub(crate) fn check(vocabulary: &GgufVocabulary) -> Result<(), Fault> {
    let count = vocabulary.tokens.len();
    if count == 0 {
        return Err(Fault::new("tokenizer.ggml.tokens", "missing or empty"));
    }
    for (name, len) in [("scores", vocabulary.scores.len()), ("token_type", vocabulary.token_types.len())] {
        if len != 0 && len != count {
            return Err(Fault::new(
                format!("tokenizer.ggml.{name}"),
                format!("{len} entries for {count} tokens"),
            ));
        }
    }
    if let Some(at) = vocabulary.scores.iter().position(|score| !score.is_finite()) {
        return Err(Fault::new("tokenizer.ggml.scores", format!("the score of token {at} is not a number")));
    }
    let ids = [
        ("bos", vocabulary.bos),
        ("eos", vocabulary.eos),
        ("eot", vocabulary.eot),
        ("eom", vocabulary.eom),
        ("unknown", vocabulary.unk),
        ("padding", vocabulary.pad),
        ("seperator", vocabulary.sep),
        ("cls", vocabulary.cls),
        ("mask", vocabulary.mask),
    ];
    for (name, id) in ids {
        if id.is_some_and(|id| id as usize >= count) {
            return Err(Fault::new(
                format!("tokenizer.ggml.{name}_token_id"),
                format!("{} with {count} tokens", id.unwrap_or_default()),
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let whole = GgufVocabulary {
            model: "gpt2".into(),
            pre: Some("qwen2".into()),
            tokens: ["a", "b", "ab"].map(str::to_owned).to_vec(),
            scores: vec![0.5, 0.0, -1.0],
            token_types: vec![1, 3, 6],
            merges: vec!["a b".into()],
            bos: Some(0),
            eos: Some(1),
            eot: Some(2),
            eom: Some(0),
            unk: Some(1),
            pad: Some(2),
            sep: Some(0),
            cls: Some(1),
            mask: Some(2),
            add_bos: Some(true),
            add_eos: Some(false),
            add_sep: Some(true),
            add_space_prefix: Some(false),
            remove_extra_whitespaces: Some(true),
            precompiled_charsmap: Some(vec![1, 2]),
            huggingface_json: Some("{}".into()),
        };
        let sparse = GgufVocabulary { model: "gpt2".into(), tokens: vec!["a".into()], ..Default::default() };
        for written in [whole, sparse] {
            let mut metadata = Metadata::default();
            for (key, value) in keys(&written) {
                metadata.insert(key, value).unwrap();
            }
            assert_eq!(vocabulary(&metadata).unwrap(), Some(written));
        }
    }

    #[test]
    fn rows_without_a_token_get_one_that_no_text_has() {
        let small = GgufVocabulary { tokens: vec!["a".into(), "b".into()], ..Default::default() };
        let found = padded(&small, 4).unwrap();
        assert_eq!((found.tokens[3].as_str(), found.token_types.as_slice()), ("[PAD3]", &[1, 1, 5, 5][..]));
        assert_eq!(padded(&small, 2).unwrap(), small);
        assert!(padded(&small, 1).unwrap_err().to_string().contains("2 tokens for 1 rows"));
    }
}
