//! A real decoder learns what PyTorch learns: see `make_training.py`.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that fails here should say so")]

mod support;

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;

use burn::tensor::{Tensor, TensorData};
use firebox_model::{Decoder, Fed, HeadForm, Seeded, Tower};
use firebox_store::{Checkpoint, Dtype};
use firebox_train::{Goal, Record, Run, Settings, Silent, Source, TrainError, TrainingBatch, train};
use serde::Deserialize;

use support::{device, fixture};

#[derive(Deserialize)]
struct Expected {
    losses: Vec<f64>,
    norms: Vec<f64>,
    r#final: BTreeMap<String, Vec<f32>>,
}

/// The settings and batches that both are trained with.
#[derive(Deserialize)]
struct TrainingCase {
    settings: Settings,
    batches: Vec<Vec<Sequence>>,
}

#[derive(Deserialize)]
struct Sequence {
    tokens: Vec<u32>,
    learn: Vec<bool>,
}

struct Given(Vec<TrainingBatch>);

impl Source for Given {
    type Batch = TrainingBatch;

    fn len(&mut self, _: u64) -> usize {
        self.0.len()
    }

    fn batch(&mut self, _: u64, index: usize) -> Result<TrainingBatch, TrainError> {
        Ok(self.0[index].clone())
    }

    fn held_out(&mut self, _: usize) -> Result<TrainingBatch, TrainError> {
        unreachable!("nothing is held out")
    }
}

fn read<T: for<'de> Deserialize<'de>>(name: &str) -> T {
    serde_json::from_str(&std::fs::read_to_string(fixture(name)).unwrap()).unwrap()
}

/// A training batch of tokens, or of what a trunk makes of them.
fn training_batch(batch: &[Sequence], trunk: Option<(&Decoder, usize)>) -> TrainingBatch {
    let (mut tokens, mut rows, mut targets) = (Vec::new(), Vec::new(), Vec::new());
    for sequence in batch {
        for at in (1..sequence.tokens.len()).filter(|&at| sequence.learn[at]) {
            rows.push((tokens.len() + at - 1) as u32);
            targets.push(sequence.tokens[at]);
        }
        tokens.extend(&sequence.tokens);
    }
    let fed = match trunk {
        None => Fed::Tokens(tokens),
        Some((decoder, split)) => {
            let states = batch.iter().map(|sequence| decoder.hidden_after(&sequence.tokens, split).unwrap());
            Fed::States(Tensor::cat(states.collect(), 0))
        }
    };
    let lengths = batch.iter().map(|sequence| sequence.tokens.len()).collect();
    let count = rows.len();
    TrainingBatch { fed, lengths, rows, weights: vec![1.0; count], goal: Goal::Tokens(targets) }
}

/// Trains, and holds every loss, every norm and the weights in the end against PyTorch's.
fn check(tower: Tower, expected: &Expected, settings: Settings, training_batches: Vec<TrainingBatch>) {
    let folder = tempfile::tempdir().unwrap();
    let mut run = Run::create(folder.path().join("run"), settings).unwrap();
    let mut source = Given(training_batches);
    let trained = train(tower, &mut source, &mut run, &mut Silent, &AtomicBool::new(false)).unwrap();
    let metrics = std::fs::read_to_string(run.folder().join("metrics.jsonl")).unwrap();
    let records: Vec<Record> = metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(records.len(), 50);
    let mut worst = [0f64; 2];
    for (at, record) in records.iter().enumerate() {
        worst[0] = worst[0].max((record.loss - expected.losses[at]).abs());
        worst[1] = worst[1].max((record.gradient_norm / expected.norms[at] - 1.0).abs());
    }
    let mut furthest = 0f32;
    for tensor in trained.network.trained().unwrap() {
        let step = (tensor.values.len() / 7).max(1);
        let sampled = tensor.values.iter().step_by(step);
        let expected = &expected.r#final[&tensor.name];
        assert_eq!(sampled.len(), expected.len(), "{}", tensor.name);
        for (found, expected) in sampled.zip(expected) {
            furthest = furthest.max((found - expected).abs());
        }
    }
    println!("furthest from PyTorch: loss {:e}, norm {:e}, weight {furthest:e}", worst[0], worst[1]);
    assert!(worst[0] < 1e-3 && worst[1] < 1e-2 && furthest < 1e-2);
}

