//! Samples, with what a frozen trunk made of them.

use std::path::PathBuf;

use burn::tensor::{Device, Tensor, TensorData};
use firebox_model::{Decoder, Fed, Tower};

use crate::boundary::{BoundaryCache, BoundaryKey, Stored};
use crate::error::TrainError;
use crate::examples::Examples;
use crate::format::Sample;
use crate::lesson::{Goal, Lesson, integers};
use crate::network::Source;
use crate::packing::pack;

/// The samples of a file. For a head, they come as what the trunk made of their tokens, computed once.
pub struct Corpus {
    examples: Examples,
    states: Option<BoundaryCache>,
}

impl Corpus {
    /// Samples whose tokens a whole model reads.
    pub fn of_tokens(examples: Examples) -> Self {
        Self { examples, states: None }
    }

    /// Samples for heads of a model from layer `split` on. What the trunk makes of them is computed as far as it is not
    /// in `folder` already. `trunk` is the trunk's hash.
    pub fn of_states(
        mut examples: Examples,
        folder: impl Into<PathBuf>,
        decoder: &Decoder,
        trunk: &str,
        split: usize,
        stored: Stored,
        mut on_sample: impl FnMut(usize, usize),
    ) -> Result<Self, TrainError> {
        let key = BoundaryKey {
            trunk: trunk.to_owned(),
            samples: examples.fingerprint(),
            layer: split,
            width: decoder.config().hidden_size,
            stored,
        };
        let count = examples.len();
        let mut at = 0;
        let states = BoundaryCache::fill(
            folder,
            key,
            count,
            |sample| Ok(examples.sample(sample)?.tokens),
            |tokens| {
                on_sample(at, count);
                at += 1;
                let states = decoder.hidden_after(tokens, split).map_err(TrainError::network)?;
                states
                    .try_into_vec_as::<f32>()
                    .map_err(|error| TrainError::Readback { reason: error.to_string() })
            },
        )?;
        Ok(Self { examples, states: Some(states) })
    }

    /// The samples.
    pub fn examples(&self) -> &Examples {
        &self.examples
    }

    /// Some samples, of which the targets are to be learned.
    fn lesson(&mut self, samples: &[usize], device: &Device) -> Result<Lesson, TrainError> {
        let (mut tokens, mut lengths) = (Vec::new(), Vec::with_capacity(samples.len()));
        let (mut rows, mut targets) = (Vec::new(), Vec::new());
        for &index in samples {
            let sample = self.examples.sample(index)?;
            let first = tokens.len();
            for target in learned(&sample) {
                rows.push((first + target - 1) as u32);
                targets.push(sample.tokens[target]);
            }
            lengths.push(sample.tokens.len());
            tokens.extend(sample.tokens);
        }
        let fed = match &self.states {
            Some(cache) => {
                let states: Vec<f32> = samples.iter().flat_map(|&index| cache.states(index)).collect();
                Fed::States(rows_of(states, tokens.len(), device))
            }
            None => Fed::Tokens(tokens),
        };
        Ok(Lesson { fed, lengths, rows, goal: Goal::Tokens(targets) })
    }

    /// What the trunk made of the token before the last answer of some samples, all of which are `label`.
    fn questions(&mut self, samples: &[usize], label: u32, device: &Device) -> Result<Lesson, TrainError> {
        let Some(cache) = &self.states else {
            let reason = "a classifier reads what a trunk made of the samples".into();
            return Err(TrainError::NoData { what: "states".into(), reason });
        };
        let mut states = Vec::new();
        for &index in samples {
            let sample = self.examples.sample(index)?;
            let all = cache.states(index);
            let width = all.len() / sample.tokens.len().max(1);
            let row = last_question(&sample);
            states.extend_from_slice(&all[row * width..(row + 1) * width]);
        }
        let count = samples.len();
        Ok(Lesson {
            fed: Fed::States(rows_of(states, count, device)),
            lengths: vec![1; count],
            rows: (0..count as u32).collect(),
            goal: Goal::Tokens(vec![label; count]),
        })
    }
}

/// The targets of a sample that have a token before them.
fn learned(sample: &Sample) -> impl Iterator<Item = usize> {
    (1..sample.tokens.len()).filter(|&at| sample.learn[at])
}

