//! Malformed vocabularies cause errors that name the defect. The fuzz target `tokenizer_metadata` searches for more of them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use firebox_text::{ChatTemplate, GgufVocabulary, TextAssets, TextError, Tokenizer, TokenizerSource};
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};
use std::path::Path;

fn with_assets(assets: &TextAssets) -> Result<Tokenizer, TextError> {
    Tokenizer::new(assets, &Value::Null)
}

fn from_gguf(vocabulary: GgufVocabulary) -> Result<Tokenizer, TextError> {
    with_assets(&TextAssets { tokenizer: Some(TokenizerSource::Gguf(vocabulary)), ..TextAssets::default() })
}

fn from_json(json: &Value) -> Result<Tokenizer, TextError> {
    let bytes = json.to_string().into_bytes();
    with_assets(&TextAssets { tokenizer: Some(TokenizerSource::Json(bytes)), ..TextAssets::default() })
}

fn small() -> GgufVocabulary {
    GgufVocabulary {
        model: "gpt2".to_owned(),
        pre: Some("gpt-2".to_owned()),
        tokens: ["a", "b", "ab", "<s>", "</s>"].map(str::to_owned).to_vec(),
        token_types: vec![1, 1, 1, 3, 3],
        merges: vec!["a b".to_owned()],
        bos: Some(3),
        eos: Some(4),
        ..GgufVocabulary::default()
    }
}

fn small_json() -> Value {
    json!({
        "version": "1.0",
        "added_tokens": [
            {"id": 3, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true},
            {"id": 4, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true},
        ],
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
    })
}

/// A file with a post-processor that begins every text with `<s>`.
fn framed_json() -> Value {
    let mut json = small_json();
    let special = json!({"id": "<s>", "type_id": 0});
    let text = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    json["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": special}, text("A")],
        "pair": [{"SpecialToken": special}, text("A"), text("B")],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [3], "tokens": ["<s>"]}},
    });
    json
}

fn json_assets(json: &Value) -> TextAssets {
    let source = TokenizerSource::Json(json.to_string().into_bytes());
    TextAssets { tokenizer: Some(source), ..TextAssets::default() }
}

#[test]
fn the_fuzzing_corpus() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/tokenizer_metadata");
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let Ok(vocabulary) = serde_json::from_slice::<GgufVocabulary>(&std::fs::read(&path).unwrap()) else {
            continue;
        };
        let own: String = vocabulary.tokens.iter().flat_map(|token| [token, " "]).collect();
        let name = path.file_name().unwrap().to_str().unwrap();
        match from_gguf(vocabulary) {
            Err(error) => assert!(name.starts_with("bad-") || name.starts_with("crash-"), "{name}: {error}"),
            Ok(tokenizer) => {
                assert!(!name.starts_with("bad-"), "{name}");
                for text in ["", " ab Hello é日\r\n<s>", &own] {
                    for ids in [tokenizer.encode(text, true), tokenizer.encode_literal(text, true)] {
                        let Ok(ids) = ids else { continue };
                        let mut stream = tokenizer.detokenizer(false);
                        let pushed: String = ids.iter().map(|&id| stream.push(id)).collect();
                        assert_eq!(pushed + &stream.finish(), tokenizer.decode(&ids, false), "{name}");
                    }
                }
            }
        }
    }
}

#[test]
fn every_inconsistency_has_its_error() {
    assert!(from_gguf(small()).is_ok());
    let broken = |change: fn(&mut GgufVocabulary)| {
        let mut vocabulary = small();
        change(&mut vocabulary);
        from_gguf(vocabulary).unwrap_err()
    };
    let error = broken(|v| v.pre = Some("nobody".to_owned()));
    assert_eq!(error, TextError::UnknownPreTokenizer { pre: "nobody".to_owned() });
    let error = broken(|v| v.model = "rwkv".to_owned());
    assert_eq!(error, TextError::UnknownModel { model: "rwkv".to_owned() });
    assert!(matches!(
        broken(|v| v.scores = vec![0.0]),
        TextError::VocabularyLength { found: 1, expected: 5, .. }
    ));
    assert!(matches!(broken(|v| v.token_types = vec![1; 6]), TextError::VocabularyLength { .. }));
    assert!(matches!(broken(|v| v.scores = vec![f32::NAN; 5]), TextError::InvalidVocabulary { .. }));
    assert!(matches!(broken(|v| v.tokens.clear()), TextError::InvalidVocabulary { .. }));
    assert!(matches!(broken(|v| v.eot = Some(5)), TextError::TokenOutOfRange { id: 5, vocab_size: 5, .. }));
    assert!(matches!(
        broken(|v| v.tokens[1] = "a".to_owned()),
        TextError::DuplicateToken { first: 0, second: 1, .. }
    ));
    for merge in ["a", "", "a c", "b a", "ab b"] {
        let mut vocabulary = small();
        vocabulary.merges.push(merge.to_owned());
        assert!(matches!(from_gguf(vocabulary).unwrap_err(), TextError::InvalidMerge { index: 1, .. }));
    }
    let missing = with_assets(&TextAssets::default()).unwrap_err();
    assert_eq!(missing, TextError::MissingTokenizer);
}

