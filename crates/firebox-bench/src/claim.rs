//! Published results, and the figures of this project that are compared with them.

use std::fmt;

use anyhow::Context as _;
use serde::Deserialize;

use crate::figure::{Figure, Spread};

/// The table in the repository.
const TABLE: &str = include_str!("../published.toml");

/// One result.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// A description of the claim.
    pub says: String,
    /// The published result; absent if the bar is this project's own.
    pub published: Option<String>,
    /// The figure of ours that stands against it.
    pub figure: String,
    /// The bound that the figure should meet.
    pub bar: Bar,
    /// Why it has been missed. Printed only where it is.
    pub reason: Option<String>,
}

/// The bound that a figure should meet.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bar {
    AtLeast(f64),
    AtMost(f64),
}

/// The result of checking a claim.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Verdict {
    Held(Spread),
    Missed(Spread),
    NotMeasured,
}

impl Bar {
    /// Returns by which factor a value clears the bar: below 1 is a miss.
    pub fn cleared(self, value: f64) -> f64 {
        match self {
            Self::AtLeast(least) => value / least,
            Self::AtMost(most) => most / value,
        }
    }

    fn holds(self, value: f64) -> bool {
        match self {
            Self::AtLeast(least) => value >= least,
            Self::AtMost(most) => value <= most,
        }
    }
}

impl fmt::Display for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtLeast(least) => write!(f, "≥ {least}"),
            Self::AtMost(most) => write!(f, "≤ {most}"),
        }
    }
}

impl Claim {
    /// The figure that stands against it, if it was measured.
    pub fn figure<'a>(&self, figures: &'a [Figure]) -> Option<&'a Figure> {
        figures.iter().find(|figure| figure.name == self.figure)
    }

    /// Checks the claim against the median of the figure's rounds.
    pub fn verdict(&self, figures: &[Figure]) -> Verdict {
        match self.figure(figures).map(Figure::spread) {
            Some(spread) if self.bar.holds(spread.median) => Verdict::Held(spread),
            Some(spread) => Verdict::Missed(spread),
            None => Verdict::NotMeasured,
        }
    }
}

/// The claims, and the predictions that are computed from published tables alone.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claims {
    #[serde(rename = "claim")]
    pub measured: Vec<Claim>,
    #[serde(rename = "prediction")]
    pub predicted: Vec<Claim>,
}

impl Claims {
    /// The claims of the repository's table.
    pub fn published() -> anyhow::Result<Self> {
        toml::from_str(TABLE).context("published.toml is no table of claims")
    }

    pub fn all(&self) -> impl Iterator<Item = &Claim> {
        self.measured.iter().chain(&self.predicted)
    }

    /// Keeps those whose figures were measured.
    pub fn retain_measured(&mut self, figures: &[Figure]) {
        for claims in [&mut self.measured, &mut self.predicted] {
            claims.retain(|claim| claim.figure(figures).is_some());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::{Figures, alone};
    use crate::measures::ALL;

    #[test]
    fn every_claim_has_a_figure_that_some_measure_brings() {
        let declared: Vec<&str> =
            ALL.iter().flat_map(|measure| measure.figures).map(|declared| declared.name).collect();
        let claims = Claims::published().unwrap();
        for claim in claims.all() {
            assert!(declared.contains(&claim.figure.as_str()), "{}: {}", claim.says, claim.figure);
            let (Bar::AtLeast(bar) | Bar::AtMost(bar)) = claim.bar;
            assert!(bar.is_finite() && bar > 0.0, "{}", claim.says);
        }
        assert!(claims.all().any(|claim| claim.published.is_some()));
        let mut figures: Vec<&str> = claims.all().map(|claim| claim.figure.as_str()).collect();
        figures.sort_unstable();
        assert!(figures.windows(2).all(|pair| pair[0] != pair[1]), "one figure stands against one claim");
    }

    #[test]
    fn the_median_decides() {
        let claim = |bar| Claim {
            says: "it is fast".into(),
            published: None,
            figure: "test.fast".into(),
            bar,
            reason: None,
        };
        let mut figures = Figures::new(const { &[alone("test.fast", "×")] });
        for value in [1.0, 2.0, 9.0] {
            figures.add("test.fast", value).unwrap();
        }
        let figures = figures.into_measured().figures;
        for (bar, held, cleared) in [
            (Bar::AtLeast(2.0), true, 1.0),
            (Bar::AtLeast(2.5), false, 0.8),
            (Bar::AtMost(2.0), true, 1.0),
            (Bar::AtMost(1.0), false, 0.5),
        ] {
            assert_eq!(matches!(claim(bar).verdict(&figures), Verdict::Held(_)), held, "{bar}");
            assert_eq!(matches!(claim(bar).verdict(&figures), Verdict::Missed(_)), !held, "{bar}");
            assert_eq!(bar.cleared(2.0), cleared);
        }
        assert_eq!(claim(Bar::AtLeast(1.0)).verdict(&[]), Verdict::NotMeasured);
    }
}
