//! Measures how much each layer of a model contributes to the loss on some samples.

use firebox_kernels::cross_entropy::cross_entropy;
use firebox_model::{Decoder, Input, LogitRows, ModelError, Pass};

use burn::tensor::Tensor;

use crate::error::TrainError;
use crate::format::Sample;
use crate::training_batch::integers;

/// The change of the loss when each layer is left out.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    /// The mean loss over all targets, with every layer.
    pub loss: f64,
    /// The increase of the loss without each layer.
    pub without: Vec<f64>,
    /// The number of targets.
    pub targets: usize,
}

impl Profile {
    /// Where a head could begin: the last layers that together hold so much of all that layers do for these samples, but
    /// no more than half of the layers. Layers that do harm count as doing nothing.
    pub fn split(&self, share: f64) -> usize {
        let all: f64 = self.without.iter().map(|loss| loss.max(0.0)).sum();
        let (layers, mut held) = (self.without.len(), 0.0);
        let least = layers.div_ceil(2);
        for layer in (least..layers).rev() {
            held += self.without[layer].max(0.0);
            if held >= share * all {
                return layer;
            }
        }
        least.min(layers.saturating_sub(1))
    }
}

/// Measures a model on samples. Each goes through the model once, and from every layer on once more without it.
pub fn profile(
    decoder: &Decoder,
    samples: impl IntoIterator<Item = Result<Sample, TrainError>>,
) -> Result<Profile, TrainError> {
    let layers = decoder.layers();
    let (mut loss, mut without, mut targets) = (0.0, vec![0.0; layers], 0);
    for sample in samples {
        let sample = sample?;
        let count = sample.targets();
        if count == 0 {
            continue;
        }
        let (whole, skipped) = losses(decoder, &sample).map_err(TrainError::network)?;
        loss += whole * count as f64;
        without.iter_mut().zip(skipped).for_each(|(sum, loss)| *sum += loss * count as f64);
        targets += count;
    }
    if targets == 0 {
        let reason = "no sample has a target".into();
        return Err(TrainError::NoData { what: "the profile".into(), reason });
    }
    let mean = |sum: f64| sum / targets as f64;
    let loss = mean(loss);
    Ok(Profile { loss, without: without.into_iter().map(|sum| mean(sum) - loss).collect(), targets })
}

/// The mean loss with every layer, and without each.
fn losses(decoder: &Decoder, sample: &Sample) -> Result<(f64, Vec<f64>), ModelError> {
    let mut cache = decoder.cache();
    let mut pass = Pass::begin(decoder, &[Input::new(&sample.tokens, 0, sample.tokens.len())])?;
    let mut without = Vec::with_capacity(decoder.layers());
    // Every layer writes its keys before it reads them, so that a pass that goes ahead without one may use the room of the
    // pass that stays behind.
    cache.reserve(sample.tokens.len())?;
    while pass.next_layer() < decoder.layers() {
        let (mut ahead, mut room) = (pass.clone(), cache.clone());
        ahead.skip(decoder);
        while ahead.next_layer() < decoder.layers() {
            ahead.step(decoder, &mut [&mut room])?;
        }
        without.push(mean_loss(decoder, ahead, sample)?);
        drop(room);
        pass.step(decoder, &mut [&mut cache])?;
    }
    Ok((mean_loss(decoder, pass, sample)?, without))
}

fn mean_loss(decoder: &Decoder, pass: Pass, sample: &Sample) -> Result<f64, ModelError> {
    let learned: Vec<usize> = (1..sample.tokens.len()).filter(|&at| sample.learn[at]).collect();
    let rows: Vec<u32> = learned.iter().map(|&at| at as u32 - 1).collect();
    let targets: Vec<u32> = learned.iter().map(|&at| sample.tokens[at]).collect();
    let logits = pass.logits(decoder, LogitRows::All)?;
    let device = logits.device();
    let logits = logits.select(0, integers(&rows, &device));
    let weights = Tensor::ones([targets.len()], &device);
    let loss = cross_entropy(logits, integers(&targets, &device), weights);
    let loss = loss.try_into_scalar::<f32>();
    loss.map(f64::from).map_err(|error| ModelError::Device { reason: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_holds_what_it_is_asked_to_hold() {
        let profile = |without: &[f64]| Profile { loss: 1.0, without: without.to_vec(), targets: 1 };
        assert_eq!(profile(&[1.0, 0.0, 0.0, 1.0, 2.0, 4.0]).split(0.5), 5);
        assert_eq!(profile(&[1.0, 0.0, 0.0, 1.0, 2.0, 4.0]).split(0.7), 4);
        assert_eq!(profile(&[9.0, 0.0, 0.0, 0.1, 0.1, 0.1]).split(0.5), 3, "no more than half");
        assert_eq!(profile(&[-1.0, 0.0, -3.0, 1.0]).split(0.5), 3, "harm is nothing");
        assert_eq!(profile(&[1.0]).split(0.5), 0);
    }
}