#[test]
fn a_normalization_table_is_checked_before_use() {
    for charsmap in [
        vec![0],
        vec![0, 0, 0, 0],
        vec![255, 255, 255, 255],
        vec![3, 0, 0, 0, 0, 0, 0],
        vec![4, 0, 0, 0, 0, 0, 0, 0],
        vec![4, 0, 0, 0, 255, 255, 255, 255, b'a', 0],
    ] {
        let vocabulary = GgufVocabulary {
            model: "t5".to_owned(),
            tokens: ["<pad>", "</s>", "<unk>", "a"].map(str::to_owned).to_vec(),
            scores: vec![0.0, 0.0, 0.0, -1.0],
            token_types: vec![3, 3, 2, 1],
            precompiled_charsmap: Some(charsmap),
            ..GgufVocabulary::default()
        };
        assert!(matches!(from_gguf(vocabulary).unwrap_err(), TextError::InvalidCharsmap { .. }));
    }
}

#[test]
fn tokenizer_json_is_checked() {
    let tokenizer = from_json(&small_json()).unwrap();
    assert_eq!(tokenizer.encode("ab<s>", false).unwrap(), [2, 3]);
    let broken = |pointer: &str, value: Value| {
        let mut json = small_json();
        *json.pointer_mut(pointer).unwrap() = value;
        from_json(&json).unwrap_err()
    };
    assert!(matches!(broken("/model/merges", json!(["a c"])), TextError::InvalidMerge { index: 0, .. }));
    assert!(matches!(broken("/model/merges", json!([["ab", "ab"]])), TextError::InvalidMerge { .. }));
    assert!(matches!(
        broken("/model/vocab/ab", json!(4_000_000_000_u32)),
        TextError::InvalidVocabulary { .. }
    ));
    assert!(matches!(broken("/model/vocab", json!(7)), TextError::InvalidTokenizerJson { .. }));
    assert!(matches!(broken("/version", json!("2.0")), TextError::InvalidTokenizerJson { .. }));
    assert!(matches!(broken("/decoder", json!({"type": "CTC"})), TextError::UnsupportedDecoder { .. }));
    let bytes = TextAssets { tokenizer: Some(TokenizerSource::Json(b"{".to_vec())), ..TextAssets::default() };
    assert!(matches!(with_assets(&bytes).unwrap_err(), TextError::InvalidTokenizerJson { .. }));
}

#[test]
fn special_tokens_are_collected_from_all_files() {
    let assets = json_assets(&small_json());
    let config = json!({"eos_token_id": 2, "bos_token_id": 3, "pad_token_id": -1});
    let tokenizer = Tokenizer::new(&assets, &config).unwrap();
    assert_eq!((tokenizer.eos_ids(), tokenizer.bos_id(), tokenizer.pad_id()), (&[2][..], Some(3), None));
    assert!(!tokenizer.adds_bos());

    let mut assets = json_assets(&framed_json());
    assets.generation_config = Some(json!({"eos_token_id": [4, 99]}));
    assets.tokenizer_config = Some(json!({"eos_token": {"content": "b"}, "bos_token": "<s>"}));
    let tokenizer = Tokenizer::new(&assets, &config).unwrap();
    assert_eq!(tokenizer.eos_ids(), [1, 2, 4]);
    assert!(tokenizer.is_eos(4) && !tokenizer.is_eos(3));
    assert!(tokenizer.adds_bos());
    assert_eq!(tokenizer.encode("ab", true).unwrap(), [3, 2]);
    assert_eq!(tokenizer.encode_literal("ab", true).unwrap(), [3, 2]);
    assert_eq!((tokenizer.vocab_size(), tokenizer.id_to_token(9)), (5, None));
    assert_eq!(tokenizer.token_bytes(2), Some(&b"ab"[..]));
}

