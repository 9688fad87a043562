//! What it saves to remember: a prefix of 512 tokens opened from its file beside computing it; two conversations that
//! take turns beside one that goes on, and beside computing the other one again; a branch; and what masks cost.
//!
//! `FIREBOX_BENCH_MODEL=DIR cargo bench --bench streams -- prefix` measures a part with a model of one's own instead of
//! a tiny one.
#![allow(clippy::unwrap_used, reason = "a benchmark that fails should say so")]

use std::hint::black_box;
use std::path::PathBuf;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use firebox::{Model, Origin, PersistentPrefix, PrefixOptions, Role, Session, TurnId, device};
use firebox_cache::KvType;

const TOKENS: usize = 512;

fn model() -> Model {
    let tiny = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference/llama");
    let path = std::env::var_os("FIREBOX_BENCH_MODEL").map_or(tiny, PathBuf::from);
    Model::open(path, &device("cpu").unwrap()).unwrap()
}

fn tokens(seed: u32) -> Vec<u32> {
    (0..TOKENS as u32).map(|i| 3 + (seed + i * 31) % 150).collect()
}

fn prefix(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().unwrap();
    let (model, tokens) = (model(), tokens(0));
    for (name, kept) in [("f32", KvType::F32), ("f16", KvType::F16), ("int8", KvType::Int8)] {
        let mut group = criterion.benchmark_group(format!("prefix/{name}"));
        let options = PrefixOptions { kept, capacity: TOKENS };
        PersistentPrefix::open_or_build(&folder, &model, &tokens, options).unwrap();
        let opened = || -> Session {
            let prefix = PersistentPrefix::open_or_build(&folder, &model, &tokens, options).unwrap();
            assert!(matches!(prefix.origin(), Origin::Opened));
            model.session().unwrap().with_kv_type(kept).with_prefix(&prefix).unwrap()
        };
        let computed = || -> Session {
            let mut session = model.session().unwrap().with_kv_type(kept);
            session.add_fact(&tokens).unwrap();
            session
        };
        group.bench_function("open", |bencher| bencher.iter(opened));
        group.bench_function("open and feed", |bencher| bencher.iter(|| opened().feed(&[5]).unwrap()));
        group.bench_function("prefill", |bencher| bencher.iter(computed));
        group.bench_function("prefill and feed", |bencher| bencher.iter(|| computed().feed(&[5]).unwrap()));
        group.finish();
    }
}

fn switch(criterion: &mut Criterion) {
    let model = model();
    let mut group = criterion.benchmark_group("switch");
    let begun = |seed| -> Session {
        let mut session = model.session().unwrap();
        session.feed(&tokens(seed)).unwrap();
        session
    };
    let mut sessions = [begun(1), begun(2)];
    // Back again, so that all tokens see as many.
    let say = |session: &mut Session| {
        black_box(session.feed(&[5]).unwrap());
        session.rewind(TOKENS);
    };
    group.bench_function("two tokens of one", |bencher| {
        bencher.iter(|| {
            say(&mut sessions[0]);
            say(&mut sessions[0]);
        });
    });
    group.bench_function("one token each of two", |bencher| {
        bencher.iter(|| {
            say(&mut sessions[0]);
            say(&mut sessions[1]);
        });
    });
    group.bench_function("computed again", |bencher| bencher.iter(|| begun(2)));
    group.finish();
}

/// A branch of a conversation, begun and ended.
fn fork(criterion: &mut Criterion) {
    let model = model();
    let mut session = model.session().unwrap();
    session.feed(&tokens(1)).unwrap();
    let pages = session.cache().pool().pages();
    criterion.bench_function("fork and drop", |bencher| bencher.iter(|| drop(black_box(session.clone()))));
    assert_eq!(session.cache().pool().pages(), pages, "a fork takes no page");
}

/// A token after 1536 others in turns of 64: all visible, one hidden, every other one hidden.
fn mask(criterion: &mut Criterion) {
    let model = model();
    let mut session = model.session().unwrap();
    let turns: Vec<TurnId> = (0..24)
        .map(|turn| {
            let id = session.begin_turn(&[Role::User]).unwrap();
            session.feed(&tokens(turn)[..64]).unwrap();
            id
        })
        .collect();
    let mut group = criterion.benchmark_group("mask");
    let held = session.tokens().len();
    let say = |session: &mut Session| {
        black_box(session.feed(&[5]).unwrap());
        session.rewind(held);
    };
    group.bench_function("all visible", |bencher| bencher.iter(|| say(&mut session)));
    // What a mask itself costs: a little less to read, and bits to look at.
    session.mask(turns[0], true).unwrap();
    group.bench_function("one turn hidden", |bencher| bencher.iter(|| say(&mut session)));
    for turn in turns.iter().step_by(2) {
        session.mask(*turn, true).unwrap();
    }
    group.bench_function("every other turn hidden", |bencher| bencher.iter(|| say(&mut session)));
    group.finish();
}

criterion_group! {
    name = streams;
    config = Criterion::default().sample_size(10).measurement_time(Duration::from_secs(2));
    targets = prefix, switch, fork, mask
}
criterion_main!(streams);