#[test]
fn a_whole_model_learns_what_pytorch_learns() {
    let TrainingCase { settings, batches } = read("llama/expected.json");
    let checkpoint = Checkpoint::open(fixture("llama")).unwrap();
    let tower = Tower::whole(&checkpoint, &device()).unwrap();
    let training_batches = batches.iter().map(|batch| training_batch(batch, None)).collect();
    check(tower, &read("llama/expected.json"), settings, training_batches);
}

/// From what the trunk has left, so that the trunk never runs while the head learns.
#[test]
fn a_head_learns_what_pytorch_learns() {
    let TrainingCase { settings, batches } = read("llama/expected.json");
    let checkpoint = Checkpoint::open(fixture("llama")).unwrap();
    let decoder = Decoder::load(&checkpoint, &device().without_autodiff()).unwrap();
    let split = decoder.layers() - 1;
    let seeded = Seeded::new(0);
    // Its unembedding is trained as well, so it has one of its own.
    let own = Unembedding(&checkpoint);
    let tower =
        Tower::head(&checkpoint, Some(&own), &HeadForm::Blocks, None, split, &device(), seeded).unwrap();
    let training_batches =
        batches.iter().map(|batch| training_batch(batch, Some((&decoder, split)))).collect();
    check(tower, &read("llama/expected-head.json"), settings, training_batches);
}

#[derive(Debug)]
struct Unembedding<'a>(&'a Checkpoint);

impl firebox_store::Tensors for Unembedding<'_> {
    fn path(&self) -> &std::path::Path {
        self.0.path()
    }

    fn info(&self, name: &str) -> Option<&firebox_store::TensorInfo> {
        if name == "lm_head.weight" { self.0.info(name) } else { None }
    }

    fn weight(&self, name: &str) -> Result<firebox_store::Weight, firebox_store::StoreError> {
        self.0.weight(name)
    }

    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(std::iter::once("lm_head.weight"))
    }
}

/// Steps a second of a head of a quarter of the layers, from what its trunk has left and through the trunk.
#[test]
#[ignore = "measure: cargo test --release --test decoder -- --ignored --nocapture"]
fn what_the_trunk_has_left_saves_the_trunk() {
    let config = serde_json::json!({
        "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 768,
        "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": true,
    });
    let seeded = Seeded::new(1);
    let folder = tempfile::tempdir().unwrap();
    let whole = Tower::begin(&config, &device(), seeded).unwrap();
    let path = folder.path().join("model");
    firebox_train::export_model(&whole, &config, Dtype::F32, &path).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let decoder = Decoder::load(&checkpoint, &device().without_autodiff()).unwrap();
    let split = 6;
    let head = Tower::head(&checkpoint, None, &HeadForm::Blocks, None, split, &device(), seeded).unwrap();
    let tokens: Vec<u32> = (0..2048u32).map(|at| at * 7919 % 1024).collect();
    let lengths = vec![256; 8];
    let targets = Goal::Tokens(tokens.clone());
    let step = |tower: &Tower, fed: Fed| {
        use firebox_train::Network as _;
        let rows = (0..2048).collect();
        let (lengths, goal) = (lengths.clone(), targets.clone());
        let training_batch = TrainingBatch { fed, lengths, rows, weights: vec![1.0; 2048], goal };
        let began = std::time::Instant::now();
        let (loss, _) = tower.loss(&training_batch).unwrap();
        let _ = loss.backward();
        began.elapsed().as_secs_f64()
    };
    let states: Vec<_> =
        tokens.chunks(256).map(|tokens| decoder.hidden_after(tokens, split).unwrap()).collect();
    let states = Tensor::cat(states, 0).try_into_vec_as::<f32>().unwrap();
    let cached = || {
        let data = TensorData::new(states.clone(), [2048, 256]);
        Fed::States(Tensor::from_data(data, &device().without_autodiff()))
    };
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    for _ in 0..9 {
        times[0].push(step(&head, cached()));
        // A frozen trunk in front that runs at every step, without gradients.
        let began = std::time::Instant::now();
        let states: Vec<_> =
            tokens.chunks(256).map(|tokens| decoder.hidden_after(tokens, split).unwrap()).collect();
        let trunk = began.elapsed().as_secs_f64();
        times[1].push(trunk + step(&head, Fed::States(Tensor::cat(states, 0))));
        times[2].push(step(&whole, Fed::Tokens(tokens.clone())));
    }
    let [cached, frozen, whole] = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    });
    println!(
        "a step takes {:.1} ms; {:.2} times as long through a frozen trunk, {:.2} through one that learns",
        cached * 1e3,
        frozen / cached,
        whole / cached
    );
    assert!(whole / cached > 3.0);
}