/// As in `transformers` 5.23.0, which ignores both flags if there is a `tokenizer.json`.
#[test]
fn the_post_processor_defines_the_tokens_around_a_text() {
    let flags = [None, Some(false), Some(true)];
    for (bos, eos) in flags.iter().flat_map(|bos| flags.map(|eos| (*bos, eos))) {
        let mut config = json!({"bos_token": "<s>", "eos_token": "</s>"});
        for (name, flag) in [("add_bos_token", bos), ("add_eos_token", eos)] {
            if let Some(flag) = flag {
                config[name] = json!(flag);
            }
        }
        for (json, expected) in [(small_json(), &[2][..]), (framed_json(), &[3, 2])] {
            let mut assets = json_assets(&json);
            assets.tokenizer_config = Some(config.clone());
            let tokenizer = Tokenizer::new(&assets, &Value::Null).unwrap();
            assert_eq!(tokenizer.encode("ab", true).unwrap(), expected, "{config}");
        }
    }
}

#[test]
fn a_model_without_a_template() {
    let tokenizer = from_gguf(small()).unwrap();
    let assets = TextAssets::default();
    assert_eq!(ChatTemplate::new(&assets, &tokenizer).unwrap_err(), TextError::MissingChatTemplate);

    let mut vocabulary = small();
    vocabulary.tokens[3] = "<|im_start|>".to_owned();
    vocabulary.tokens[4] = "<|im_end|>".to_owned();
    let tokenizer = from_gguf(vocabulary).unwrap();
    assert_eq!(tokenizer.eos_ids(), [4]);
    let template = ChatTemplate::new(&assets, &tokenizer).unwrap();
    let prompt = template.render(&[firebox_text::Message::user("hi")], &Default::default()).unwrap();
    assert_eq!(prompt, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
}

#[test]
fn a_template_for_tools_is_used_if_there_are_tools() {
    let tokenizer = from_gguf(small()).unwrap();
    let assets = TextAssets {
        chat_template: Some("plain".to_owned()),
        tools_template: Some("{% for t in tools %}[TOOL_CALLS]{{ t.function.name }}{% endfor %}".to_owned()),
        ..TextAssets::default()
    };
    let template = ChatTemplate::new(&assets, &tokenizer).unwrap();
    let rendered = |tools: Option<Vec<Value>>| {
        let options = firebox_text::TemplateOptions { tools, ..Default::default() };
        template.render(&[firebox_text::Message::user("hi")], &options).unwrap()
    };
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {}}});
    assert_eq!((rendered(None).as_str(), rendered(Some(vec![tool])).as_str()), ("plain", "[TOOL_CALLS]f"));
    // Calls have the syntax of that template.
    assert_eq!(template.call_syntax(), firebox_text::CallSyntax::Listed);
}

const SPELLINGS: [&str; 40] = [
    "a",
    "b",
    "c",
    "ab",
    "bc",
    "abc",
    "aa",
    " ",
    "  ",
    "\n",
    "Ġ",
    "Ġa",
    "Ċ",
    "▁",
    "▁a",
    "▁ab",
    "▁▁",
    "é",
    "Ã",
    "©",
    "日",
    "<0x00>",
    "<0x41>",
    "<0xC3>",
    "<0xA9>",
    "<unk>",
    "<s>",
    "</s>",
    "[UNK]",
    "[SEP]",
    "##a",
    "",
    "1",
    "12",
    "'",
    "'s",
    "<|im_end|>",
    "😀",
    "ğ",
    "Ł",
];

