//! The loop.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use burn::optim::{GradientsAccumulator, GradientsParams};

use crate::checkpoint::{Best, Position};
use crate::ending::Ending;
use crate::error::TrainError;
use crate::metrics::{Metrics, Record};
use crate::network::{Network, Source};
use crate::optimizer::{Optimizer, clipping, global_norm};
use crate::parameters::{Parameter, number, trainable};
use crate::progress::{Evaluation, Progress, Start, StepReport};
use crate::run::Run;

/// The result of a run.
#[derive(Debug, Clone)]
pub struct Trained<N> {
    /// The network as it was last. For the best one, see [`Run::restore`].
    pub network: N,
    /// Where the run has come to.
    pub position: Position,
    /// Why it is over.
    pub ending: Ending,
}

/// Trains a network until the run's end, or until `stop` is set; then after the step, with a checkpoint.
///
/// Goes on from the run's last checkpoint if it has one. `network` then has to be like the one that the run was begun with;
/// its trainable weights are replaced, the others have to be the same. However often a run ends before its end, by `stop`, `kill -9` or a loss of
/// power, going on gives the bits that it would have had without.
pub fn train<N: Network, S: Source<Batch = N::Batch>>(
    network: N,
    source: &mut S,
    run: &mut Run,
    progress: &mut dyn Progress,
    stop: &AtomicBool,
) -> Result<Trained<N>, TrainError> {
    let (mut trainer, torn) = Trainer::begin(network, source, run)?;
    let steps = trainer.run.settings().steps;
    let count = |parameter: &Parameter| parameter.shape.iter().product::<usize>() as u64;
    progress.started(&Start {
        step: trainer.position.step,
        steps,
        trainable: trainer.parameters.iter().map(count).sum(),
        torn,
    });
    let ending = trainer.train(progress, stop)?;
    progress.finished(ending);
    Ok(Trained { network: trainer.network, position: trainer.position, ending })
}

struct Trainer<'a, N, S> {
    network: N,
    source: &'a mut S,
    run: &'a mut Run,
    parameters: Vec<Parameter>,
    optimizer: Optimizer,
    position: Position,
    metrics: Metrics,
    /// The step of the last checkpoint.
    saved: u64,
}

impl<'a, N: Network, S: Source<Batch = N::Batch>> Trainer<'a, N, S> {
    fn begin(
        mut network: N,
        source: &'a mut S,
        run: &'a mut Run,
    ) -> Result<(Self, Vec<PathBuf>), TrainError> {
        let parameters = trainable(&network)?;
        run.settings().precision.check(&network)?;
        let mut optimizer = Optimizer::new(&run.settings().optimizer);
        let (checkpoint, torn) = run.latest()?;
        let mut position = Position::default();
        if let Some(checkpoint) = &checkpoint {
            network = checkpoint.network(network)?;
            checkpoint.optimizer(&network, &mut optimizer)?;
            position = checkpoint.position;
        }
        let metrics = run.metrics(position.step)?;
        if checkpoint.is_none() {
            // So that the run does not depend on who resumes it beginning with the same weights.
            run.save(&network, &parameters, &optimizer, &position)?;
        }
        let saved = position.step;
        Ok((Self { network, source, run, parameters, optimizer, position, metrics, saved }, torn))
    }

    fn train(&mut self, progress: &mut dyn Progress, stop: &AtomicBool) -> Result<Ending, TrainError> {
        let settings = self.run.settings().clone();
        let ending = loop {
            if settings.patience.is_some_and(|patience| self.position.stale >= patience) {
                break Ending::NoBetter;
            }
            if self.position.step >= settings.steps {
                break Ending::Completed;
            }
            if stop.load(Ordering::Relaxed) || progress.stop_requested() {
                break Ending::Stopped;
            }
            let mut record = self.step()?;
            let step = record.step;
            let last = step == settings.steps;
            let evaluation = match self.source.held_out_len() {
                held_out if held_out > 0 && (last || step.is_multiple_of(settings.evaluate_every)) => {
                    Some(self.evaluate(held_out)?)
                }
                _ => None,
            };
            record.held_out_loss = evaluation.map(|evaluation| evaluation.loss);
            progress.step(&StepReport { record: &record, steps: settings.steps, epoch: self.position.epoch });
            self.metrics.push(record)?;
            if let Some(evaluation) = &evaluation {
                progress.evaluated(evaluation);
            }
            let best = evaluation.is_some_and(|evaluation| evaluation.best);
            if best || step.is_multiple_of(settings.checkpoint_every) {
                self.save()?;
            }
        };
        if self.saved != self.position.step {
            self.save()?;
        }
        self.run.plot(self.metrics.records())?;
        Ok(ending)
    }

