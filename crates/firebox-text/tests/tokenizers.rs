//! Tokenizers compared with `tokenizers` and `sentencepiece`. `make_tokenizers.py` makes the fixtures.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use firebox_text::{Detokenizer, GgufVocabulary, TextAssets, Tokenizer, TokenizerSource};
use proptest::prelude::*;
use serde::Deserialize;
use serde_json::Value;
use std::path::Path;

#[derive(Deserialize)]
struct Fixture {
    tokenizer: Option<Value>,
    vocabulary: Option<GgufVocabulary>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    text: String,
    /// With the spellings of added tokens encoded as those tokens.
    ids: Option<Vec<u32>>,
    /// `ids`, with the tokens that the model expects around a text.
    framed: Option<Vec<u32>>,
    /// As plain text only.
    literal: Option<Vec<u32>>,
    /// The decoded text of `ids`, or else of `literal`, without special tokens.
    decoded: Option<String>,
}

fn fixture(name: &str) -> Fixture {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizers").join(name);
    serde_json::from_slice(&std::fs::read(path.with_extension("json")).unwrap()).unwrap()
}

fn build(source: TokenizerSource) -> Tokenizer {
    let assets = TextAssets { tokenizer: Some(source), ..TextAssets::default() };
    Tokenizer::new(&assets, &Value::Null).unwrap()
}

fn tokenizers(fixture: &Fixture) -> Vec<(&'static str, Tokenizer)> {
    let json = fixture.tokenizer.as_ref().map(|json| TokenizerSource::Json(json.to_string().into_bytes()));
    let gguf = fixture.vocabulary.clone().map(TokenizerSource::Gguf);
    let sources = [("tokenizer.json", json), ("GGUF", gguf)];
    sources.into_iter().filter_map(|(name, source)| Some((name, build(source?)))).collect()
}

fn check(name: &str) {
    let fixture = fixture(name);
    for (source, tokenizer) in tokenizers(&fixture) {
        for case in &fixture.cases {
            let text = &case.text;
            let place = format!("{name} from {source}, text {text:?}");
            let show = |ids: &[u32]| -> Vec<String> {
                ids.iter().map(|&id| tokenizer.id_to_token(id).unwrap_or("?").to_owned()).collect()
            };
            if let Some(ids) = &case.ids {
                let found = tokenizer.encode(text, false).unwrap();
                assert_eq!(show(&found), show(ids), "{place}");
                assert_eq!(&found, ids, "{place}");
            }
            if let Some(framed) = &case.framed {
                assert_eq!(&tokenizer.encode(text, true).unwrap(), framed, "{place}");
            }
            let literal = tokenizer.encode_literal(text, false).unwrap();
            if let Some(expected) = &case.literal {
                assert_eq!(show(&literal), show(expected), "{place}, taken literally");
                assert_eq!(&literal, expected, "{place}, taken literally");
            }
            let unk = tokenizer.unk_id();
            assert!(literal.iter().all(|&id| !tokenizer.is_special(id) || Some(id) == unk), "{place}");
            if let Some(expected) = &case.decoded {
                let ids = case.ids.as_ref().or(case.literal.as_ref()).unwrap();
                assert_eq!(&tokenizer.decode(ids, true), expected, "{place}, decoded");
            }
        }
    }
}

#[test]
fn gpt2() {
    check("gpt2");
}

#[test]
fn smollm() {
    check("smollm");
}

#[test]
fn llama3() {
    check("llama3");
}

#[test]
fn qwen2() {
    check("qwen2");
}

#[test]
fn qwen35() {
    check("qwen35");
}

#[test]
fn tekken() {
    check("tekken");
}

#[test]
fn gpt_4o() {
    check("gpt-4o");
}

#[test]
fn deepseek_v3() {
    check("deepseek-v3");
}

#[test]
fn sentencepiece_bpe_as_merges() {
    check("spm-bpe-hub");
}

