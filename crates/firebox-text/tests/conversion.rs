//! Tokenizers written in another format make the same tokens, or are refused by name.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use firebox_text::{
    GgufVocabulary, TextAssets, TextError, Tokenizer, TokenizerSource, gguf_vocabulary, tokenizer_files,
};
use serde_json::{Value, json};

fn assets(json: &Value) -> TextAssets {
    let source = TokenizerSource::Json(json.to_string().into_bytes());
    TextAssets { tokenizer: Some(source), ..TextAssets::default() }
}

fn special(id: u32, content: &str) -> Value {
    json!({
        "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true,
    })
}

/// A vocabulary as those that were converted from SentencePiece.
fn sentencepiece() -> Value {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    tokens.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    tokens.extend(["▁", "t", "h", "e", "a", "o", "he", "▁t", "▁the", "at"].map(str::to_owned));
    let vocabulary: serde_json::Map<String, Value> =
        tokens.into_iter().zip(0..).map(|(token, id): (String, u32)| (token, id.into())).collect();
    let text = json!({ "Sequence": { "id": "A", "type_id": 0 } });
    let begin = json!({ "SpecialToken": { "id": "<s>", "type_id": 0 } });
    json!({
        "version": "1.0",
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "normalizer": { "type": "Sequence", "normalizers": [
            { "type": "Prepend", "prepend": "▁" },
            { "type": "Replace", "pattern": { "String": " " }, "content": "▁" },
        ]},
        "pre_tokenizer": null,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, text],
            "pair": [begin, text, { "Sequence": { "id": "B", "type_id": 0 } }],
            "special_tokens": { "<s>": { "id": "<s>", "ids": [1], "tokens": ["<s>"] } },
        },
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
            { "type": "ByteFallback" },
            { "type": "Fuse" },
            { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
        ]},
        "model": {
            "type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
            "vocab": vocabulary, "merges": ["h e", "▁ t", "▁t he", "a t"],
        },
    })
}

/// A byte-level vocabulary with the pre-tokenizer of Qwen.
fn byte_level() -> GgufVocabulary {
    let plain = (33..127).chain(161..173).chain(174..256);
    let mut tokens: Vec<String> =
        plain.chain(256..324).filter_map(char::from_u32).map(String::from).collect();
    tokens.extend(["Ġt", "he", "Ġthe", "<|end|>", "<tool>"].map(str::to_owned));
    let count = tokens.len();
    let mut types = vec![1; count];
    (types[count - 2], types[count - 1]) = (3, 4);
    let end = Some(count as u32 - 2);
    GgufVocabulary {
        model: "gpt2".into(),
        pre: Some("qwen2".into()),
        tokens,
        token_types: types,
        merges: ["Ġ t", "h e", "Ġt he"].map(str::to_owned).to_vec(),
        bos: end,
        eos: end,
        add_bos: Some(true),
        ..GgufVocabulary::default()
    }
}

const TEXTS: [&str; 5] = ["the heat", " that\nhat", "oh <s>the</s> tea", "é日🙂 42", ""];

#[test]
fn sentencepiece_bpe_becomes_scores_of_tokens() {
    let source = assets(&sentencepiece());
    let config = json!({"bos_token_id": 1, "eos_token_id": 2});
    let vocabulary = gguf_vocabulary(&source, &config).unwrap();
    assert_eq!((vocabulary.model.as_str(), vocabulary.add_space_prefix), ("llama", Some(true)));
    assert_eq!((vocabulary.bos, vocabulary.eos, vocabulary.unk), (Some(1), Some(2), Some(0)));
    assert_eq!(&vocabulary.token_types[..4], [2, 3, 3, 6]);
    let written = TokenizerSource::Gguf(vocabulary);
    let written = TextAssets { tokenizer: Some(written), ..TextAssets::default() };
    let [source, written] = [(source, &config), (written, &Value::Null)]
        .map(|(assets, config)| Tokenizer::new(&assets, config).unwrap());
    for text in TEXTS {
        let ids = source.encode(text, true).unwrap();
        assert_eq!(ids, written.encode(text, true).unwrap(), "{text:?}");
        assert_eq!(source.decode(&ids, true), written.decode(&ids, true), "{text:?}");
    }
    assert_eq!(source.eos_ids(), written.eos_ids());
}

#[test]
fn scores_of_tokens_become_sentencepiece_bpe() {
    let config = json!({"bos_token_id": 1, "eos_token_id": 2});
    let given = gguf_vocabulary(&assets(&sentencepiece()), &config).unwrap();
    let files = tokenizer_files(&given).unwrap();
    let merges = files.tokenizer["model"]["merges"].as_array().unwrap();
    // In every way that there is, the best score first.
    assert_eq!(merges, &[json!(["h", "e"]), json!(["▁", "t"]), json!(["▁t", "he"]), json!(["a", "t"])]);
    let written = TextAssets { tokenizer_config: Some(files.config), ..assets(&files.tokenizer) };
    assert_eq!(gguf_vocabulary(&written, &Value::Null).unwrap(), given);
}

#[test]
fn byte_level_bpe_goes_there_and_back() {
    let given = byte_level();
    let files = tokenizer_files(&given).unwrap();
    assert_eq!(files.config["eos_token"], "<|end|>");
    assert_eq!(files.ends, [given.eos.unwrap()]);
    let written = TextAssets { tokenizer_config: Some(files.config), ..assets(&files.tokenizer) };
    let back = gguf_vocabulary(&written, &Value::Null).unwrap();
    let expected = GgufVocabulary { pad: back.pad, add_eos: back.add_eos, ..given };
    assert_eq!(back, expected);
}

#[test]
fn what_the_other_format_cannot_say_is_refused_by_name() {
    let refused = |change: fn(&mut Value), word: &str| {
        let mut json = sentencepiece();
        change(&mut json);
        let error = gguf_vocabulary(&assets(&json), &Value::Null).unwrap_err();
        assert!(matches!(error, TextError::NotWritten { .. }) && error.to_string().contains(word), "{error}");
    };
    refused(|json| json["normalizer"] = json!({"type": "Lowercase"}), "`Lowercase`");
    refused(|json| json["pre_tokenizer"] = json!({"type": "Whitespace"}), "`Whitespace`");
    refused(|json| json["model"]["merges"] = json!(["h e", "▁ t", "a t"]), "▁the");
    refused(|json| json["model"]["byte_fallback"] = false.into(), "pre-tokenizer");
    let unigram = json!({
        "version": "1.0", "added_tokens": [], "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]},
    });
    let error = gguf_vocabulary(&assets(&unigram), &Value::Null).unwrap_err().to_string();
    assert!(error.contains("Unigram"), "{error}");
    let none = gguf_vocabulary(&TextAssets::default(), &Value::Null).unwrap_err();
    assert_eq!(none, TextError::MissingTokenizer);
    let other = GgufVocabulary { model: "t5".into(), tokens: vec!["a".into()], ..Default::default() };
    let error = tokenizer_files(&other).unwrap_err().to_string();
    assert!(error.contains("`t5`") && error.contains("published"), "{error}");
}
