//! Maps similarities to scores.

use serde::Serialize;

use super::RELEVANT;
use crate::RuntimeError;

/// The least accuracy of a scorer. One below it would hide turns at random.
const LEAST_ACCURACY: f64 = 0.7;

/// Maps a scorer's similarity to a score with one meaning for all scorers: the probability that two turns are
/// related, estimated from labelled pairs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Calibration {
    /// The similarity that scores [`RELEVANT`].
    pub threshold: f64,
    /// The increase of the score's log-odds with the similarity.
    pub slope: f64,
    /// The share of pairs on the right side of the threshold, with related and unrelated pairs weighted equally.
    pub accuracy: f64,
}

impl Calibration {
    /// Fits a logistic curve to the similarities of labelled pairs. Related and unrelated pairs have equal weight,
    /// whatever their numbers.
    pub fn fit(pairs: &[(f64, bool)]) -> Result<Self, RuntimeError> {
        let of = |related: bool| pairs.iter().filter(move |pair| pair.1 == related).map(|pair| pair.0);
        let counts = [of(false).count() as f64, of(true).count() as f64];
        let means = [of(false).sum::<f64>() / counts[0], of(true).sum::<f64>() / counts[1]];
        let refusal = |accuracy| RuntimeError::Calibration {
            related: counts[1] as usize,
            unrelated: counts[0] as usize,
            accuracy,
        };
        let tells_apart = means[1] > means[0];
        if !tells_apart {
            return Err(refusal(0.5));
        }
        // In units of the distance between the two means, so that the steps below do not depend on the scorer's
        // scale.
        let scale = means[1] - means[0];
        let centre = (means[0] + means[1]) / 2.0;
        let points: Vec<Point> = pairs
            .iter()
            .map(|&(similarity, related)| Point {
                x: (similarity - centre) / scale,
                // Platt's targets, slightly inside 0 and 1, so that perfectly separated pairs have a finite slope.
                target: if related { (counts[1] + 1.0) / (counts[1] + 2.0) } else { 1.0 / (counts[0] + 2.0) },
                weight: 1.0 / counts[usize::from(related)],
            })
            .collect();
        let Curve { slope, offset } = Curve::fit(&points);
        let threshold = centre + scale * (log_odds(RELEVANT.into()) - offset) / slope;
        let right = |related| {
            let right = of(related).filter(|similarity| (*similarity >= threshold) == related).count();
            right as f64 / counts[usize::from(related)]
        };
        let accuracy = (right(false) + right(true)) / 2.0;
        if accuracy < LEAST_ACCURACY {
            return Err(refusal(accuracy));
        }
        Ok(Self { threshold, slope: slope / scale, accuracy })
    }

    /// Returns the score of a similarity.
    pub fn score(&self, similarity: f64) -> f32 {
        let odds = self.slope * (similarity - self.threshold) + log_odds(RELEVANT.into());
        sigmoid(odds) as f32
    }
}

#[derive(Debug, Clone, Copy)]
struct Point {
    x: f64,
    target: f64,
    weight: f64,
}

/// The log-odds `slope * x + offset`.
#[derive(Debug, Clone, Copy)]
struct Curve {
    slope: f64,
    offset: f64,
}

impl Curve {
    /// Minimises the cross entropy by Newton's method. It is convex, and its minimum is finite because no target is
    /// 0 or 1; a step that overshoots is halved.
    fn fit(points: &[Point]) -> Self {
        const MOST_STEPS: usize = 100;
        const SMALLEST_GAIN: f64 = 1e-12;
        let mut curve = Self { slope: 1.0, offset: 0.0 };
        for _ in 0..MOST_STEPS {
            let Some(step) = curve.newton_step(points) else { break };
            let before = curve.loss(points);
            let shorter = (0..32).map(|halvings| curve.moved(step, 0.5_f64.powi(halvings)));
            let Some(next) = shorter.into_iter().find(|next| next.loss(points) < before) else { break };
            let gain = before - next.loss(points);
            curve = next;
            if gain < SMALLEST_GAIN {
                break;
            }
        }
        curve
    }

    fn moved(self, step: Self, part: f64) -> Self {
        Self { slope: self.slope - part * step.slope, offset: self.offset - part * step.offset }
    }

