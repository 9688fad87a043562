//! Panics of `tokenizers` become errors and print nothing. This test has its own process because it replaces the panic hook.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use firebox_text::{TextAssets, TextError, Tokenizer, TokenizerSource};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};

#[test]
fn caught_panics_print_nothing() {
    static REPORTED: AtomicUsize = AtomicUsize::new(0);
    std::panic::set_hook(Box::new(|_| {
        REPORTED.fetch_add(1, Ordering::Relaxed);
    }));
    // Loading tries no text with `q`, so the faulty pattern is detected only later.
    let json = json!({
        "version": "1.0",
        "normalizer": {"type": "Replace", "pattern": {"Regex": "(?=q)"}, "content": "b"},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
    });
    let source = TokenizerSource::Json(json.to_string().into_bytes());
    let assets = TextAssets { tokenizer: Some(source), ..TextAssets::default() };
    let tokenizer = Tokenizer::new(&assets, &Value::Null).unwrap();
    let error = tokenizer.encode("q", false).unwrap_err();
    assert!(matches!(error, TextError::Encode { .. }), "{error}");
    assert_eq!(REPORTED.load(Ordering::Relaxed), 0);
    assert!(std::panic::catch_unwind(|| panic!("other panics are reported")).is_err());
    assert_eq!(REPORTED.load(Ordering::Relaxed), 1);
}
