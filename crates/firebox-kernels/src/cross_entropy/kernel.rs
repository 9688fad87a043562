//! The losses and their gradients, row by row.

use rayon::prelude::*;

use crate::simd::{Kernel, LANES, Lanes, dispatch, exp};

/// Elements below which a second thread costs more than it gains.
const PIECE_ELEMENTS: usize = 1 << 15;

/// The target of a loss.
#[derive(Clone, Copy)]
pub(super) enum Target<'a> {
    /// One class index per row.
    Targets(&'a [usize]),
    /// Logits of a teacher.
    Teacher(&'a [f32]),
}

/// Rows of logits and their targets.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub logits: &'a [f32],
    pub vocabulary: usize,
    pub target: Target<'a>,
    /// Factor of all logits.
    pub inverse_temperature: f32,
}

impl<'a> Rows<'a> {
    /// Returns the loss of every row; zero for rows without weight.
    pub fn losses(self, weights: &[f32]) -> Vec<f32> {
        let mut losses = vec![0.0; weights.len()];
        let rows_per_piece = PIECE_ELEMENTS.div_ceil(self.vocabulary.max(1));
        losses.par_chunks_mut(rows_per_piece).zip(weights.par_chunks(rows_per_piece)).enumerate().for_each(
            |(piece, (losses, weights))| {
                dispatch(Losses { rows: self.skip_rows(piece * rows_per_piece), weights, losses });
            },
        );
        losses
    }

    /// Returns the gradient of the logits from those of the losses.
    pub fn gradient(self, loss_grads: &[f32]) -> Vec<f32> {
        let mut gradient = vec![0.0; self.logits.len()];
        let rows_per_piece = PIECE_ELEMENTS.div_ceil(self.vocabulary.max(1));
        let pieces = gradient.par_chunks_mut((rows_per_piece * self.vocabulary).max(1));
        pieces.zip(loss_grads.par_chunks(rows_per_piece)).enumerate().for_each(
            |(piece, (gradient, loss_grads))| {
                dispatch(Gradient { rows: self.skip_rows(piece * rows_per_piece), loss_grads, gradient });
            },
        );
        gradient
    }

    /// Returns the rows without the first ones.
    fn skip_rows(self, rows: usize) -> Self {
        let target = match self.target {
            Target::Targets(targets) => Target::Targets(&targets[rows..]),
            Target::Teacher(logits) => Target::Teacher(&logits[rows * self.vocabulary..]),
        };
        Self { logits: &self.logits[rows * self.vocabulary..], target, ..self }
    }

    #[inline(always)]
    fn row(&self, row: usize) -> &'a [f32] {
        &self.logits[row * self.vocabulary..][..self.vocabulary]
    }
}

struct Losses<'a> {
    rows: Rows<'a>,
    weights: &'a [f32],
    losses: &'a mut [f32],
}

impl Kernel for Losses<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { rows, weights, losses } = self;
        for (row, (loss, weight)) in losses.iter_mut().zip(weights).enumerate() {
            if *weight == 0.0 {
                continue;
            }
            let logits = rows.row(row);
            let sum = log_sum_exp::<L>(logits, rows.inverse_temperature);
            *loss = match rows.target {
                Target::Targets(targets) => sum - logits[targets[row]] * rows.inverse_temperature,
                Target::Teacher(teacher) => {
                    let teacher = &teacher[row * rows.vocabulary..][..rows.vocabulary];
                    let teacher_sum = log_sum_exp::<L>(teacher, rows.inverse_temperature);
                    divergence::<L>(logits, teacher, rows.inverse_temperature, teacher_sum) + sum
                        - teacher_sum
                }
            };
        }
    }
}

struct Gradient<'a> {
    rows: Rows<'a>,
    loss_grads: &'a [f32],
    gradient: &'a mut [f32],
}

impl Kernel for Gradient<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { rows, loss_grads, gradient } = self;
        for (row, gradient) in gradient.chunks_exact_mut(rows.vocabulary).enumerate() {
            let factor = loss_grads[row] * rows.inverse_temperature;
            if factor == 0.0 {
                continue;
            }
            let logits = rows.row(row);
            let sum = log_sum_exp::<L>(logits, rows.inverse_temperature);
            add_probabilities::<L>(logits, rows.inverse_temperature, sum, factor, gradient);
            match rows.target {
                Target::Targets(targets) => gradient[targets[row]] -= factor,
                Target::Teacher(teacher) => {
                    let teacher = &teacher[row * rows.vocabulary..][..rows.vocabulary];
                    let sum = log_sum_exp::<L>(teacher, rows.inverse_temperature);
                    add_probabilities::<L>(teacher, rows.inverse_temperature, sum, -factor, gradient);
                }
            }
        }
    }
}

/// Loads up to sixteen logits, padded with the lowest f32, whose exponential is zero.
#[inline(always)]
fn load<L: Lanes>(numbers: &[f32]) -> L {
    match numbers.first_chunk() {
        Some(whole) => L::load(whole),
        None => {
            let mut padded = [f32::MIN; LANES];
            padded[..numbers.len()].copy_from_slice(numbers);
            L::load(&padded)
        }
    }
}

/// Returns the log-sum-exp of the logits times `inverse_temperature`.
#[inline(always)]
fn log_sum_exp<L: Lanes>(logits: &[f32], inverse_temperature: f32) -> f32 {
    let mut highest = L::splat(f32::MIN);
    for logits in logits.chunks(LANES) {
        highest = highest.max(load::<L>(logits));
    }
    let mut base = f32::MIN;
    for lane in highest.store() {
        base = base.max(lane);
    }
    let mut total = L::zero();
    for logits in logits.chunks(LANES) {
        let below = load::<L>(logits).sub(L::splat(base));
        total = total.add(exp(below.mul(L::splat(inverse_temperature))));
    }
    base * inverse_temperature + total.sum().ln()
}

/// Adds the probability of every logit times a factor.
#[inline(always)]
fn add_probabilities<L: Lanes>(
    logits: &[f32],
    inverse_temperature: f32,
    sum: f32,
    factor: f32,
    to: &mut [f32],
) {
    for (logits, to) in logits.chunks(LANES).zip(to.chunks_mut(LANES)) {
        let exponent = L::splat(-sum).mul_add(load::<L>(logits), L::splat(inverse_temperature));
        let probabilities = exp(exponent).mul(L::splat(factor));
        match to.first_chunk_mut() {
            Some(whole) => *whole = L::load(whole).add(probabilities).store(),
            None => {
                for (to, share) in to.iter_mut().zip(probabilities.store()) {
                    *to += share;
                }
            }
        }
    }
}

/// Returns the expectation, over the teacher's distribution, of the teacher's logits minus the student's.
#[inline(always)]
fn divergence<L: Lanes>(student: &[f32], teacher: &[f32], inverse_temperature: f32, teacher_sum: f32) -> f32 {
    let mut total = L::zero();
    for (student, teacher) in student.chunks(LANES).zip(teacher.chunks(LANES)) {
        let (student, teacher): (L, L) = (load(student), load(teacher));
        let share = exp(L::splat(-teacher_sum).mul_add(teacher, L::splat(inverse_temperature)));
        let higher = teacher.sub(student).mul(L::splat(inverse_temperature));
        // A teacher logit of -inf contributes nothing, whatever the student's is.
        total = total.add(L::where_less(L::zero(), share, share.mul(higher), L::zero()));
    }
    total.sum()
}