    /// Returns the inverse of the Hessian times the gradient, or `None` if it is singular.
    fn newton_step(&self, points: &[Point]) -> Option<Self> {
        let (mut by_slope, mut by_offset) = (0.0, 0.0);
        let (mut xx, mut x, mut one) = (0.0, 0.0, 0.0);
        for point in points {
            let found = sigmoid(self.slope * point.x + self.offset);
            let error = point.weight * (found - point.target);
            let curvature = point.weight * found * (1.0 - found);
            by_slope += error * point.x;
            by_offset += error;
            xx += curvature * point.x * point.x;
            x += curvature * point.x;
            one += curvature;
        }
        let determinant = xx * one - x * x;
        (determinant > f64::EPSILON * xx * one).then(|| Self {
            slope: (one * by_slope - x * by_offset) / determinant,
            offset: (xx * by_offset - x * by_slope) / determinant,
        })
    }

    fn loss(&self, points: &[Point]) -> f64 {
        let of = |point: &Point| {
            let odds = self.slope * point.x + self.offset;
            // ln(1 + e^odds) without overflow.
            let softplus = odds.max(0.0) + (-odds.abs()).exp().ln_1p();
            point.weight * (softplus - point.target * odds)
        };
        points.iter().map(of).sum()
    }
}

fn sigmoid(odds: f64) -> f64 {
    1.0 / (1.0 + (-odds).exp())
}

fn log_odds(probability: f64) -> f64 {
    (probability / (1.0 - probability)).ln()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn labelled(related: &[f64], unrelated: &[f64]) -> Vec<(f64, bool)> {
        let label = |label| move |&similarity: &f64| (similarity, label);
        related.iter().map(label(true)).chain(unrelated.iter().map(label(false))).collect()
    }

    #[test]
    fn the_threshold_scores_what_counts_as_relevant() {
        let pairs = labelled(&[0.4, 0.5, 0.7, 0.6], &[0.0, 0.1, -0.1, 0.2]);
        let calibration = Calibration::fit(&pairs).unwrap();
        assert!((0.2..0.4).contains(&calibration.threshold), "{calibration:?}");
        assert_eq!(calibration.accuracy, 1.0);
        assert!((calibration.score(calibration.threshold) - RELEVANT).abs() < 1e-6);
        assert!(calibration.score(0.7) > 0.85 && calibration.score(0.0) < 0.2, "{calibration:?}");
    }

    /// Where half of the pairs with a similarity are related, the probability is one half.
    #[test]
    fn scores_are_probabilities_where_the_kinds_overlap() {
        let pairs = labelled(&[0.2, 0.4, 0.5, 0.6], &[0.0, 0.1, 0.2, 0.4]);
        let calibration = Calibration::fit(&pairs).unwrap();
        assert!((calibration.score(0.3) - 0.5).abs() < 0.01, "{calibration:?}");
    }

    #[test]
    fn similarities_that_say_nothing_are_refused() {
        for pairs in [
            labelled(&[0.1, 0.2], &[0.3, 0.4]),
            labelled(&[0.1], &[]),
            labelled(&[], &[]),
            labelled(&[0.2], &[0.2]),
            labelled(&[0.1, 0.2, 0.4], &[0.1, 0.2, 0.3]),
        ] {
            let refused = Calibration::fit(&pairs);
            assert!(matches!(refused, Err(RuntimeError::Calibration { .. })), "{pairs:?}: {refused:?}");
        }
    }

    proptest! {
        /// Neither where a scorer's similarities lie nor how far apart they are shows in the scores.
        #[test]
        fn the_scale_of_a_scorer_does_not_show(
            related in prop::collection::vec(0.0f64..1.0, 1..12),
            unrelated in prop::collection::vec(-0.6f64..0.4, 1..12),
            scale in 0.01f64..100.0,
            shift in -10.0f64..10.0,
        ) {
            let pairs = labelled(&related, &unrelated);
            let moved: Vec<_> = pairs.iter().map(|&(x, related)| (x * scale + shift, related)).collect();
            let (Ok(plain), Ok(other)) = (Calibration::fit(&pairs), Calibration::fit(&moved)) else {
                return Ok(());
            };
            for x in [-1.0, -0.2, 0.0, 0.3, 0.8, 1.0] {
                let (plain, other) = (plain.score(x), other.score(x * scale + shift));
                prop_assert!((plain - other).abs() < 1e-3, "{plain} and {other}");
                prop_assert!((0.0..=1.0).contains(&plain));
            }
        }
    }
}