/// The token after which the last answer begins.
fn last_question(sample: &Sample) -> usize {
    let end = sample.learn.iter().rposition(|&learn| learn).unwrap_or(0);
    let start = sample.learn[..end].iter().rposition(|&learn| !learn);
    start.unwrap_or(0)
}

fn rows_of(states: Vec<f32>, rows: usize, device: &Device) -> Tensor<2> {
    let width = states.len() / rows.max(1);
    Tensor::from_data(TensorData::new(states, [rows, width]), device)
}

/// What is to be learned of a subject.
#[derive(Debug)]
pub enum Aim {
    /// The targets of its samples.
    Targets,
    /// What a teacher would say in their place.
    Teacher(Box<Tower>),
    /// That it is this one.
    Label(u32),
}

/// One of the things to learn.
pub struct Subject {
    /// To learn from.
    pub corpus: Corpus,
    /// To see what was learned.
    pub held_out: Option<Corpus>,
    /// What.
    pub aim: Aim,
}

impl Subject {
    fn lesson(&mut self, samples: &[usize], held_out: bool, device: &Device) -> Result<Lesson, TrainError> {
        let corpus = match &mut self.held_out {
            Some(other) if held_out => other,
            _ => &mut self.corpus,
        };
        match &self.aim {
            Aim::Targets => corpus.lesson(samples, device),
            Aim::Label(label) => corpus.questions(samples, *label, device),
            Aim::Teacher(teacher) => {
                let lesson = corpus.lesson(samples, device)?;
                let hidden =
                    teacher.hidden(lesson.fed.clone(), &lesson.lengths).map_err(TrainError::network)?;
                let logits = teacher.scored(hidden.select(0, integers(&lesson.rows, device)));
                Ok(Lesson { goal: Goal::Teacher(logits), ..lesson })
            }
        }
    }
}

/// Batches of one subject after the other, in shuffled order.
pub struct Lessons {
    subjects: Vec<Subject>,
    /// Most tokens of a batch.
    budget: usize,
    seed: u64,
    device: Device,
    /// Those of an epoch: a subject and its samples.
    batches: Vec<(usize, Vec<usize>)>,
    epoch: Option<u64>,
    held_out: Vec<(usize, Vec<usize>)>,
}

impl Lessons {
    /// Batches of at most `budget` tokens each.
    pub fn new(subjects: Vec<Subject>, budget: usize, seed: u64, device: &Device) -> Self {
        let held_out = subjects.iter().enumerate().filter_map(|(at, subject)| {
            let lengths = subject.held_out.as_ref()?.examples.lengths();
            Some(pack(&lengths, budget, seed, 0).into_iter().map(move |samples| (at, samples)))
        });
        let held_out = held_out.flatten().collect();
        let device = device.clone().without_autodiff();
        Self { subjects, budget, seed, device, batches: Vec::new(), epoch: None, held_out }
    }

    fn arrange(&mut self, epoch: u64) {
        if self.epoch == Some(epoch) {
            return;
        }
        let each = self.subjects.iter().enumerate().map(|(at, subject)| {
            let packed = pack(&subject.corpus.examples.lengths(), self.budget, self.seed, epoch);
            packed.into_iter().map(move |samples| (at, samples)).collect::<Vec<_>>()
        });
        let all: Vec<_> = each.flatten().collect();
        let order = crate::packing::shuffled(all.len(), self.seed, epoch);
        self.batches = order.into_iter().map(|at| all[at].clone()).collect();
        self.epoch = Some(epoch);
    }
}

impl Source for Lessons {
    type Batch = Lesson;

    fn len(&mut self, epoch: u64) -> usize {
        self.arrange(epoch);
        self.batches.len()
    }

    fn batch(&mut self, epoch: u64, index: usize) -> Result<Lesson, TrainError> {
        self.arrange(epoch);
        let (subject, samples) = &self.batches[index];
        self.subjects[*subject].lesson(samples, false, &self.device)
    }

    fn held_out_len(&self) -> usize {
        self.held_out.len()
    }

    fn held_out(&mut self, index: usize) -> Result<Lesson, TrainError> {
        let (subject, samples) = &self.held_out[index];
        self.subjects[*subject].lesson(samples, true, &self.device)
    }
}
