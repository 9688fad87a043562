//! A bounded history of a server's figures, with the rates and quantiles computed from it.

use std::collections::VecDeque;

use firebox_runtime::telemetry::{Counter, Histogram};

use super::figures::{Figures, ModelFigures};

/// Figures that are kept: two minutes, at two a second.
const KEPT: usize = 240;

/// A server's recent figures, the newest last.
#[derive(Debug, Default)]
pub struct History(VecDeque<Figures>);

impl History {
    /// Adds the newest figures. Discards the older ones if the server was restarted.
    pub fn add(&mut self, figures: Figures) {
        let is_new = self.newest().is_some_and(|before| {
            before.models.iter().any(|(name, model)| {
                let counted = |model: &ModelFigures| model.counter(Counter::Rows);
                figures.models.get(name).is_some_and(|now| counted(now) < counted(model))
            })
        });
        if is_new {
            self.0.clear();
        }
        if self.0.len() == KEPT {
            self.0.pop_front();
        }
        self.0.push_back(figures);
    }

    pub fn newest(&self) -> Option<&Figures> {
        self.0.back()
    }

    /// Returns the growth rates of a counter of a model, between each reading and the next.
    pub fn rates(&self, model: &str, counter: Counter) -> Vec<f64> {
        let counted =
            |figures: &Figures| figures.models.get(model).map_or(0.0, |model| model.counter(counter));
        let pairs = self.0.iter().zip(self.0.iter().skip(1));
        pairs
            .map(|(before, now)| {
                let seconds = now.at.duration_since(before.at).as_secs_f64().max(1e-3);
                (counted(now) - counted(before)).max(0.0) / seconds
            })
            .collect()
    }

    /// Returns the newest growth rate of a counter.
    pub fn rate(&self, model: &str, counter: Counter) -> f64 {
        self.rates(model, counter).last().copied().unwrap_or(0.0)
    }

    /// A quantile over what is remembered; over all there ever was, where nothing came since.
    pub fn quantile(&self, model: &str, histogram: Histogram, share: f64) -> Option<f64> {
        let spread = |figures: &Figures| figures.models.get(model).map(|model| model.spread(histogram));
        let now = spread(self.newest()?)?;
        let recent = self.0.front().and_then(spread).map(|before| now.since(&before));
        recent.and_then(|recent| recent.quantile(share)).or_else(|| now.quantile(share))
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::top::metrics::parse;

    fn history(texts: &[&str]) -> History {
        let (mut history, began) = (History::default(), Instant::now());
        for (index, text) in texts.iter().enumerate() {
            history
                .add(Figures::of(&parse(text).unwrap(), began + Duration::from_millis(500) * index as u32));
        }
        history
    }

    #[test]
    fn rates_are_of_the_time_between_readings() {
        let text = |count| format!("firebox_generated_tokens_total{{model=\"a\"}} {count}");
        let history = history(&[&text(10), &text(20), &text(20)]);
        assert_eq!(history.rates("a", Counter::GeneratedTokens), [20.0, 0.0]);
        assert_eq!(history.rate("b", Counter::GeneratedTokens), 0.0);
    }

    #[test]
    fn a_server_that_began_anew_has_no_past() {
        let text = |rows| format!("firebox_rows_total{{model=\"a\"}} {rows}");
        assert_eq!(history(&[&text(10), &text(20), &text(5)]).rates("a", Counter::Rows), [0.0; 0]);
    }
}
