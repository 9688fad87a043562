//! A small network, and data for it.

#![allow(dead_code, reason = "every test file uses its own part")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use burn::Tensor;
use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Distribution, Int, TensorData};
use firebox_train::{Network, Progress, Run, Source, TrainError, Trained, train};

/// Two layers with a norm between them, as `make_training.py` has it.
#[derive(Module, Debug)]
pub struct Toy {
    first: Param<Tensor<2>>,
    bias: Param<Tensor<1>>,
    norm: Param<Tensor<1>>,
    second: Param<Tensor<2>>,
    /// Standard deviation of what the input is multiplied by. It comes from the process's one generator: trainings with
    /// noise need a process of their own.
    noise: f64,
}

#[derive(Debug, Clone)]
pub struct Rows {
    pub inputs: Vec<f32>,
    pub targets: Vec<i64>,
}

impl Toy {
    pub const INPUTS: usize = 6;

    /// Weights that depend on nothing but their places.
    pub fn new(device: &Device, noise: f64) -> Self {
        let matrix = |rows: usize, columns: usize, by: f32| {
            let values = (0..rows * columns).map(|at| (at as f32 * by).sin() * 0.4).collect::<Vec<_>>();
            Param::from_data(TensorData::new(values, [rows, columns]), device)
        };
        let vector = |value: f32| Param::from_data(TensorData::new(vec![value; 10], [10]), device);
        Self {
            first: matrix(Self::INPUTS, 10, 1.7),
            bias: vector(0.0),
            norm: vector(1.0),
            second: matrix(10, 4, 2.3),
            noise,
        }
    }

    pub fn load(device: &Device, path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let data = |name: &str| {
            let tensor = file.tensor(name).unwrap();
            TensorData::from_bytes_vec(tensor.data().to_vec(), tensor.shape().to_vec(), DType::F32)
        };
        Self {
            first: Param::from_data(data("first"), device),
            bias: Param::from_data(data("bias"), device),
            norm: Param::from_data(data("norm"), device),
            second: Param::from_data(data("second"), device),
            noise: 0.0,
        }
    }

    pub fn frozen(mut self) -> Self {
        self.first = self.first.set_require_grad(false);
        self
    }

    pub fn weights(&self) -> BTreeMap<&'static str, Vec<f32>> {
        let vector = |tensor: Tensor<1>| tensor.into_data().iter::<f32>().collect();
        BTreeMap::from([
            ("first", vector(self.first.val().inner().reshape([-1]))),
            ("bias", vector(self.bias.val().inner())),
            ("norm", vector(self.norm.val().inner())),
            ("second", vector(self.second.val().inner().reshape([-1]))),
        ])
    }
}

impl Network for Toy {
    type Batch = Rows;

    fn loss(&self, batch: &Rows) -> Result<(Tensor<1>, usize), TrainError> {
        let device = self.first.val().device();
        let rows = batch.targets.len();
        let inputs = TensorData::new(batch.inputs.clone(), [rows, Self::INPUTS]);
        let inputs = Tensor::<2>::from_data(inputs, &device);
        let mut hidden = inputs.clone().matmul(self.first.val()) + self.bias.val().unsqueeze();
        if self.noise > 0.0 && device.is_autodiff() {
            // Several uses of one weight, whose gradients have to be added up in one order.
            for _ in 0..3 {
                let spread = Distribution::Normal(0.0, self.noise);
                let noise = Tensor::random([rows, Self::INPUTS], spread, &device);
                hidden = hidden + (noise * inputs.clone()).matmul(self.first.val());
            }
        }
        let hidden = hidden.tanh();
        let scale = hidden.clone().square().mean_dim(1).add_scalar(1e-6).sqrt().recip();
        let hidden = hidden * scale * self.norm.val().unsqueeze();
        let logits = hidden.matmul(self.second.val());
        let targets = TensorData::new(batch.targets.clone(), [rows, 1]);
        let targets = Tensor::<2, Int>::from_data(targets, &device);
        let picked = burn::tensor::activation::log_softmax(logits, 1).gather(1, targets);
        Ok((picked.mean().neg(), rows))
    }
}

/// Rows that are made up from their epoch and index; every fourth batch of an epoch is another length.
#[derive(Debug, Default)]
pub struct MadeUp {
    /// Makes every evaluation worse than the one before.
    pub worsening: bool,
    /// A batch that is no number.
    pub poisoned: Option<(u64, usize)>,
    /// Makes every evaluation NaN.
    pub blind: bool,
}

fn rows(seed: u64, count: usize) -> Rows {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let inputs: Vec<f32> = (0..count * Toy::INPUTS).map(|_| next()).collect();
    let label = |row: &[f32]| i64::from(row[0] > row[1]) + 2 * i64::from(row[2] * row[3] > 0.0);
    let targets = inputs.chunks(Toy::INPUTS).map(label).collect();
    Rows { inputs, targets }
}

impl Source for MadeUp {
    type Batch = Rows;

    fn len(&mut self, epoch: u64) -> usize {
        7 + epoch as usize % 2
    }

    fn batch(&mut self, epoch: u64, index: usize) -> Result<Rows, TrainError> {
        let mut rows = rows(1 + epoch * 1000 + index as u64, 5 + index % 4);
        if self.poisoned == Some((epoch, index)) {
            rows.inputs[0] = f32::NAN;
        }
        Ok(rows)
    }

    fn held_out_len(&self) -> usize {
        3
    }

    fn held_out(&mut self, index: usize) -> Result<Rows, TrainError> {
        let mut rows = rows(1_000_000 + index as u64, 6);
        if self.worsening {
            // The targets are other ones than in training, so learning makes the evaluation worse.
            rows.targets.iter_mut().for_each(|target| *target = (*target + 1) % 4);
        }
        if self.blind {
            rows.inputs[0] = f32::NAN;
        }
        Ok(rows)
    }
}

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

pub fn device() -> Device {
    Device::flex().autodiff()
}

/// Trains the toy in a run that is not interrupted.
pub fn run(
    network: Toy,
    source: &mut impl Source<Batch = Rows>,
    run: &mut Run,
    progress: &mut dyn Progress,
) -> Result<Trained<Toy>, TrainError> {
    train(network, source, run, progress, &AtomicBool::new(false))
}
