//! Compares training with PyTorch's on the same data: see `make_training.py`.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that fails here should say so")]

mod support;

use firebox_train::{Record, Run, Settings, Silent, Source, TrainError};
use serde::Deserialize;
use std::collections::BTreeMap;

use support::{Rows, Toy, device, fixture, run};

#[derive(Deserialize)]
struct Expected {
    settings: Settings,
    inputs: Vec<Vec<Vec<f32>>>,
    targets: Vec<Vec<i64>>,
    losses: Vec<f64>,
    norms: Vec<f64>,
    rates: Vec<f64>,
    r#final: BTreeMap<String, Vec<f32>>,
}

struct Given(Vec<Rows>);

impl Source for Given {
    type Batch = Rows;

    fn len(&mut self, _: u64) -> usize {
        self.0.len()
    }

    fn batch(&mut self, _: u64, index: usize) -> Result<Rows, TrainError> {
        Ok(self.0[index].clone())
    }

    fn held_out(&mut self, _: usize) -> Result<Rows, TrainError> {
        unreachable!("nothing is held out")
    }
}

/// Optimizer, schedule, clipping and accumulation.
#[test]
fn losses_norms_and_weights_are_those_of_pytorch() {
    let text = std::fs::read_to_string(fixture("toy/expected.json")).unwrap();
    let expected: Expected = serde_json::from_str(&text).unwrap();
    let rows = expected.inputs.iter().zip(&expected.targets);
    let mut source = Given(
        rows.map(|(inputs, targets)| Rows { inputs: inputs.concat(), targets: targets.clone() }).collect(),
    );
    let folder = tempfile::tempdir().unwrap();
    let mut folder_run = Run::create(folder.path().join("run"), expected.settings).unwrap();
    let toy = Toy::load(&device(), &fixture("toy/initial.safetensors"));
    let trained = run(toy, &mut source, &mut folder_run, &mut Silent).unwrap();

    let metrics = std::fs::read_to_string(folder_run.folder().join("metrics.jsonl")).unwrap();
    let records: Vec<Record> = metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(records.len(), expected.losses.len());
    let mut worst = [0.0f64; 2];
    for (at, record) in records.iter().enumerate() {
        assert!((record.learning_rate - expected.rates[at]).abs() < 1e-15, "step {at}");
        worst[0] = worst[0].max((record.loss - expected.losses[at]).abs());
        worst[1] = worst[1].max((record.gradient_norm / expected.norms[at] - 1.0).abs());
    }
    // Some steps have to be clipped and others not, or half of it is not tested.
    let clipped = expected.norms.iter().filter(|&&norm| norm > 0.4).count();
    assert!(clipped > 0);
    let weights = trained.network.weights();
    let mut furthest = 0.0f32;
    for (name, expected) in &expected.r#final {
        for (found, expected) in weights[name.as_str()].iter().zip(expected) {
            furthest = furthest.max((found - expected).abs());
        }
    }
    let found = format!("loss {:e}, norm {:e}, weight {furthest:e}", worst[0], worst[1]);
    assert!(worst[0] < 1e-5 && worst[1] < 1e-4 && furthest < 1e-4, "{found}");
    println!("furthest from PyTorch: {found}");
}
