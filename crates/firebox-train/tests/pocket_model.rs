//! The model in `assets/pocket` does what it was made for. `firebox train assets/pocket/recipe.toml --evaluate
//! assets/pocket` asks for all of it; `BENCHMARKS.md` has the tables.

#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

use std::path::{Path, PathBuf};

use firebox_runtime::heads::HeadPoolConfig;
use firebox_runtime::{KvType, Model, device};
use firebox_train::pocket::{EvaluationPlan, Examination, FALLBACK, Recipe, Task};

/// The maximum size of the pocket model in the repository.
const MOST_BYTES: u64 = 12 << 20;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/pocket")
}

fn model() -> Model {
    Model::open(folder(), &device("cpu").unwrap()).unwrap().with_heads(HeadPoolConfig::patient()).unwrap()
}

fn plan(conversations_per_task: usize) -> EvaluationPlan {
    let recipe = Recipe::open(folder().join("recipe.toml")).unwrap();
    EvaluationPlan { conversations_per_task, ..recipe.evaluation }
}

#[test]
fn the_right_head_answers_a_wrong_one_seldom_and_the_fallback_in_between() {
    let (model, plan) = (model(), plan(24));
    let report =
        Examination { model: &model, plan: &plan, kept: KvType::default() }.hold(&mut |_| {}).unwrap();
    let share = |head: &str, task| report.score(head, task).unwrap().share();
    for task in Task::ALL {
        let right = share(task.name(), task);
        assert!(right >= 0.95, "{} does {right} of its own task", task.name());
        let fallback = share(FALLBACK, task);
        assert!(fallback < right, "the fallback does {fallback} of {}", task.name());
        for wrong in Task::ALL.into_iter().filter(|wrong| *wrong != task) {
            let wrong = share(wrong.name(), task);
            assert!(
                wrong < right - 0.2,
                "{wrong} of {} with another head, {right} with its own",
                task.name()
            );
            assert!(
                wrong < fallback,
                "{wrong} of {} with another head, {fallback} with the fallback",
                task.name()
            );
        }
    }
    let router = report.router.unwrap();
    assert!(router.asked > 200 && router.share() >= 0.99, "{router:?}");
}

#[test]
fn keys_and_values_in_bytes_cost_less_than_half_a_percent() {
    let (model, plan) = (Model::open(folder(), &device("cpu").unwrap()).unwrap(), plan(12));
    let perplexity = |kept| {
        let report = Examination { model: &model, plan: &plan, kept }.hold(&mut |_| {}).unwrap();
        report.perplexity
    };
    let [exact, halved, bytes] = [KvType::F32, KvType::F16, KvType::Int8].map(perplexity);
    assert!((halved / exact - 1.0).abs() < 1e-4, "{exact} in f32, {halved} in f16");
    assert!((bytes / exact - 1.0).abs() < 5e-3, "{exact} in f32, {bytes} in int8");
}

#[test]
fn facts_outlive_two_hundred_forgotten_turns_where_they_are_kept_apart() {
    let (model, plan) = (model(), plan(1));
    let examination = Examination { model: &model, plan: &plan, kept: KvType::default() };
    let kept = examination.persistence("chat", 6, 200, 256, false).unwrap();
    assert!(kept.asked >= 15 && kept.share() >= 0.9, "{kept:?}");
    let naive = examination.persistence("chat", 2, 200, 256, true).unwrap();
    assert!(naive.share() < 0.5, "{naive:?}");
}

#[test]
fn it_is_small_enough_to_come_along() {
    let (mut bytes, mut open) = (0, vec![folder()]);
    while let Some(next) = open.pop() {
        for entry in std::fs::read_dir(next).unwrap() {
            let entry = entry.unwrap();
            let found = entry.metadata().unwrap();
            if found.is_dir() { open.push(entry.path()) } else { bytes += found.len() }
        }
    }
    assert!(bytes <= MOST_BYTES, "{bytes} bytes");
}