    fn save(&mut self) -> Result<(), TrainError> {
        self.run.save(&self.network, &self.parameters, &self.optimizer, &self.position)?;
        self.saved = self.position.step;
        self.run.plot(self.metrics.records())
    }

    /// Takes a step.
    fn step(&mut self) -> Result<Record, TrainError> {
        let began = Instant::now();
        let settings = self.run.settings();
        let (step, steps, clip) = (self.position.step, settings.steps, settings.clip);
        let learning_rate = settings.schedule.rate(step, steps);
        let diverged = |what, value| TrainError::Diverged { step, what, value, learning_rate };
        let (accumulate, precision) = (settings.accumulate, settings.precision);
        let seed = seed_of(settings.seed, step);
        for device in self.network.devices() {
            device.seed(seed);
        }

        let network = precision.of(&self.network);
        let mut accumulator = GradientsAccumulator::new();
        let (mut losses, mut targets) = (0.0, 0);
        for _ in 0..accumulate {
            let batch = self.next_batch()?;
            let (loss, count) = network.loss(&batch)?;
            if count == 0 {
                let Position { epoch, batch, .. } = self.position;
                return Err(TrainError::NoTargets { epoch, batch: batch - 1 });
            }
            let value = number(loss.clone().inner())?;
            if !value.is_finite() {
                return Err(diverged("the loss", value));
            }
            losses += value * count as f64;
            targets += count;
            // Batches weigh as much as they have targets, so that the step is that of one large batch.
            let loss = if accumulate == 1 { loss } else { loss.mul_scalar(count as f64) };
            let gradients = GradientsParams::from_grads(loss.backward(), &network);
            accumulator.accumulate(&network, gradients);
        }
        let gradients = accumulator.grads();
        let mean = if accumulate == 1 { 1.0 } else { 1.0 / targets as f64 };
        let gradient_norm = global_norm(&network, &gradients)? * mean;
        if !gradient_norm.is_finite() {
            return Err(diverged("the gradients' norm", gradient_norm));
        }
        drop(network);
        let factor = mean * clipping(gradient_norm, clip);
        // A clone: the step takes the network whole, and an error before its end must not lose it.
        self.network = self.optimizer.step(self.network.clone(), gradients, learning_rate, factor);
        self.position.step += 1;
        Ok(Record {
            step: self.position.step,
            loss: losses / targets as f64,
            learning_rate,
            gradient_norm,
            tokens_per_second: targets as f64 / began.elapsed().as_secs_f64().max(1e-9),
            held_out_loss: None,
        })
    }

    fn next_batch(&mut self) -> Result<N::Batch, TrainError> {
        if self.position.batch >= self.source.len(self.position.epoch) {
            self.position.epoch += 1;
            self.position.batch = 0;
            if self.source.len(self.position.epoch) == 0 {
                return Err(TrainError::NoData {
                    what: format!("epoch {}", self.position.epoch),
                    reason: "it has no batches; look at what was skipped".into(),
                });
            }
        }
        let batch = self.source.batch(self.position.epoch, self.position.batch)?;
        self.position.batch += 1;
        Ok(batch)
    }

    /// The mean loss over what is held out.
    fn evaluate(&mut self, held_out: usize) -> Result<Evaluation, TrainError> {
        let network = self.run.settings().precision.of(&self.network).valid();
        let (mut losses, mut targets) = (0.0, 0);
        for index in 0..held_out {
            let (loss, count) = network.loss(&self.source.held_out(index)?)?;
            if count > 0 {
                losses += number(loss)? * count as f64;
                targets += count;
            }
        }
        if targets == 0 {
            let reason = "no sample of it has a target".into();
            return Err(TrainError::NoData { what: "what is held out".into(), reason });
        }
        let loss = losses / targets as f64;
        let step = self.position.step;
        // A NaN loss is never the best: no later loss would compare as less.
        let best = loss.is_finite() && self.position.best.is_none_or(|best| loss < best.loss);
        if best {
            self.position.best = Some(Best { step, loss });
            self.position.stale = 0;
        } else {
            self.position.stale += 1;
        }
        Ok(Evaluation { step, loss, best })
    }
}

/// A seed for every step, so that a step that is taken again has the same random numbers.
fn seed_of(seed: u64, step: u64) -> u64 {
    // The finalizer of SplitMix64: neighbouring steps get seeds that have nothing in common.
    let mut mixed = seed.wrapping_add((step + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
