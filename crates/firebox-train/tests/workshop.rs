//! A recipe makes a model with its heads: the same one every time, however often it is stopped on the way.

#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use firebox_runtime::heads::HeadPoolConfig;
use firebox_runtime::{KvType, Model};
use firebox_store::Heads;
use firebox_train::pocket::{Examination, FALLBACK, ROUTER, Recipe, Task, Watch, Workshop};
use firebox_train::{Progress, Silent, StepReport};

use support::device;

const TINY: &str = r#"
seed = 5
[tokenizer]
pieces = 400
conversations_per_task = 20
[architecture]
model_type = "qwen3"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 3
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
rope_theta = 10000.0
rms_norm_eps = 1e-6
tie_word_embeddings = true
max_position_embeddings = 1024
trunk_layers = 2
[initialization]
embedding = 0.02
head_norms = 1.6
[optimizer]
betas = [0.9, 0.95]
epsilon = 1e-8
weight_decay = 0.1
clip_norm = 1.0
final_share = 0.05
[base]
tokens_per_step = 512
learning_rate = 3e-3
warm_up_steps = 2
prompt_weight = 0.15
fallback_weight = 0.5
stages = [{ shapes = ["short"], tokens = 2000 }, { shapes = ["full", "distant"], tokens = 3000 }]
[heads]
tasks = ["chat", "code", "summarize"]
shapes = ["short"]
tokens_per_step = 512
learning_rate = 1e-3
warm_up_steps = 1
steps = 3
prompt_weight = 0.0
[fallback]
rank = 8
shapes = ["short"]
tokens_per_step = 512
learning_rate = 3e-3
weight_decay = 0.0
warm_up_steps = 1
steps = 4
[router]
conversations = 9
shape = "short"
learning_rate = 1e-2
weight_decay = 1e-2
steps = 5
[evaluation]
split = "held-out"
shape = "short"
seed = 7
conversations_per_task = 2
"#;

fn make(recipe: &Recipe, folder: &Path, begin: &mut dyn FnMut(&str) -> Box<dyn Progress>) -> bool {
    let workshop = Workshop::open(recipe, folder, &device()).unwrap();
    workshop.make(&mut Watch { begin, stop: &AtomicBool::new(false) }).unwrap().is_some()
}

/// All files of a model, by name.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut open = vec![folder.to_owned()];
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(&next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else {
                let name = path.strip_prefix(folder).unwrap().to_string_lossy().into_owned();
                found.insert(name, fs::read(&path).unwrap());
            }
        }
    }
    found
}

/// Wants to stop after so many steps.
struct Impatient(u64);

impl Progress for Impatient {
    fn step(&mut self, _: &StepReport<'_>) {
        self.0 = self.0.saturating_sub(1);
    }

    fn stop_requested(&self) -> bool {
        self.0 == 0
    }
}

#[test]
fn the_same_recipe_makes_the_same_bytes_however_often_it_is_stopped() {
    let recipe = Recipe::parse(TINY).unwrap();
    let (once, often) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut phases = Vec::new();
    assert!(make(&recipe, once.path(), &mut |phase| {
        phases.push(phase.to_owned());
        Box::new(Silent)
    }));
    assert_eq!(phases, ["base", "chat", "code", "summarize", FALLBACK, ROUTER]);
    let mut stops = 0;
    while !make(&recipe, often.path(), &mut |_| Box::new(Impatient(2))) {
        stops += 1;
        assert!(stops < 60);
    }
    assert!(stops > 6, "{stops}");
    let (once, often) = (files(&once.path().join("model")), files(&often.path().join("model")));
    assert_eq!(once.keys().collect::<Vec<_>>(), often.keys().collect::<Vec<_>>());
    for (name, bytes) in &once {
        assert!(*bytes == often[name], "{name} differs");
    }
}

#[test]
fn what_it_makes_is_a_model_with_heads_that_can_be_examined() {
    let recipe = Recipe::parse(TINY).unwrap();
    let folder = tempfile::tempdir().unwrap();
    assert!(make(&recipe, folder.path(), &mut |_| Box::new(Silent)));
    let path = folder.path().join("model");
    let names: Vec<_> =
        Heads::open(&path).unwrap().list().unwrap().into_iter().map(|head| head.name).collect();
    assert_eq!(names, ["chat", "code", ROUTER, "summarize", FALLBACK]);

    let model = Model::open(&path, &device().without_autodiff()).unwrap();
    let model = model.with_heads(HeadPoolConfig::patient()).unwrap();
    let examination = Examination { model: &model, plan: &recipe.evaluation, kept: KvType::F32 };
    let report = examination.hold(&mut |_| {}).unwrap();
    // The model's own layers, three heads and the fallback.
    assert_eq!(report.cells.len(), 5 * Task::ALL.len());
    assert!(report.cells.iter().all(|cell| cell.score.asked > 0));
    let asked: usize = Task::ALL.iter().map(|task| report.score("chat", *task).unwrap().asked).sum();
    assert_eq!(report.router.unwrap().asked, asked);
    // Untrained as it is, it has learnt how often pieces come.
    assert!(report.perplexity < 300.0, "{}", report.perplexity);
    for naive in [false, true] {
        let score = examination.persistence("chat", 2, 12, 96, naive).unwrap();
        assert!(score.asked >= 2);
    }

    let other = Recipe { seed: 6, ..recipe };
    let refused = Workshop::open(&other, folder.path(), &device()).unwrap_err().to_string();
    assert!(refused.contains("recipe.toml") && refused.contains("another folder"), "{refused}");
}

#[test]
fn mistakes_in_a_recipe_are_named() {
    for (right, wrong, named) in [
        ("seed = 5", "seed = 5\nsteps = 3", "steps"),
        ("split = \"held-out\"", "split = \"all\"", "held-out"),
        ("pieces = 400", "pieces = 40", "tokenizer.pieces is 40"),
        ("trunk_layers = 2", "trunk_layers = 3", "architecture.trunk_layers is 3"),
        ("prompt_weight = 0.15", "prompt_weight = 1.5", "base.prompt_weight is 1.5"),
        ("learning_rate = 1e-2", "learning_rate = 0", "router.learning_rate"),
        ("tokens = 2000", "tokens = 0", "base.stages: number 1"),
        ("rank = 8", "rank = 0", "fallback.rank"),
        ("tasks = [\"chat\", \"code\", \"summarize\"]", "tasks = [\"draw\"]", "draw"),
    ] {
        assert!(TINY.contains(right), "{right}");
        let reason = Recipe::parse(&TINY.replacen(right, wrong, 1)).unwrap_err();
        assert!(reason.contains(named), "{wrong}: {reason}");
    }
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/pocket/recipe.toml");
    Recipe::open(shipped).unwrap();
}
