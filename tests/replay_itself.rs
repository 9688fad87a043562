//! Tests of the replay that caches are compared with: on undisturbed sequences it agrees with the library and the
//! reference, and it reacts to changes of what tokens see.

#![allow(clippy::unwrap_used)]

mod replay;

use std::path::{Path, PathBuf};

use firebox::{KvType, Model, Session, device};
use replay::{Met, Naive, Step, deviation};
use safetensors::SafeTensors;

const FIXTURES: [&str; 4] =
    ["reference/llama", "reference/qwen3", "reference/qwen3_5_text", "variants/mistral-window7-headdim12"];

/// Relative to the logit range.
const TOLERANCE: f64 = 1e-4;
const NOTICEABLE: f64 = 1e-3;

fn path(fixture: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(fixture)
}

fn session(fixture: &str) -> Session {
    Model::open(path(fixture), &device("cpu").unwrap()).unwrap().session().unwrap().with_kv_type(KvType::F32)
}

fn tokens(count: u32, first: u32) -> Vec<u32> {
    (0..count).map(|at| (first + at * 37 + at * at) % 160).collect()
}

/// Returns the largest deviation of any row from the library's logits.
fn from_library(fixture: &str, tokens: &[u32], expected: &[Vec<f64>]) -> f64 {
    let mut found = Vec::new();
    session(fixture).feed_each_row(tokens, |logits| found.extend_from_slice(logits)).unwrap();
    let rows = found.chunks(expected[0].len()).zip(expected);
    rows.map(|(found, expected)| deviation(found, expected)).fold(0.0, f64::max)
}

fn between(a: &[f64], b: &[f64]) -> f64 {
    deviation(&a.iter().map(|&logit| logit as f32).collect::<Vec<_>>(), b)
}

#[test]
fn an_undisturbed_sequence_equals_the_library() {
    for fixture in FIXTURES {
        let tokens = tokens(150, 3);
        let logits = Naive::open(&path(fixture)).logits(&Step::causal(&tokens));
        let worst = from_library(fixture, &tokens, &logits);
        assert!(worst < TOLERANCE, "{fixture}: {worst}");
    }
}

#[test]
fn an_undisturbed_sequence_equals_the_reference() {
    for fixture in FIXTURES {
        let bytes = std::fs::read(path(fixture).join("expected.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let ids = file.tensor("input_ids").unwrap();
        let tokens: Vec<u32> =
            ids.data().as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes) as u32).collect();
        let naive = Naive::open(&path(fixture));
        let expected = file.tensor("logits").unwrap();
        let expected: Vec<f32> =
            expected.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let found = naive.logits(&Step::causal(&tokens));
        assert_eq!(expected.len(), tokens.len() * naive.vocab_size());
        for (position, (expected, found)) in expected.chunks(naive.vocab_size()).zip(&found).enumerate() {
            let worst = deviation(expected, found);
            assert!(worst < TOLERANCE, "{fixture}, position {position}: {worst}");
        }
    }
}

/// Hiding a token changes every later token that attended to it, and no earlier one.
#[test]
fn a_hidden_token_is_missed() {
    for fixture in FIXTURES {
        let naive = Naive::open(&path(fixture));
        let steps = Step::causal(&tokens(24, 5));
        let plain = naive.logits(&steps);
        let mut hiding = steps.clone();
        hiding[20].sees.retain(|met| met.step != 17);
        let hidden = naive.logits(&hiding);
        assert_eq!(plain[..20], hidden[..20], "{fixture}");
        for step in 20..24 {
            let difference = between(&plain[step], &hidden[step]);
            assert!(difference > NOTICEABLE, "{fixture}, step {step}: {difference}");
        }
    }
}

/// A window counts positions, not visible tokens: a token beyond it is not seen, whether listed or not.
#[test]
fn a_window_reaches_back_as_many_positions_as_it_has() {
    let naive = Naive::open(&path("variants/mistral-window7-headdim12"));
    let steps = Step::causal(&tokens(24, 5));
    let plain = naive.logits(&steps);
    for (hidden, noticed) in [(23 - 7, false), (23 - 6, true)] {
        let mut hiding = steps.clone();
        hiding[23].sees.retain(|met| met.step != hidden);
        assert_eq!(plain[23] != naive.logits(&hiding)[23], noticed, "step {hidden}");
    }
}

