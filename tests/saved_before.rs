//! Tests that files of an earlier version open and continue with the same tokens.
//!
//! `tests/fixtures/before` was written by the code before sessions got a module of their own. To write files of another
//! version, run the ignored test on that version with `FIREBOX_WRITE_BEFORE=1`.
#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use firebox::internals::runtime::{Origin, likeliest};
use firebox::internals::store::{Bits, ImportOptions, Quantization, import};
use firebox::{KvType, Model, PersistentPrefix, PrefixOptions, Role, Session, SessionSummary, device};

/// The models of the saved sessions, and the types of their keys and values.
const SESSIONS: [(&str, &str, KvType); 4] = [
    ("attention", "reference/llama", KvType::F16),
    ("quantized", "reference/llama", KvType::Int8),
    ("window", "variants/mistral-window7-headdim12", KvType::F32),
    ("recurrent", "reference/qwen3_5_text", KvType::F16),
];

const NOTE: &str = r#"[{"role":"user","content":"Who are you?"}]"#;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn before() -> PathBuf {
    fixtures().join("before")
}

fn open(path: impl AsRef<Path>) -> Model {
    Model::open(fixtures().join(path), &device("cpu").unwrap()).unwrap()
}

fn tokens(seed: u32, count: u32) -> Vec<u32> {
    (0..count).map(|i| 3 + (seed + i * 31) % 150).collect()
}

/// Returns the most likely continuation.
fn continued(session: &mut Session, prompt: &[u32]) -> Vec<u32> {
    let mut next = likeliest(&session.feed(prompt).unwrap());
    let step = |_| {
        let token = next;
        next = likeliest(&session.feed(&[token]).unwrap());
        token
    };
    (0..12).map(step).collect()
}

fn prefix(model: &Model) -> PersistentPrefix {
    let folder = before().join("prefixes");
    PersistentPrefix::open_or_build(folder, model, &tokens(4, 24), PrefixOptions::default()).unwrap()
}

fn expected() -> BTreeMap<String, Vec<u32>> {
    serde_json::from_slice(&std::fs::read(before().join("expected.json")).unwrap()).unwrap()
}

#[test]
fn saved_sessions_of_before_open_and_go_on() {
    let expected = expected();
    for (name, fixture, kv_type) in SESSIONS {
        let path = before().join(format!("{name}.session"));
        let summary = SessionSummary::open(&path).unwrap();
        assert_eq!((summary.note.as_str(), summary.turns.len()), (NOTE, 4), "{name}");
        let mut session = Session::restore(&path, &open(fixture), kv_type).unwrap();
        let turns: Vec<_> = session.turns().map(|turn| (turn.pinned, turn.hidden.is_some())).collect();
        assert_eq!(turns, [(false, true), (true, false), (false, true), (false, false)], "{name}");
        assert_eq!(continued(&mut session, &tokens(9, 5)), expected[name], "{name}");
    }
}

#[test]
fn a_prefix_of_before_is_opened_and_not_built_again() {
    let model = open("reference/llama");
    let prefix = prefix(&model);
    assert!(matches!(prefix.origin(), Origin::Opened), "{:?}", prefix.origin());
    let mut session = model.session().unwrap().with_prefix(&prefix).unwrap();
    assert_eq!(continued(&mut session, &tokens(9, 5)), expected()["prefix"]);
}

#[test]
fn a_bundle_of_before_opens_and_says_the_same() {
    let mut session = open("before/bundle").session().unwrap();
    assert_eq!(continued(&mut session, &tokens(9, 5)), expected()["bundle"]);
}

#[test]
#[ignore = "helper: writes the fixtures"]
fn write() {
    if std::env::var_os("FIREBOX_WRITE_BEFORE").is_none() {
        return;
    }
    std::fs::create_dir_all(before()).unwrap();
    let mut expected = BTreeMap::new();
    for (name, fixture, kv_type) in SESSIONS {
        let model = open(fixture);
        let mut session = model.session().unwrap().with_kv_type(kv_type);
        let fact = session.add_fact(&tokens(1, 4)).unwrap();
        let pinned = session.begin_turn(&[Role::User, Role::Assistant]).unwrap();
        session.feed(&tokens(2, 9)).unwrap();
        session.pin(pinned, true).unwrap();
        let hidden = session.begin_turn(&[Role::User, Role::Assistant]).unwrap();
        session.feed(&tokens(5, 7)).unwrap();
        session.mask(hidden, true).unwrap();
        session.supersede(fact, &tokens(3, 5)).unwrap();
        session.save_with_note(before().join(format!("{name}.session")), &model, NOTE).unwrap();
        expected.insert(name, continued(&mut session, &tokens(9, 5)));
    }
    let llama = open("reference/llama");
    let mut session = llama.session().unwrap().with_prefix(&prefix(&llama)).unwrap();
    expected.insert("prefix", continued(&mut session, &tokens(9, 5)));
    let options = ImportOptions::from(Some(Quantization { bits: Bits::Q4, group: 32 }));
    import(fixtures().join("reference/qwen2"), before().join("bundle"), &options, &mut |_| {}).unwrap();
    expected.insert("bundle", continued(&mut open("before/bundle").session().unwrap(), &tokens(9, 5)));
    let written = serde_json::to_string(&expected).unwrap() + "\n";
    std::fs::write(before().join("expected.json"), written).unwrap();
}
