//! A vocabulary from GGUF metadata, as JSON: what is accepted encodes and decodes without a panic.
#![no_main]

use firebox_text::{GgufVocabulary, TextAssets, Tokenizer, TokenizerSource};

const TEXTS: [&str; 4] =
    ["", " Hello  world\r\n", "ab<s>\u{2581}é日😀\u{0}<0x41>", "1234 't x\u{301}\u{3000}"];

libfuzzer_sys::fuzz_target!(|json: &[u8]| {
    let Ok(vocabulary) = serde_json::from_slice::<GgufVocabulary>(json) else { return };
    let own: String = vocabulary.tokens.iter().take(20).flat_map(|token| [token, " "]).collect();
    let assets = TextAssets { tokenizer: Some(TokenizerSource::Gguf(vocabulary)), ..TextAssets::default() };
    let Ok(tokenizer) = Tokenizer::new(&assets, &serde_json::Value::Null) else { return };
    for text in TEXTS.into_iter().chain([own.as_str()]) {
        for ids in [tokenizer.encode(text, true), tokenizer.encode_literal(text, true)].into_iter().flatten()
        {
            assert!(ids.iter().all(|&id| tokenizer.id_to_token(id).is_some()));
            let mut stream = tokenizer.detokenizer(true);
            let pushed: String = ids.iter().map(|&id| stream.push(id)).collect();
            assert_eq!(pushed + &stream.finish(), tokenizer.decode(&ids, true));
        }
    }
});
