use std::path::Path;

use crate::ScheduleError;
use crate::succession::Succession;

/// Which model is needed next, learned from which one followed which.
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
    /// With what was learned before, and saved there.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ScheduleError> {
        Ok(Self { succession: Succession::open(path)?, last: None })
    }

    /// Notes that a model is in use now.
    pub fn note(&mut self, model: &str) {
        if let Some(last) = self.last.replace(model.to_owned()) {
            self.succession.note(&last, model);
        }
    }

    /// The pipeline is over: what comes next does not follow from what was.
    pub fn end(&mut self) {
        self.last = None;
    }

    /// Other models that follow the one in use in at least such a share of the cases, the likeliest first.
    pub fn likely(&self, least: f64) -> impl Iterator<Item = &str> {
        let last = self.last.as_deref().unwrap_or_default();
        let shares = self.succession.shares(last).into_iter();
        shares.filter(move |(model, share)| *share >= least && *model != last).map(|(model, _)| model)
    }

    /// What was learned.
    pub fn succession(&self) -> &Succession {
        &self.succession
    }

    /// Writes it to where it came from; nothing where it came from nowhere.
    pub fn save(&self) -> Result<(), ScheduleError> {
        self.succession.save()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipeline_is_learned_and_remembered() {
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
