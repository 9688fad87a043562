//! The learning rate of each step.

use serde::{Deserialize, Serialize};

use crate::error::TrainError;

/// A learning rate that rises linearly and falls along half a cosine.
///
/// ```
/// use firebox_train::Schedule;
///
/// let schedule = Schedule { peak: 1.0, warm_up: 4, floor: 0.1 };
/// assert_eq!(schedule.rate(0, 100), 0.25);
/// assert_eq!(schedule.rate(4, 100), 1.0);
/// assert!((schedule.rate(52, 100) - 0.55).abs() < 1e-12);
/// assert_eq!(schedule.rate(100, 100), 0.1);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// The highest rate.
    pub peak: f64,
    /// Steps it takes to rise to the peak; the first of them has a rate above zero.
    #[serde(default)]
    pub warm_up: u64,
    /// The rate it falls to.
    #[serde(default)]
    pub floor: f64,
}

impl Schedule {
    /// The rate of a step, counted from zero, of so many in all. The floor is what the step after the last would have.
    pub fn rate(&self, step: u64, steps: u64) -> f64 {
        if step < self.warm_up {
            return self.peak * (step + 1) as f64 / self.warm_up as f64;
        }
        let falling = steps.saturating_sub(self.warm_up).max(1);
        let progress = ((step - self.warm_up) as f64 / falling as f64).min(1.0);
        self.floor + (self.peak - self.floor) * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
    }

    pub(crate) fn check(&self) -> Result<(), TrainError> {
        let wrong = |setting, value: f64, reason| {
            Err(TrainError::Setting { setting, value: value.to_string(), reason })
        };
        if !(self.peak > 0.0 && self.peak.is_finite()) {
            return wrong("schedule.peak", self.peak, "it has to be above zero");
        }
        if !(0.0..=self.peak).contains(&self.floor) {
            return wrong("schedule.floor", self.floor, "it has to be between zero and the peak");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_rises_then_falls_and_stays_between() {
        let schedule = Schedule { peak: 3e-3, warm_up: 10, floor: 3e-4 };
        let rates: Vec<f64> = (0..200).map(|step| schedule.rate(step, 200)).collect();
        assert!(rates[..10].windows(2).all(|pair| pair[0] < pair[1]) && rates[0] > 0.0);
        assert!(rates[10..].windows(2).all(|pair| pair[0] > pair[1]));
        assert!((rates[9], rates[10]) == (3e-3, 3e-3) && rates[199] > 3e-4);
        assert_eq!(schedule.rate(1000, 200), 3e-4);
    }

    #[test]
    fn odd_lengths_are_no_trouble() {
        let schedule = Schedule { peak: 1.0, warm_up: 10, floor: 0.0 };
        assert_eq!(schedule.rate(3, 5), 0.4);
        assert!(schedule.rate(10, 10).is_finite());
        assert_eq!(Schedule { warm_up: 0, ..schedule }.rate(0, 1), 1.0);
        for (peak, floor) in [(0.0, 0.0), (f64::NAN, 0.0), (1.0, 2.0), (1.0, -1.0), (f64::INFINITY, 0.0)] {
            assert!(Schedule { peak, floor, warm_up: 0 }.check().is_err(), "{peak} {floor}");
        }
    }
}
