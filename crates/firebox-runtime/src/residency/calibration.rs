//! Finds the rates that predict measured rounds best.

use crate::RuntimeError;
use crate::planner::{Rates, Shape, predict};

/// One token's pass through some parts of a model, measured repeatedly.
#[derive(Debug)]
pub(super) struct Round {
    /// The parts, and whether each was resident.
    pub parts: Vec<(usize, bool)>,
    /// Seconds that a round takes.
    pub seconds: f64,
}

/// The rates that rounds determine. A single round determines only the first.
const PARAMETERS: [fn(&mut Rates) -> &mut f64; 3] =
    [|rates| &mut rates.read_bytes_per_second, |rates| &mut rates.contention, |rates| &mut rates.hindrance];

/// The largest factor by which the rate of reading may differ from its first estimate, and the largest factor by which reading and
/// computing may slow each other down.
const MAX_RATE_CHANGE: f64 = 8.0;
const MAX_SLOWDOWN: f64 = 8.0;

/// The weight of a changed rate of reading beside prediction errors. Where computing takes longer than reading, rounds do not determine
/// the rate.
const RATE_CHANGE_WEIGHT: f64 = 0.01;

/// The factor by which parameters change at first and at last, the improvement that keeps it, and the largest number of iterations.
const FIRST_FACTOR: f64 = 1.25;
const LAST_FACTOR: f64 = 1.005;
const MIN_IMPROVEMENT: f64 = 1e-3;
const MAX_ITERATIONS: usize = 200;

/// Returns the rates that predict these rounds best, by the sum of squared logarithmic errors.
pub(super) fn calibrate(
    rates: Rates,
    shape: &Shape,
    buffers: usize,
    rounds: &[Round],
) -> Result<Rates, RuntimeError> {
    let estimate = rates.read_bytes_per_second;
    let is_possible = |rates: &Rates| {
        let (contention, hindrance) = (rates.contention, rates.hindrance);
        (estimate / MAX_RATE_CHANGE..=estimate * MAX_RATE_CHANGE).contains(&rates.read_bytes_per_second)
            && (1.0..=MAX_SLOWDOWN).contains(&contention)
            && (1.0..=MAX_SLOWDOWN).contains(&hindrance)
            // Overlapping is never slower than reading and computing in turn.
            && 1.0 / contention + 1.0 / hindrance >= 1.0
    };
    let error = |rates: &Rates| {
        let penalty = RATE_CHANGE_WEIGHT * (rates.read_bytes_per_second / estimate).ln().powi(2);
        rounds.iter().try_fold(penalty, |sum, round| {
            let predicted = round.predicted(shape, rates, buffers)?;
            Ok::<_, RuntimeError>(sum + (predicted / round.seconds).ln().powi(2))
        })
    };
    let parameters = if rounds.len() > 1 { &PARAMETERS[..] } else { &PARAMETERS[..rounds.len()] };
    let rates = Rates { contention: rates.contention.clamp(1.0, MAX_SLOWDOWN), ..rates };
    let mut best = (error(&rates)?, rates);
    let mut step = FIRST_FACTOR;
    for _ in 0..MAX_ITERATIONS {
        if step < LAST_FACTOR {
            break;
        }
        let before = best.0;
        for parameter in parameters {
            for factor in [step, 1.0 / step] {
                let mut changed = best.1.clone();
                *parameter(&mut changed) *= factor;
                // Slowdowns stay at their minimum.
                changed.contention = changed.contention.max(1.0);
                changed.hindrance = changed.hindrance.max(1.0);
                if !is_possible(&changed) {
                    continue;
                }
                let found = error(&changed)?;
                if found < best.0 {
                    best = (found, changed);
                }
            }
        }
        let is_better = best.0 < before * (1.0 - MIN_IMPROVEMENT);
        if !is_better {
            step = step.sqrt();
        }
    }
    Ok(best.1)
}

