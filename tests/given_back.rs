//! Tests when freed memory is released to the system. The release hook is global, so this test has a process of its
//! own.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use firebox::engine::{Engine, EngineConfig, Request};
use firebox::internals::runtime::set_release_to_os;
use firebox::{GenerationConfig, Model, device};

static GIVEN_BACK: AtomicUsize = AtomicUsize::new(0);

fn prompt(count: u32) -> Vec<u32> {
    (0..count).map(|index| 3 + index * 31 % 150).collect()
}

/// Returns how often memory is released during `by`.
fn given_back(by: impl FnOnce()) -> usize {
    let before = GIVEN_BACK.load(Ordering::Relaxed);
    by();
    GIVEN_BACK.load(Ordering::Relaxed) - before
}

#[test]
fn memory_of_a_prompt_is_released_when_its_answer_begins() {
    set_release_to_os(|| {
        GIVEN_BACK.fetch_add(1, Ordering::Relaxed);
    });
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference/llama");
    let model = Model::open(root, &device("cpu").unwrap()).unwrap();

    let mut session = model.session().unwrap();
    let feed =
        |session: &mut firebox::Session, count| given_back(|| drop(session.feed(&prompt(count)).unwrap()));
    assert_eq!([63, 64, 1].map(|count| feed(&mut session, count)), [0, 1, 0]);
    // Each piece of the prompt is followed by another one.
    let mut session = model.session().unwrap();
    assert_eq!(given_back(|| session.feed_each_row(&prompt(100), |_| ()).unwrap()), 0);

    let engine = Engine::start(EngineConfig::default()).unwrap();
    engine.add("model", model).unwrap();
    let answered = |count| {
        let config = GenerationConfig::new().with_max_tokens(5).with_ignore_end(true);
        let request = Request::new("model", prompt(count)).with_config(config);
        given_back(|| drop(engine.generate(request).wait().unwrap()))
    };
    assert_eq!([100, 20].map(answered), [1, 0]);
}
