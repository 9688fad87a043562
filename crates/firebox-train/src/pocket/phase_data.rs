//! The training data of a phase of the pocket model: passages in batches, each of them once.

use burn::tensor::{Device, Tensor, TensorData};
use firebox_model::{Fed, Tower};

use super::{Generator, Passage, Scribe, Shape, Split, Task};
use crate::error::TrainError;
use crate::network::Source;
use crate::packing::{pack, shuffled};
use crate::training_batch::{Goal, TrainingBatch, integers};

/// The passages of one phase, packed into batches in the order of training.
#[derive(Debug, Default)]
pub(super) struct PhasePassages {
    passages: Vec<Passage>,
    batches: Vec<Vec<usize>>,
}

impl PhasePassages {
    /// Adds passages of these tasks and shapes, with so many tokens together and as many of every shape. Batches have up
    /// to `budget` tokens.
    pub fn add(&mut self, scribe: &Scribe, text: &Text<'_>, budget: usize) -> Result<(), TrainError> {
        let begin = self.passages.len();
        for (number, shape) in text.shapes.iter().enumerate() {
            let seed = text.seed.wrapping_add(number as u64);
            let mut generator = Generator::new(seed, Split::Train, shape.clone());
            let mut tokens = 0;
            for &task in text.tasks.iter().cycle() {
                if tokens * text.shapes.len() >= text.tokens {
                    break;
                }
                let passage = scribe.write(&generator.conversation(task))?;
                tokens += passage.tokens.len();
                self.passages.push(passage);
            }
        }
        let mut batches = Vec::new();
        let groups: Vec<&[Task]> =
            if text.one_task_per_batch { text.tasks.chunks(1).collect() } else { vec![text.tasks] };
        for tasks in groups {
            let of_group = |at: &usize| tasks.contains(&self.passages[*at].task);
            let places: Vec<usize> = (begin..self.passages.len()).filter(of_group).collect();
            let lengths: Vec<usize> = places.iter().map(|&at| self.passages[at].tokens.len()).collect();
            let packed = pack(&lengths, budget, text.seed, 0);
            batches.extend(
                packed.into_iter().map(|batch| batch.into_iter().map(|at| places[at]).collect::<Vec<_>>()),
            );
        }
        let order = shuffled(batches.len(), text.seed, 1);
        self.batches.extend(order.into_iter().map(|at| std::mem::take(&mut batches[at])));
        Ok(())
    }

    pub fn batches(&self) -> usize {
        self.batches.len()
    }

    fn batch(&self, index: usize) -> Vec<&Passage> {
        self.batches[index].iter().map(|&at| &self.passages[at]).collect()
    }
}

/// The parameters of the generated text.
pub(super) struct Text<'a> {
    pub seed: u64,
    pub tasks: &'a [Task],
    pub shapes: &'a [Shape],
    pub tokens: usize,
    /// Puts only passages of one task into a batch.
    pub one_task_per_batch: bool,
}

/// The passages of a phase, and how the network learns from them.
#[derive(Debug)]
pub(super) struct PhaseData {
    pub passages: PhasePassages,
    /// The weight in the loss of tokens outside the answers that are learned.
    pub prompt_weight: f32,
    /// The model and layer whose inputs the network is trained on, if it does not start from tokens.
    pub trunk: Option<(Tower, usize)>,
    /// Models whose outputs are the targets, by task; for other tasks the targets are the passages' own tokens.
    pub teachers: Vec<(Task, Tower)>,
    pub device: Device,
}

impl Source for PhaseData {
    type Batch = TrainingBatch;

    fn len(&mut self, _: u64) -> usize {
        self.passages.batches()
    }

    fn batch(&mut self, _: u64, index: usize) -> Result<TrainingBatch, TrainError> {
        let passages = self.passages.batch(index);
        let lengths: Vec<usize> = passages.iter().map(|passage| passage.tokens.len()).collect();
        let (mut tokens, mut rows, mut weights, mut targets) = (vec![], vec![], vec![], vec![]);
        for passage in &passages {
            let counts = passage.weights(self.prompt_weight);
            for at in (1..counts.len()).filter(|&at| counts[at] > 0.0) {
                rows.push((tokens.len() + at - 1) as u32);
                weights.push(counts[at]);
                targets.push(passage.tokens[at]);
            }
            tokens.extend_from_slice(&passage.tokens);
        }
        let fed = match &self.trunk {
            None => Fed::Tokens(tokens),
            Some((trunk, split)) => {
                let states = trunk.hidden_before(*split, Fed::Tokens(tokens), &lengths);
                Fed::States(states.map_err(TrainError::network)?)
            }
        };
        let task = passages.first().map(|passage| passage.task);
        let goal = match self.teachers.iter().find(|(of, _)| Some(*of) == task) {
            None => Goal::Tokens(targets),
            Some((_, teacher)) => {
                let hidden = teacher.hidden(fed.clone(), &lengths).map_err(TrainError::network)?;
                Goal::Teacher(teacher.scored(hidden.select(0, integers(&rows, &self.device))))
            }
        };
        Ok(TrainingBatch { fed, lengths, rows, weights, goal })
    }

    fn held_out(&mut self, _: usize) -> Result<TrainingBatch, TrainError> {
        let reason = "what is held out is asked for in conversations".into();
        Err(TrainError::NoData { what: "a phase of the recipe".into(), reason })
    }
}

/// Requests, as a trunk hands them on, and which head each is for: all of them in every batch.
#[derive(Debug)]
pub(super) struct Requests {
    states: Vec<f32>,
    labels: Vec<u32>,
    device: Device,
}

impl Requests {
    /// Of all answers of the passages.
    pub fn new(
        passages: &[Passage],
        trunk: &Tower,
        split: usize,
        device: &Device,
    ) -> Result<Self, TrainError> {
        let mut requests = Self { states: Vec::new(), labels: Vec::new(), device: device.clone() };
        for passage in passages {
            let fed = Fed::Tokens(passage.tokens.clone());
            let states = trunk.hidden_before(split, fed, &[passage.tokens.len()]);
            let states = states.map_err(TrainError::network)?;
            let asked: Vec<u32> =
                passage.answers.iter().map(|answer| answer.tokens.start as u32 - 1).collect();
            let numbers = states.select(0, integers(&asked, device)).try_into_vec_as::<f32>();
            let numbers = numbers.map_err(|error| TrainError::Readback { reason: error.to_string() })?;
            requests.states.extend(numbers);
            requests
                .labels
                .extend(passage.answers.iter().map(|answer| label(answer.kind.route(passage.task))));
        }
        Ok(requests)
    }
}

/// The class of a task.
fn label(task: Task) -> u32 {
    Task::ALL.iter().position(|known| *known == task).unwrap_or(0) as u32
}

impl Source for Requests {
    type Batch = TrainingBatch;

    fn len(&mut self, _: u64) -> usize {
        1
    }

    fn batch(&mut self, _: u64, _: usize) -> Result<TrainingBatch, TrainError> {
        let count = self.labels.len();
        let width = self.states.len() / count.max(1);
        let states = TensorData::new(self.states.clone(), [count, width]);
        Ok(TrainingBatch {
            fed: Fed::States(Tensor::from_data(states, &self.device)),
            lengths: vec![1; count],
            rows: (0..count as u32).collect(),
            weights: vec![1.0; count],
            goal: Goal::Tokens(self.labels.clone()),
        })
    }

    fn held_out(&mut self, _: usize) -> Result<TrainingBatch, TrainError> {
        let reason = "what is held out is asked for in conversations".into();
        Err(TrainError::NoData { what: "the router".into(), reason })
    }
}
