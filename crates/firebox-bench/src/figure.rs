//! Figures: measured values, round by round, each with the value it is compared with.

use anyhow::{bail, ensure};
use serde::{Deserialize, Serialize};

/// A figure that a measure brings.
#[derive(Debug, Clone, Copy)]
pub struct Declared {
    /// The measure's name, a dot, and its own.
    pub name: &'static str,
    /// The unit of its values.
    pub unit: &'static str,
    /// The unit of the two quantities that it compares; empty if it compares nothing.
    pub of: &'static str,
    /// The name of the baseline that it is compared with.
    pub beside: &'static str,
}

/// A figure that compares two things, as how many times one is the other.
pub const fn times(name: &'static str, of: &'static str, beside: &'static str) -> Declared {
    Declared { name, unit: "×", of, beside }
}

/// A figure that compares two things in another unit.
pub const fn compared(
    name: &'static str,
    unit: &'static str,
    of: &'static str,
    beside: &'static str,
) -> Declared {
    Declared { name, unit, of, beside }
}

/// A figure that stands alone.
pub const fn alone(name: &'static str, unit: &'static str) -> Declared {
    Declared { name, unit, of: "", beside: "" }
}

/// The result of one round.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Round {
    pub value: f64,
    /// The two quantities that the value compares: ours, and the baseline.
    pub pair: Option<(f64, f64)>,
}

/// A figure with its rounds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    pub name: String,
    pub unit: String,
    pub of: String,
    pub beside: String,
    pub rounds: Vec<Round>,
}

/// The median of some values, and what they lie between.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    pub lowest: f64,
    pub median: f64,
    pub highest: f64,
}

impl Figure {
    /// Returns the spread of its rounds. A figure has at least one round.
    pub fn spread(&self) -> Spread {
        spread(self.rounds.iter().map(|round| round.value))
    }

    /// The medians of what it is made of.
    pub fn pair(&self) -> Option<(f64, f64)> {
        let side = |side: fn((f64, f64)) -> f64| {
            let values: Option<Vec<f64>> = self.rounds.iter().map(|round| round.pair.map(side)).collect();
            values.map(|values| spread(values).median)
        };
        Some((side(|pair| pair.0)?, side(|pair| pair.1)?))
    }
}

/// The middle of an even number of values is between the two in the middle.
pub fn spread(values: impl IntoIterator<Item = f64>) -> Spread {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let at = |at: usize| values.get(at).copied().unwrap_or(f64::NAN);
    let (middle, last) = (values.len() / 2, values.len().saturating_sub(1));
    let median = if values.len().is_multiple_of(2) {
        (at(middle.saturating_sub(1)) + at(middle)) / 2.0
    } else {
        at(middle)
    };
    Spread { lowest: at(0), median, highest: at(last) }
}

/// The figures that a measure has collected so far.
#[derive(Debug)]
pub struct Figures {
    declared: &'static [Declared],
    measured: Measured,
}

/// The results of a measure, as its process passes them to the report.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Measured {
    pub figures: Vec<Figure>,
    /// Figures that could not be measured on this machine, with the reasons.
    pub left_out: Vec<String>,
}

impl Figures {
    pub fn new(declared: &'static [Declared]) -> Self {
        Self { declared, measured: Measured::default() }
    }

    /// A round of a figure that stands alone.
    pub fn add(&mut self, name: &str, value: f64) -> anyhow::Result<()> {
        self.round(name, Round { value, pair: None })
    }

    /// A round of a figure that is made of two others.
    pub fn add_pair(&mut self, name: &str, value: f64, ours: f64, baseline: f64) -> anyhow::Result<()> {
        self.round(name, Round { value, pair: Some((ours, baseline)) })
    }

    /// Adds the ratio of our value to the baseline, for quantities of which more is better.
    pub fn more(&mut self, name: &str, ours: f64, baseline: f64) -> anyhow::Result<()> {
        self.add_pair(name, ours / baseline, ours, baseline)
    }

    /// Adds the ratio of the baseline's time to ours.
    pub fn sooner(&mut self, name: &str, ours: f64, baseline: f64) -> anyhow::Result<()> {
        self.add_pair(name, baseline / ours, ours, baseline)
    }

    /// Says that something cannot be measured here.
    pub fn leave_out(&mut self, why: impl Into<String>) {
        self.measured.left_out.push(why.into());
    }

    pub fn into_measured(self) -> Measured {
        self.measured
    }

    fn round(&mut self, name: &str, round: Round) -> anyhow::Result<()> {
        let Some(declared) = self.declared.iter().find(|declared| declared.name == name) else {
            bail!("{name} is not among the figures that this measure says it brings; add it to its FIGURES");
        };
        ensure!(
            declared.of.is_empty() == round.pair.is_none(),
            "{name} has a baseline in one place and none in another; make FIGURES say what is measured"
        );
        ensure!(
            round.value.is_finite(),
            "{name} came to {}; what it is divided by was not measured",
            round.value
        );
        match self.measured.figures.iter_mut().find(|figure| figure.name == name) {
            Some(figure) => figure.rounds.push(round),
            None => self.measured.figures.push(Figure {
                name: name.to_owned(),
                unit: declared.unit.to_owned(),
                of: declared.of.to_owned(),
                beside: declared.beside.to_owned(),
                rounds: vec![round],
            }),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIGURES: &[Declared] = &[times("test.sooner", "s", "the other way"), alone("test.seconds", "s")];

    #[test]
    fn rounds_become_a_median_and_a_range() {
        let mut figures = Figures::new(FIGURES);
        for (ours, baseline) in [(1.0, 4.0), (2.0, 4.0), (1.0, 3.0)] {
            figures.sooner("test.sooner", ours, baseline).unwrap();
        }
        figures.add("test.seconds", 3.0).unwrap();
        let measured = figures.into_measured();
        let [sooner, seconds] = &measured.figures[..] else { panic!("{measured:?}") };
        assert_eq!(sooner.spread(), Spread { lowest: 2.0, median: 3.0, highest: 4.0 });
        assert_eq!(sooner.pair(), Some((1.0, 4.0)));
        assert_eq!((seconds.spread().median, seconds.pair()), (3.0, None));
        assert_eq!(spread([1.0, 4.0]).median, 2.5);
    }

    #[test]
    fn a_figure_has_its_declared_kind() {
        let mut figures = Figures::new(FIGURES);
        assert!(figures.add("test.other", 1.0).unwrap_err().to_string().contains("test.other"));
        assert!(figures.add("test.sooner", 1.0).is_err());
        assert!(figures.more("test.seconds", 1.0, 1.0).is_err());
        assert!(figures.sooner("test.sooner", 0.0, 0.0).is_err());
        assert!(figures.into_measured().figures.is_empty());
    }
}