/// Only distances between positions matter, and they do.
#[test]
fn keys_are_rotated_to_where_a_query_sees_them() {
    for fixture in FIXTURES {
        let naive = Naive::open(&path(fixture));
        let steps = Step::causal(&tokens(24, 5));
        let plain = naive.logits(&steps);
        let mut moved = steps.clone();
        moved[23].position += 100;
        moved[23].sees.iter_mut().for_each(|met| met.position += 100);
        let together = between(&plain[23], &naive.logits(&moved)[23]);
        assert!(together < TOLERANCE, "{fixture}: {together}");
        let mut nearer = steps.clone();
        // A gap closes: the first half moves up by two positions of the second.
        nearer[23].position -= 2;
        nearer[23].sees.retain(|met| met.step != 18 && met.step != 19);
        let mut apart = nearer.clone();
        nearer[23].sees.iter_mut().filter(|met| met.step > 19).for_each(|met| met.position -= 2);
        apart[23].position += 2;
        let closed = between(&naive.logits(&nearer)[23], &naive.logits(&apart)[23]);
        assert!(closed > NOTICEABLE / 10.0, "{fixture}: {closed}");
    }
}

/// In half precision, the former position of a key matters a little, and nowhere else.
#[test]
fn keys_that_have_moved_are_rounded_again() {
    for fixture in FIXTURES {
        let naive = Naive::open(&path(fixture));
        let steps = Step::causal(&tokens(24, 5));
        let mut moved = steps.clone();
        moved[23].sees.iter_mut().for_each(|met| met.before = vec![met.position + 9, met.position + 2]);
        assert_eq!(naive.logits(&steps), naive.logits(&moved), "{fixture}");
        let half = naive.half();
        let once = half.logits(&steps);
        let thrice = half.logits(&moved);
        assert_eq!(once[..23], thrice[..23], "{fixture}");
        for (one, other) in [(&naive.logits(&steps)[23], &once[23]), (&once[23], &thrice[23])] {
            let difference = between(one, other);
            assert!((1e-6..1e-2).contains(&difference), "{fixture}: {difference}");
        }
    }
}

/// Two branches with a common prefix compute what two sequences compute, in whatever order they grow.
#[test]
fn branches_do_not_meet() {
    let (beginning, left, right) = (tokens(12, 5), tokens(9, 90), tokens(9, 31));
    for fixture in FIXTURES {
        let mut naive = Naive::open(&path(fixture));
        let mut trunk = Vec::new();
        for step in Step::causal(&beginning) {
            naive.push(&step);
            trunk.push(trunk.len());
        }
        let mut branches = [trunk.clone(), trunk];
        let mut found = [Vec::new(), Vec::new()];
        for (&left, &right) in left.iter().zip(&right) {
            for (branch, token) in [left, right].into_iter().enumerate() {
                let path = &mut branches[branch];
                let sees =
                    path.iter().enumerate().map(|(position, &step)| Met::unmoved(step, position)).collect();
                let step = Step { token, position: path.len(), sees, after: path.last().copied() };
                path.push(naive.len());
                found[branch].push(naive.push(&step));
                let ends = branches.each_ref().map(|path| path.last().copied());
                naive.forget_states(|step| ends.contains(&Some(step)));
            }
        }
        for (branch, found) in [&left, &right].into_iter().zip(&found) {
            let whole: Vec<u32> = beginning.iter().chain(branch).copied().collect();
            let expected = naive.logits(&Step::causal(&whole));
            assert_eq!(found, &expected[beginning.len()..], "{fixture}");
            assert!(from_library(fixture, &whole, &expected) < TOLERANCE, "{fixture}");
        }
    }
}

/// The state of recurrent layers depends on the tokens processed, not on the visible ones.
#[test]
fn only_recurrent_layers_depend_on_the_step_before() {
    for (fixture, recurrent) in [("reference/qwen3_5_text", true), ("reference/llama", false)] {
        let naive = Naive::open(&path(fixture));
        let steps = Step::causal(&tokens(24, 5));
        let plain = naive.logits(&steps);
        for after in [None, Some(11)] {
            let mut other = steps.clone();
            other[23].after = after;
            let difference = between(&plain[23], &naive.logits(&other)[23]);
            assert_eq!(difference > NOTICEABLE, recurrent, "{fixture}, after {after:?}: {difference}");
        }
    }
}
