//! A reference implementation of models in plain loops over f64 that can be checked against the papers.
//!
//! Nothing is cached as in the library: keys are stored before their rotation and rotated anew for every query, and a
//! query sees what its [`Step`] lists, whatever came before. So caches that evict, hide, move and fork are compared
//! with this replay.

// Each test that includes this module uses another part of it.
#![allow(dead_code)]

mod arithmetic;
mod attention;
mod delta;
mod network;

use std::path::Path;
use std::sync::Arc;

use attention::Stored;
use network::{Mixer, Network, Noise};

/// A token that went through the model, and what it saw.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    pub token: u32,
    /// The position of its own query and key.
    pub position: usize,
    /// The steps before it whose keys its query met, in any order. Its own key is always met and not listed. Layers
    /// with a window leave out those whose position is too far back.
    pub sees: Vec<Met>,
    /// The step whose state recurrent layers continue from, or `None` to start from nothing. Mostly the previous step,
    /// but another one after a fork or a rebuilt state.
    pub after: Option<usize>,
}

/// A key that a query meets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Met {
    pub step: usize,
    /// Its position at that moment.
    pub position: usize,
    /// Its positions before it was moved, first to last. They matter to [`Naive::half`] alone.
    pub before: Vec<usize>,
}

impl Met {
    /// A key that has never moved.
    pub fn unmoved(step: usize, position: usize) -> Self {
        Self { step, position, before: Vec::new() }
    }
}

impl Step {
    /// An undisturbed sequence: every token sees all before it, at consecutive positions.
    pub fn causal(tokens: &[u32]) -> Vec<Self> {
        let step = |(at, &token): (usize, &u32)| Self {
            token,
            position: at,
            sees: (0..at).map(|earlier| Met::unmoved(earlier, earlier)).collect(),
            after: at.checked_sub(1),
        };
        tokens.iter().enumerate().map(step).collect()
    }
}

/// A model and the steps it went through.
#[derive(Debug, Clone)]
pub struct Naive {
    network: Arc<Network>,
    histories: Vec<History>,
    steps: usize,
    stored: Stored,
}

/// The data of one layer for every step.
#[derive(Debug, Clone)]
enum History {
    Attention(Vec<attention::Kept>),
    /// `None` for a state that was dropped.
    Delta(Vec<Option<delta::State>>),
}

impl Naive {
    /// Reads a folder with a `config.json` and a `model.safetensors` of f32: llama, mistral, qwen3 or qwen3_5_text.
    pub fn open(fixture: &Path) -> Self {
        Self::over(Arc::new(Network::read(fixture, Noise::default())))
    }

    /// Reads the same model with relative errors of its weights as large as f32 rounding: the deviation of its logits
    /// from the exact ones shows the effect of rounding.
    pub fn rounded(fixture: &Path, seed: u32) -> Self {
        let noise = Noise { size: f64::from(f32::EPSILON), seed };
        Self::over(Arc::new(Network::read(fixture, noise)))
    }

    /// Returns a fresh model that stores keys and values in half precision. A key that moves is rounded again at every
    /// position.
    pub fn half(&self) -> Self {
        Self { stored: Stored::Half, ..self.fresh() }
    }

    /// Returns the same with numbers rounded the other way where f32 cannot tell which half-precision number is nearer.
    pub fn half_other_way(&self) -> Self {
        Self { stored: Stored::HalfOtherWay, ..self.fresh() }
    }

    fn over(network: Arc<Network>) -> Self {
        let history = |mixer: &Mixer| match mixer {
            Mixer::Attention(_) => History::Attention(Vec::new()),
            Mixer::Delta(_) => History::Delta(Vec::new()),
        };
        let histories = network.layers.iter().map(|layer| history(&layer.mixer)).collect();
        Self { network, histories, steps: 0, stored: Stored::Exact }
    }

    /// Returns the same model before its first step.
    pub fn fresh(&self) -> Self {
        Self { stored: self.stored, ..Self::over(self.network.clone()) }
    }

    /// Returns the number of steps, which is the index of the next one.
    pub fn len(&self) -> usize {
        self.steps
    }

    pub fn vocab_size(&self) -> usize {
        self.network.embedding.rows.len()
    }

    /// Returns the logits after each of some steps, computed from scratch.
    pub fn logits(&self, steps: &[Step]) -> Vec<Vec<f64>> {
        let mut fresh = self.fresh();
        steps.iter().map(|step| fresh.push(step)).collect()
    }

    /// Takes one more step and returns the logits after it. Computes only its own row, and the rotations of earlier
    /// keys.
    pub fn push(&mut self, step: &Step) -> Vec<f64> {
        let index = self.steps;
        for &Met { step: earlier, .. } in &step.sees {
            assert!(earlier < index, "step {index} sees step {earlier}, which is not before it");
        }
        if let Some(after) = step.after {
            assert!(after < index, "step {index} continues after step {after}, which is not before it");
        }
        let network = &self.network;
        let own = Met::unmoved(index, step.position);
        let seen: Vec<attention::Seen> =
            step.sees.iter().chain([&own]).map(|met| network.rope.seen(met, self.stored)).collect();
        let mut hidden = network.embedding.rows[step.token as usize].clone();
        for (layer, history) in network.layers.iter().zip(&mut self.histories) {
            let x = layer.mixer_norm.of(&hidden);
            let mixed = match (&layer.mixer, history) {
                (Mixer::Attention(attention), History::Attention(kept)) => {
                    kept.push(attention.keep(&x, self.stored));
                    attention.read(&x, kept, &seen)
                }
                (Mixer::Delta(delta), History::Delta(states)) => {
                    let before = step.after.map(|after| {
                        states[after]
                            .as_ref()
                            .unwrap_or_else(|| panic!("the state after step {after} was forgotten"))
                    });
                    let (read, state) = delta.step(&x, before);
                    states.push(Some(state));
                    read
                }
                _ => unreachable!("histories are made by the kinds of the layers"),
            };
            arithmetic::add(&mut hidden, &mixed);
            let x = layer.feed_forward_norm.of(&hidden);
            arithmetic::add(&mut hidden, &layer.feed_forward.of(&x));
        }
        self.steps += 1;
        let unembedding = network.unembedding.as_ref().unwrap_or(&network.embedding);
        unembedding.times(&network.norm.of(&hidden))
    }

    /// Drops recurrent states after steps that nothing will continue from. A state takes kilobytes per layer, which is
    /// too much for many thousands of steps.
    pub fn forget_states(&mut self, still_needed: impl Fn(usize) -> bool) {
        for history in &mut self.histories {
            if let History::Delta(states) = history {
                for (_, state) in states.iter_mut().enumerate().filter(|(step, _)| !still_needed(*step)) {
                    *state = None;
                }
            }
        }
    }
}

/// Returns the largest difference of two rows of logits, as a fraction of the range of the expected ones.
pub fn deviation(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len(), "logits of different vocabularies");
    let (lowest, highest) = expected
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), &logit| (low.min(logit), high.max(logit)));
    let differences =
        found.iter().zip(expected).map(|(&found, expected)| (f64::from(found) - expected).abs());
    // A NaN counts as infinite; a comparison would overlook it.
    let worst = differences.fold(0.0, |worst: f64, difference| {
        worst.max(if difference.is_nan() { f64::INFINITY } else { difference })
    });
    worst / (highest - lowest)
}