impl Round {
    /// Seconds that the round takes at these rates.
    fn predicted(&self, shape: &Shape, rates: &Rates, buffers: usize) -> Result<f64, RuntimeError> {
        let parts = || self.parts.iter().map(|&(part, _)| part);
        let shape = Shape { parts: parts().map(|part| shape.parts[part]).collect(), ..shape.clone() };
        let rates = Rates { compute: parts().map(|part| rates.compute[part]).collect(), ..rates.clone() };
        let kept: Vec<bool> = self.parts.iter().map(|&(_, kept)| kept).collect();
        Ok(predict(&shape, &rates, &kept, buffers)?.seconds_per_token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::Part;

    const BUFFERS: usize = 2;

    fn model() -> Shape {
        let part = |is_layer| Part { bytes: 10 << 20, kept_bytes: 10 << 20, is_layer };
        let mut parts = vec![part(true); 20];
        parts.extend([part(false); 8]);
        Shape { parts, kv_bytes_per_token: 0, activation_bytes_per_row: 0, fixed_bytes: 0 }
    }

    fn rounds(shape: &Shape, rates: &Rates) -> Vec<Round> {
        let all = (0..28).map(|part| (part, false)).collect();
        let half = (0..16).map(|part| (part, part % 2 == 0)).collect();
        let behind = (0..8).map(|part| (part, true)).chain((20..28).map(|part| (part, false))).collect();
        let seen = |parts| {
            let mut round = Round { parts, seconds: 0.0 };
            round.seconds = round.predicted(shape, rates, BUFFERS).unwrap();
            round
        };
        [all, half, behind].map(seen).into()
    }

    #[test]
    fn calibrated_rates_predict_every_number_of_resident_layers() {
        let shape = model();
        let compute = vec![1e-3; 28];
        let estimate = Rates {
            read_bytes_per_second: 4e9,
            read_latency: 0.0,
            compute,
            overhead: 0.0,
            contention: 1.1,
            hindrance: 1.0,
        };
        for (rate, contention, hindrance) in
            [(5.5e9, 1.6, 1.0), (2e9, 1.0, 1.0), (8e9, 1.3, 1.5), (20e9, 1.9, 1.0)]
        {
            let so = Rates { read_bytes_per_second: rate, contention, hindrance, ..estimate.clone() };
            let found = calibrate(estimate.clone(), &shape, BUFFERS, &rounds(&shape, &so)).unwrap();
            for count in 0..=20 {
                let kept: Vec<bool> = (0..28).map(|part| part < 20 && (part * count) % 20 < count).collect();
                let [said, is] = [&found, &so]
                    .map(|rates| predict(&shape, rates, &kept, BUFFERS).unwrap().seconds_per_token);
                assert!(
                    (said / is - 1.0).abs() < 0.05,
                    "{rate} {contention} {hindrance}, {count} kept: {said} {is}"
                );
            }
        }
    }

    #[test]
    fn rounds_bound_by_computing_leave_the_rate_of_reading() {
        let shape = model();
        let estimate = Rates {
            read_bytes_per_second: 50e9,
            read_latency: 0.0,
            compute: vec![1e-3; 28],
            overhead: 0.0,
            contention: 40.0,
            hindrance: 1.0,
        };
        let so = Rates { contention: 1.2, ..estimate.clone() };
        let found = calibrate(estimate, &shape, BUFFERS, &rounds(&shape, &so)).unwrap();
        assert!((found.read_bytes_per_second / 50e9 - 1.0).abs() < 0.1, "{found:?}");
        assert!((found.contention / 1.2 - 1.0).abs() < 0.1, "{found:?}");
    }

    #[test]
    fn without_rounds_rates_stay_as_they_were() {
        let estimate = Rates {
            read_bytes_per_second: 1e9,
            read_latency: 0.0,
            compute: vec![1e-3; 28],
            overhead: 0.0,
            contention: 1.5,
            hindrance: 1.0,
        };
        assert_eq!(calibrate(estimate.clone(), &model(), BUFFERS, &[]).unwrap(), estimate);
    }
}
