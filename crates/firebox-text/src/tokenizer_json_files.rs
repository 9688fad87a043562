//! A GGUF vocabulary as `tokenizer.json` and the file beside it.

use crate::decoding::SPACE_MARK;
use crate::error::TextError;
use crate::gguf_vocabulary::{Checked, TokenType};
use crate::parsed_vocabulary::Frame;
use crate::pretokenizer::PreTokenizer;
use crate::special_tokens::SpecialTokens;
use firebox_store::{GgufVocabulary, TokenizerFiles};
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// Returns the files for a vocabulary of BPE. Others are refused.
pub(crate) fn files(source: &GgufVocabulary) -> Result<TokenizerFiles, TextError> {
    let checked = Checked::new(source)?;
    let spelled = |id| checked.text_of(id);
    let SpecialTokens { bos, eos, unk, pad } = checked.named;
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": spelled(bos),
        "eos_token": spelled(eos),
        "unk_token": spelled(unk),
        "pad_token": spelled(pad),
        "clean_up_tokenization_spaces": false,
    });
    let tokenizer = match &source.huggingface_json {
        Some(json) => serde_json::from_str(json)
            .map_err(|error| TextError::InvalidTokenizerJson { reason: error.to_string() })?,
        None => tokenizer(&checked)?,
    };
    Ok(TokenizerFiles { tokenizer, config, ends: Vec::new() })
}

fn refused(reason: impl Into<String>) -> TextError {
    TextError::NotWritten { form: "tokenizer.json", reason: reason.into() }
}

/// What differs between kinds of BPE.
struct Steps {
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
    frame: Frame,
    merges: Vec<[String; 2]>,
    ignore_merges: bool,
    byte_fallback: bool,
}

fn tokenizer(checked: &Checked<'_>) -> Result<Value, TextError> {
    checked.require_distinct()?;
    let steps = match (checked.source.model.as_str(), checked.source.pre.as_deref()) {
        ("gpt2", pre) if pre != Some("gemma4") => byte_level(checked, pre.unwrap_or("default"))?,
        ("llama", _) => sentencepiece(checked)?,
        (kind, _) => return Err(refused(format!("its vocabulary is of the kind `{kind}`"))),
    };
    let SpecialTokens { bos, eos, pad, .. } = checked.named;
    let listed = [bos, eos, pad, checked.source.eot, checked.source.eom];
    let added = (0..).zip(&checked.tokens).zip(&checked.types).filter_map(|((id, token), kind)| {
        let special = kind.is_special() || listed.contains(&Some(id));
        let added = json!({
            "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": special,
        });
        (special || *kind == TokenType::UserDefined).then_some(added)
    });
    let tokens = checked.tokens.iter().zip(0u32..).map(|(token, id)| (token.clone(), Value::from(id)));
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": steps.normalizer,
        "pre_tokenizer": steps.pre_tokenizer,
        "post_processor": template(checked, &steps.frame),
        "decoder": steps.decoder,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": checked.text_of(checked.named.unk),
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": steps.byte_fallback,
            "byte_fallback": steps.byte_fallback,
            "ignore_merges": steps.ignore_merges,
            "vocab": tokens.collect::<Map<_, _>>(),
            "merges": steps.merges,
        },
    }))
}

fn byte_level(checked: &Checked<'_>, pre: &str) -> Result<Steps, TextError> {
    let splitting = PreTokenizer::named(pre)?;
    let step = |step: serde_json::Result<Value>| step.map_err(|error| refused(error.to_string()));
    let merge = |merge: &String| match merge.split_once(' ') {
        Some((left, right)) => Ok([left.to_owned(), right.to_owned()]),
        None => Err(refused(format!("the merge {merge:?} is not two tokens"))),
    };
    Ok(Steps {
        normalizer: step(serde_json::to_value(splitting.normalizer()))?,
        pre_tokenizer: step(serde_json::to_value(splitting.splitter()?))?,
        decoder: json!({
            "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true,
        }),
        frame: checked.frame(splitting.add_bos, false),
        merges: checked.source.merges.iter().map(merge).collect::<Result<_, _>>()?,
        ignore_merges: splitting.ignore_merges,
        byte_fallback: false,
    })
}

/// SentencePiece has scores instead of a list: a token of a better score is made first, in whichever way.
fn sentencepiece(checked: &Checked<'_>) -> Result<Steps, TextError> {
    let source = checked.source;
    let cleans = source.precompiled_charsmap.as_ref().is_some_and(|map| !map.is_empty());
    if cleans || source.remove_extra_whitespaces == Some(true) {
        return Err(refused("it normalizes a text before it marks spaces"));
    }
    let is_made =
        |id: usize| !matches!(checked.types[id], TokenType::Unknown | TokenType::Control | TokenType::Byte);
    let made: HashSet<&str> =
        (0..checked.tokens.len()).filter(|&id| is_made(id)).map(|id| checked.tokens[id].as_str()).collect();
    let mut order: Vec<usize> = (0..checked.tokens.len()).filter(|&id| is_made(id)).collect();
    order.sort_by(|one, other| checked.scores[*other].total_cmp(&checked.scores[*one]));
    let mut merges = Vec::new();
    for id in order {
        let token = checked.tokens[id].as_str();
        let halves = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let halves = halves.filter(|(left, right)| made.contains(left) && made.contains(right));
        merges.extend(halves.map(|(left, right)| [left.to_owned(), right.to_owned()]));
    }
    let prefixed = source.add_space_prefix.unwrap_or(true);
    let mark = SPACE_MARK.to_string();
    let mut normalizers = vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": mark})];
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": mark}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefixed {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": mark}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    Ok(Steps {
        normalizer: json!({"type": "Sequence", "normalizers": normalizers}),
        pre_tokenizer: Value::Null,
        decoder: json!({"type": "Sequence", "decoders": decoders}),
        frame: checked.frame(true, false),
        merges,
        ignore_merges: false,
        byte_fallback: true,
    })
}

/// The post-processor that puts tokens around a text.
fn template(checked: &Checked<'_>, frame: &Frame) -> Option<Value> {
    let ids = || frame.before.iter().chain(&frame.after);
    ids().next()?;
    let around = |texts: &[&str]| -> Vec<Value> {
        let special =
            |id: &u32| json!({ "SpecialToken": { "id": checked.text_of(Some(*id)), "type_id": 0 } });
        let text = |name: &&str| json!({ "Sequence": { "id": name, "type_id": 0 } });
        let before = frame.before.iter().map(special);
        before.chain(texts.iter().map(text)).chain(frame.after.iter().map(special)).collect()
    };
    let tokens: Map<String, Value> = ids()
        .filter_map(|id| {
            let token = checked.text_of(Some(*id))?;
            Some((token.clone(), json!({ "id": token, "ids": [id], "tokens": [token] })))
        })
        .collect();
    Some(json!({
        "type": "TemplateProcessing",
        "single": around(&["A"]),
        "pair": around(&["A", "B"]),
        "special_tokens": tokens,
    }))
}
