//! A session returns the logits of a fresh session with the same tokens, whatever was done to it before.

use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::residency::{ShareOptions, SharedBudget};
use crate::{Account, Budget, Model, device};

fn exact(decoder: &Arc<Decoder>) -> Session {
    Session::new(decoder.clone()).with_kv_type(KvType::F32)
}

fn decoder(fixture: &str) -> Arc<Decoder> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(fixture);
    Model::open(root, &device("cpu").unwrap()).unwrap().decoder().unwrap()
}

/// Checks that the history of a session has no effect: its logits are those of a fresh session with its tokens.
fn check(fixture: &str, steps: &[(u8, usize)]) {
    let decoder = decoder(fixture);
    let vocab = decoder.config().vocab_size as u32;
    let mut session = exact(&decoder).with_chunk(5);
    let mut next = 3;
    for &(kind, count) in steps {
        match kind {
            0 => session.rewind(session.tokens().len().saturating_sub(count)),
            1 => session.append(5 + count as u32 % (vocab - 5)),
            _ => {
                let tokens: Vec<u32> = (0..=count as u32).map(|i| (next + i * 31) % vocab).collect();
                next = (next + 7) % vocab;
                let found = session.feed(&tokens).unwrap();
                let fresh = exact(&decoder).feed(session.tokens()).unwrap();
                for (found, fresh) in found.iter().zip(&fresh) {
                    assert!((found - fresh).abs() < 2e-3, "{fixture}, {steps:?}: {found} instead of {fresh}");
                }
            }
        }
    }
}

/// Rounding keys and values moves logits by less than it moves what they are made from.
#[test]
fn half_precision_keys_and_values_say_the_same() {
    let decoder = decoder("reference/llama");
    let tokens: Vec<u32> = (0..40).map(|i| 3 + i * 31 % 200).collect();
    let exact = exact(&decoder).feed(&tokens).unwrap();
    let rounded = Session::new(decoder).feed(&tokens).unwrap();
    let range = exact.iter().fold(0f32, |range, logit| range.max(logit.abs()));
    assert_ne!(exact, rounded);
    let differences = || exact.iter().zip(&rounded).map(|(exact, rounded)| (exact - rounded).abs());
    let (most, mean) = (differences().fold(0f32, f32::max), differences().sum::<f32>() / exact.len() as f32);
    assert!(most < range / 100.0 && mean < range / 500.0, "{most} and {mean} of {range}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn history_does_not_show(steps in prop::collection::vec((0u8..4, 0usize..24), 1..10)) {
        for fixture in ["reference/llama", "variants/mistral-window7-headdim12", "reference/qwen3_5_text", "reference/gemma4_text"] {
            check(fixture, &steps);
        }
    }

    /// Positions there mean something else once a sequence is long, and again once it is short.
    #[test]
    fn history_does_not_show_where_positions_depend_on_length(
        steps in prop::collection::vec((0u8..4, 0usize..40), 1..10),
    ) {
        check("variants/phi3-longrope-short-to-long", &steps);
    }
}

#[test]
fn logits_of_a_long_prompt_are_charged_and_fit_into_what_is_left() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/gguf/llama/model.gguf");
    let shared = SharedBudget::beside(&Budget::new(256 << 20)).unwrap();
    let model = shared.open(&path, &device("cpu").unwrap(), &ShareOptions::pinned()).unwrap();
    let tokens: Vec<u32> = (0..200).map(|i| 3 + i * 31 % 150).collect();
    let fed = |model: &Model| {
        let (mut logits, mut most) = (Vec::new(), 0);
        let mut session = model.session().unwrap();
        session
            .feed_each_row(&tokens, |rows| {
                logits.extend_from_slice(rows);
                most = most.max(rows.len());
            })
            .unwrap();
        (logits, most)
    };
    let expected = fed(&Model::open(&path, &device("cpu").unwrap()).unwrap());
    let own = model.residency().unwrap().budget();
    let held = || Account::ALL.iter().map(|account| own.held(*account)).sum::<u64>();
    let before = held();
    let found = fed(&model);
    assert!(found.0 == expected.0);
    let charged = (found.1 * size_of::<f32>()) as u64;
    assert!(own.most_held() >= before + charged, "{} of {charged}", own.most_held() - before);

    let all = shared.budget();
    let pages = 2 * 128 * model.decoder().unwrap().layout(KvType::F16).bytes_per_position() as u64;
    let _taken = all.charge(Account::Scratch, all.left() - 3 * pages).unwrap();
    let found = fed(&model);
    assert!(found.0 == expected.0 && found.1 < expected.1, "{} numbers together", found.1);
}
