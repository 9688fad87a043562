//! Prediction of the next model.

use std::path::Path;

use crate::ScheduleError;
use crate::succession::Succession;

/// Predicts the next model from the order in which models followed each other.
///
/// ```
/// use firebox_schedule::NextModel;
///
/// let mut next = NextModel::default();
/// for model in ["router", "specialist", "router", "specialist", "router"] {
///     next.note(model);
/// }
/// assert_eq!(next.likely(0.5).collect::<Vec<_>>(), ["specialist"]);
/// ```
#[derive(Debug, Clone, Default)]
pub struct NextModel {
    succession: Succession,
    last: Option<String>,
}

impl NextModel {
    /// Opens what was learned before and saved in a file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ScheduleError> {
        Ok(Self { succession: Succession::open(path)?, last: None })
    }

    /// Records that a model is in use.
    pub fn note(&mut self, model: &str) {
        if let Some(last) = self.last.replace(model.to_owned()) {
            self.succession.note(&last, model);
        }
    }

    /// Ends a pipeline: the next model does not follow from the last one.
    pub fn end(&mut self) {
        self.last = None;
    }

    /// Returns the other models that follow the present one in at least this share of cases, the likeliest first.
    pub fn likely(&self, least: f64) -> impl Iterator<Item = &str> {
        let last = self.last.as_deref().unwrap_or_default();
        let shares = self.succession.shares(last).into_iter();
        shares.filter(move |(model, share)| *share >= least && *model != last).map(|(model, _)| model)
    }

    /// Returns the recorded successions.
    pub fn succession(&self) -> &Succession {
        &self.succession
    }

    /// Saves the file it was opened from, if any.
    pub fn save(&self) -> Result<(), ScheduleError> {
        self.succession.save()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipeline_is_learned_and_saved() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("models.json");
        let mut next = NextModel::open(&path).unwrap();
        for run in 0..10 {
            let last = if run % 5 == 0 { "fallback" } else { "router" };
            for model in ["router", "specialist", "specialist", last] {
                next.note(model);
            }
            next.end();
            assert_eq!(next.likely(0.0).count(), 0, "nothing follows from a pipeline that is over");
        }
        next.save().unwrap();
        let mut next = NextModel::open(&path).unwrap();
        next.note("router");
        assert_eq!(next.likely(0.5).collect::<Vec<_>>(), ["specialist"]);
        next.note("specialist");
        assert_eq!(next.likely(0.0).collect::<Vec<_>>(), ["router", "fallback"]);
        assert_eq!(next.likely(0.3).collect::<Vec<_>>(), ["router"]);
    }
}
