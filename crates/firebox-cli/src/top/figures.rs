//! The figures that `firebox top` extracts from a server's metrics, per model and per memory budget.

use std::collections::BTreeMap;
use std::time::Instant;

use firebox_runtime::telemetry::{Counter, Gauge, Histogram};

use super::metrics::Sample;

/// A server's metrics at one moment.
#[derive(Debug, Clone)]
pub struct Figures {
    pub at: Instant,
    pub models: BTreeMap<String, ModelFigures>,
    pub budgets: BTreeMap<String, BudgetFigures>,
    pub resident_bytes: Option<f64>,
}

/// The metrics of one model.
#[derive(Debug, Clone, Default)]
pub struct ModelFigures {
    counters: BTreeMap<Counter, f64>,
    gauges: BTreeMap<Gauge, f64>,
    spreads: BTreeMap<Histogram, Spread>,
}

impl ModelFigures {
    pub fn counter(&self, counter: Counter) -> f64 {
        self.counters.get(&counter).copied().unwrap_or(0.0)
    }

    pub fn gauge(&self, gauge: Gauge) -> f64 {
        self.gauges.get(&gauge).copied().unwrap_or(0.0)
    }

    pub fn spread(&self, histogram: Histogram) -> Spread {
        self.spreads.get(&histogram).cloned().unwrap_or_default()
    }
}

/// Memory that is shared out.
#[derive(Debug, Clone, Default)]
pub struct BudgetFigures {
    pub total: Option<f64>,
    /// By account.
    pub held: BTreeMap<String, f64>,
}

impl BudgetFigures {
    pub fn held(&self) -> f64 {
        self.held.values().sum()
    }
}

/// A cumulative histogram: pairs of a rising bound and the number of values that are at most as large.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Spread(Vec<(f64, f64)>);

impl Spread {
    pub fn count(&self) -> f64 {
        self.0.last().map_or(0.0, |(_, below)| *below)
    }

    /// Returns the values that were added since `before`. The server omits bounds beyond all values; the count at such a bound
    /// is that of all values.
    pub fn since(&self, before: &Self) -> Self {
        let below = |bound: f64| {
            before.0.iter().find(|(other, _)| *other >= bound).map_or(before.count(), |(_, below)| *below)
        };
        Self(self.0.iter().map(|&(bound, all)| (bound, (all - below(bound)).max(0.0))).collect())
    }

    /// Returns a quantile, interpolated between bounds. `None` if there are no values.
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let count = self.count();
        if count <= 0.0 {
            return None;
        }
        let rank = share * count;
        let mut low = (0.0, 0.0);
        for &(bound, below) in &self.0 {
            if below >= rank && below > low.1 {
                // Beyond the last bound nothing is known but that.
                let high = if bound.is_finite() { bound } else { low.0 };
                return Some(low.0 + (high - low.0) * (rank - low.1) / (below - low.1));
            }
            low = (bound, below);
        }
        None
    }

    fn add(&mut self, bound: f64, below: f64) {
        self.0.push((bound, below));
        self.0.sort_by(|one, other| one.0.total_cmp(&other.0));
    }
}

impl Figures {
    /// Those of a server's samples. Whatever is not known here is passed over.
    pub fn of(samples: &[Sample], at: Instant) -> Self {
        let counters: BTreeMap<String, Counter> =
            Counter::ALL.iter().map(|one| (one.metric(), *one)).collect();
        let gauges: BTreeMap<String, Gauge> = Gauge::ALL.iter().map(|one| (one.metric(), *one)).collect();
        let spreads: BTreeMap<String, Histogram> =
            Histogram::ALL.iter().map(|one| (format!("{}_bucket", one.metric()), *one)).collect();
        let mut figures =
            Self { at, models: BTreeMap::new(), budgets: BTreeMap::new(), resident_bytes: None };
        for sample in samples {
            let name = sample.name.as_str();
            if let Some(model) = sample.label("model") {
                let model = figures.models.entry(model.to_owned()).or_default();
                if let Some(counter) = counters.get(name) {
                    model.counters.insert(*counter, sample.value);
                } else if let Some(gauge) = gauges.get(name) {
                    model.gauges.insert(*gauge, sample.value);
                } else if let (Some(histogram), Some(bound)) = (spreads.get(name), sample.label("le")) {
                    let bound = if bound == "+Inf" { Some(f64::INFINITY) } else { bound.parse().ok() };
                    if let Some(bound) = bound {
                        model.spreads.entry(*histogram).or_default().add(bound, sample.value);
                    }
                }
            } else if let Some(budget) = sample.label("budget") {
                let budget = figures.budgets.entry(budget.to_owned()).or_default();
                match (name, sample.label("account")) {
                    ("firebox_budget_bytes", _) => budget.total = Some(sample.value),
                    ("firebox_budget_held_bytes", Some(account)) => {
                        budget.held.insert(account.to_owned(), sample.value);
                    }
                    _ => {}
                }
            } else if name == "process_resident_memory_bytes" {
                figures.resident_bytes = Some(sample.value);
            }
        }
        figures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread(pairs: &[(f64, f64)]) -> Spread {
        Spread(pairs.to_vec())
    }

    #[test]
    fn quantiles_lie_between_bounds() {
        let all = spread(&[(1.0, 0.0), (2.0, 10.0), (4.0, 20.0), (f64::INFINITY, 20.0)]);
        assert_eq!(all.quantile(0.5), Some(2.0));
        assert_eq!(all.quantile(0.75), Some(3.0));
        assert_eq!(all.quantile(1.0), Some(4.0));
        assert_eq!(Spread::default().quantile(0.5), None);
        assert_eq!(spread(&[(1.0, 0.0), (f64::INFINITY, 3.0)]).quantile(0.5), Some(1.0));
    }

    #[test]
    fn what_came_since_is_a_spread_though_bounds_were_added() {
        let before = spread(&[(1.0, 2.0), (2.0, 4.0), (f64::INFINITY, 4.0)]);
        let now = spread(&[(1.0, 2.0), (2.0, 4.0), (4.0, 9.0), (8.0, 10.0), (f64::INFINITY, 10.0)]);
        let since = now.since(&before);
        assert_eq!(since.count(), 6.0);
        assert_eq!(since, spread(&[(1.0, 0.0), (2.0, 0.0), (4.0, 5.0), (8.0, 6.0), (f64::INFINITY, 6.0)]));
        assert_eq!(now.since(&now).quantile(0.5), None);
    }
}