prop_compose! {
    fn vocabularies()(
        tokens in proptest::sample::subsequence(SPELLINGS.to_vec(), 1..40).prop_shuffle(),
        model in select(vec!["gpt2", "gemma4", "llama", "t5", "bert"]),
        pre in select(vec!["default", "llama-bpe", "qwen35", "deepseek-llm", "superbpe", "tiny_aya", "viking", "exaone-moe"]),
        types in proptest::collection::vec(0..7, 40),
        scores in proptest::collection::vec(select(vec![0.0, -0.0, -1.0, -2.5, 3.0, f32::MIN]), 40),
        pairs in proptest::collection::vec((0_usize..40, 0_usize..40), 0..12),
        named in proptest::collection::vec(proptest::option::of(0_u32..40), 5),
        flags in proptest::collection::vec(any::<Option<bool>>(), 4),
        charsmap in proptest::option::of(proptest::collection::vec((0_usize..1200, any::<u8>()), 0..3)),
    ) -> GgufVocabulary {
        let count = tokens.len();
        let spelled = |id: usize| tokens[id % count];
        let known = |token: &str| tokens.contains(&token);
        let pairs = pairs.into_iter().map(|(left, right)| (spelled(left), spelled(right)));
        let fitting = pairs.filter(|(left, right)| !left.is_empty() && known(&format!("{left}{right}")));
        let named = |role: usize| named[role].map(|id| id % count as u32);
        GgufVocabulary {
            model: model.to_owned(),
            pre: Some(pre.to_owned()),
            tokens: tokens.iter().map(|token| (*token).to_owned()).collect(),
            scores: scores[..count].to_vec(),
            token_types: types[..count].to_vec(),
            merges: fitting.map(|(left, right)| format!("{left} {right}")).collect(),
            bos: named(0),
            eos: named(1),
            unk: named(2),
            pad: named(3),
            sep: named(4),
            add_bos: flags[0],
            add_eos: flags[1],
            add_space_prefix: flags[2],
            remove_extra_whitespaces: flags[3],
            precompiled_charsmap: charsmap.map(damaged_charsmap),
            ..GgufVocabulary::default()
        }
    }
}

/// A valid table with some bytes changed.
fn damaged_charsmap(changes: Vec<(usize, u8)>) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizers/unigram.json");
    let fixture: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let mut table: Vec<u8> =
        serde_json::from_value(fixture["vocabulary"]["precompiled_charsmap"].clone()).unwrap();
    for (place, byte) in changes {
        let place = place % table.len();
        table[place] = byte;
    }
    table
}

proptest! {
    /// No input causes a panic inside the `tokenizers` crate.
    #[test]
    fn any_vocabulary_works_or_is_refused(
        vocabulary in vocabularies(),
        text in "[abc 1'\\n▁Ġ日é😀]{0,30}|(ab|<s>|</s>|<0x41>|<unk>| |  |\\[SEP\\]|ﬁ|½|e\u{301}|\u{a0}){0,12}|\\PC{0,20}",
    ) {
        let sound = |error: &TextError| !error.to_string().contains("made it fail");
        match from_gguf(vocabulary) {
            Err(error) => prop_assert!(sound(&error), "{}", error),
            Ok(tokenizer) => {
                for ids in [tokenizer.encode(&text, true), tokenizer.encode_literal(&text, true)] {
                    match ids {
                        Err(error) => prop_assert!(sound(&error), "{}", error),
                        Ok(ids) => {
                            let mut stream = tokenizer.detokenizer(true);
                            let pushed: String = ids.iter().map(|&id| stream.push(id)).collect();
                            prop_assert_eq!(pushed + &stream.finish(), tokenizer.decode(&ids, true));
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn steps_that_would_panic_are_refused() {
    let template = |piece: Value| json!({"type": "TemplateProcessing", "single": [piece], "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}], "special_tokens": {}});
    let replace = |regex: &str| json!({"type": "Replace", "pattern": {"Regex": regex}, "content": "b"});
    let table = |base64: &str| json!({"type": "Precompiled", "precompiled_charsmap": base64});
    let nested = json!({"type": "Sequence", "normalizers": [table("AAAAAA==")]});
    let cases = [
        ("normalizer", table("/////w==")),
        ("normalizer", table("AAAAAA==")),
        ("normalizer", table("BAAAAP////8=")),
        ("normalizer", nested),
        ("normalizer", replace("x*")),
        ("normalizer", replace("")),
        ("pre_tokenizer", json!({"type": "FixedLength", "length": 0})),
        ("post_processor", template(json!({"Sequence": {"id": "B", "type_id": 0}}))),
        ("post_processor", template(json!({"SpecialToken": {"id": "[CLS]", "type_id": 0}}))),
    ];
    for (part, value) in cases {
        let mut json = small_json();
        json["pre_tokenizer"] = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true});
        json[part] = value.clone();
        let result = from_json(&json);
        let expected =
            matches!(result, Err(TextError::InvalidTokenizerJson { .. } | TextError::InvalidCharsmap { .. }));
        assert!(expected, "{value}: {result:?}");
    }
    let mut json = small_json();
    json["normalizer"] = replace("b+");
    assert!(from_json(&json).is_ok());
}