#[test]
fn sentencepiece_bpe() {
    check("spm-bpe");
}

#[test]
fn sentencepiece_bpe_without_prefix() {
    check("spm-bpe-no-prefix");
}

#[test]
fn unigram() {
    check("unigram");
}

#[test]
fn unigram_with_byte_fallback() {
    check("unigram-bytes");
}

#[test]
fn word_piece() {
    check("wordpiece");
}

/// Streaming decodes to the same text as decoding all ids at once, and shows no text that could still change.
fn streams_equal_whole(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) {
    let mut stream = tokenizer.detokenizer(skip_special);
    let pushed: Vec<String> = ids.iter().map(|&id| stream.push(id)).collect();
    let text = pushed.concat() + &stream.finish();
    assert_eq!(text, tokenizer.decode(ids, skip_special));
    let bytes: Vec<u8> = {
        let mut stream = Detokenizer::continuing(tokenizer, skip_special);
        let text: String = ids.iter().map(|&id| stream.push(id)).collect();
        (text + &stream.finish()).into_bytes()
    };
    let shown = ids.iter().filter(|&&id| !skip_special || !tokenizer.is_special(id));
    let joined: Vec<u8> =
        shown.flat_map(|&id| tokenizer.token_bytes(id).unwrap_or_default().to_vec()).collect();
    assert_eq!(String::from_utf8_lossy(&bytes), String::from_utf8_lossy(&joined));
}

fn all() -> &'static [(&'static str, Tokenizer)] {
    static ALL: std::sync::OnceLock<Vec<(&str, Tokenizer)>> = std::sync::OnceLock::new();
    ALL.get_or_init(|| {
        let names =
            ["qwen2", "llama3", "spm-bpe-hub", "spm-bpe", "spm-bpe-no-prefix", "unigram-bytes", "wordpiece"];
        names.iter().flat_map(|name| tokenizers(&fixture(name))).collect()
    })
}

proptest! {
    #[test]
    fn streams_of_random_ids(ids in proptest::collection::vec(0_u32..760, 0..40), skip in any::<bool>()) {
        for (_, tokenizer) in all() {
            streams_equal_whole(tokenizer, &ids, skip);
        }
    }

    #[test]
    fn text_survives_the_round_trip(text in "\\PC{0,40}|[ \\n\\t a-zé日😀]{0,40}") {
        for (index, (_, tokenizer)) in all().iter().enumerate() {
            let ids = tokenizer.encode_literal(&text, false).unwrap();
            streams_equal_whole(tokenizer, &ids, false);
            // The remaining vocabularies normalize, clean or lower-case the text.
            let exact = [2, 3, 4, 5, 6].contains(&index);
            if exact {
                prop_assert_eq!(&tokenizer.decode(&ids, false), &text);
            }
        }
    }
}

#[test]
fn half_a_character_is_held_back() {
    for name in ["gpt2", "spm-bpe"] {
        let (_, tokenizer) = tokenizers(&fixture(name)).remove(0);
        let mut stream = tokenizer.detokenizer(true);
        let ids = tokenizer.encode_literal("𝔘", false).unwrap();
        assert!(ids.len() >= 4);
        let (last, first) = ids.split_last().unwrap();
        assert!(first.iter().all(|&id| stream.push(id).is_empty()));
        assert_eq!(stream.push(*last), "𝔘");
        assert_eq!(stream.push(first[first.len() - 1]), "\u{fffd}");
        assert_eq!(stream.finish(), "");
    }
}

#[test]
fn spaces_before_the_first_word() {
    let (_, tokenizer) = tokenizers(&fixture("spm-bpe")).remove(0);
    let ids = tokenizer.encode("then there", false).unwrap();
    assert_eq!(tokenizer.decode(&ids, true), "then there");
    let mut stream = Detokenizer::continuing(&tokenizer, true);
    let text: String = ids.iter().map(|&id| stream.push(id)).collect();
    assert_eq!(text + &stream.finish(), " then there");
}
