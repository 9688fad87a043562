//! Tests that losing a graphics device in the middle of an answer fails its requests with the cause, keeps what was
//! generated, and leaves models on other devices running.

#![cfg(feature = "wgpu")]
#![allow(clippy::unwrap_used)]

use std::path::Path;

use burn::tensor::Device;
use firebox::engine::{Engine, EngineConfig, EngineError, Event, Request};
use firebox::{Generation, GenerationConfig, Model, SamplerConfig, device};

const SAID: usize = 5;

fn tokens(most: usize) -> GenerationConfig {
    GenerationConfig::new().with_max_tokens(most).with_ignore_end(true).with_sampler(SamplerConfig::greedy())
}

fn open(device: &Device) -> Model {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference/qwen3");
    Model::open(fixture, device).unwrap()
}

fn alone(model: &Model, prompt: &[u32], most: usize) -> Vec<u32> {
    let mut session = model.session().unwrap();
    let mut generation = Generation::begin(&mut session, None, prompt, tokens(most)).unwrap();
    while generation.next_piece().unwrap().is_some() {}
    generation.finish().unwrap().tokens
}

/// Returns whether an error reports a lost device.
fn is_lost(error: &EngineError) -> bool {
    match error {
        EngineError::Together { source } => is_lost(source),
        other => matches!(other, EngineError::DeviceLost { .. }),
    }
}

#[test]
fn a_lost_device_fails_what_is_asked_of_it_and_nothing_else() {
    let (gpu, setup) = Device::wgpu_options().init_with_setup().expect("a device; software Vulkan will do");
    let cpu = open(&device("cpu").unwrap());
    let prompt: Vec<u32> = (0..20).map(|at| 3 + at * 31 % 150).collect();
    let expected = alone(&cpu, &prompt, 40);
    let engine = Engine::start(EngineConfig::default()).unwrap();
    engine.add("lost", open(&gpu)).unwrap();
    engine.add("other", cpu.clone()).unwrap();
    let ask =
        |model: &str, most| engine.generate(Request::new(model, prompt.clone()).with_config(tokens(most)));
    let others = [ask("other", 40), ask("other", 40)];
    let mut said = Vec::new();
    let mut failure = None;
    for event in ask("lost", 10_000) {
        match event {
            Event::Piece(piece) => {
                said.extend(piece.token);
                if said.len() == SAID {
                    setup.device.destroy();
                }
            }
            Event::Failed(failed) => failure = Some(failed),
            Event::Finished(_) => panic!("it was answered by a device that is gone"),
            _ => {}
        }
    }
    let failure = failure.unwrap();
    assert!(is_lost(&failure.error), "{:?}", failure.error);
    // The tokens are known, and another device continues from them.
    let session = failure.session.expect("the session is returned");
    assert!(said.len() >= SAID);
    assert!(session.tokens().starts_with(&prompt));
    let known = &session.tokens()[prompt.len()..];
    assert!(said.starts_with(known) && known.len() + 1 >= said.len(), "{known:?} of {said:?}");
    let whole = [known, &alone(&cpu, session.tokens(), 4)].concat();
    assert_eq!(whole, alone(&cpu, &prompt, whole.len()));
    // Later requests fail as well, and do not hang.
    for event in ask("lost", 4) {
        match event {
            Event::Failed(failure) => assert!(is_lost(&failure.error), "{:?}", failure.error),
            Event::Waiting { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    for other in others {
        assert_eq!(other.wait().unwrap().summary.tokens, expected);
    }
    assert_eq!(ask("other", 40).wait().unwrap().summary.tokens, expected);
    // The model can be removed.
    engine.remove("lost").unwrap();
    assert_eq!(ask("other", 40).wait().unwrap().summary.tokens, expected);
}
