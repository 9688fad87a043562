//! The settings of a run: everything that decides which weights come out of it, apart from network and data.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::error::TrainError;
use crate::precision::Precision;
use crate::schedule::Schedule;

/// The settings of a run, as its `run.toml` has them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Decides whatever is random.
    #[serde(default)]
    pub seed: u64,
    /// Steps of the optimizer.
    pub steps: u64,
    /// Batches whose gradients make one step.
    #[serde(default = "one")]
    pub accumulate: u32,
    /// The norm of all gradients together that larger ones are scaled down to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip: Option<f64>,
    /// Which numbers the loss is computed with.
    #[serde(default)]
    pub precision: Precision,
    /// Steps between two evaluations.
    #[serde(default = "hundred")]
    pub evaluate_every: u64,
    /// Steps between two checkpoints. There is one more at every new best evaluation, and at the end.
    #[serde(default = "hundred")]
    pub checkpoint_every: u64,
    /// The number of checkpoints that are kept beside the best one.
    #[serde(default = "two")]
    pub keep: usize,
    /// Evaluations without a new best one after which the run ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub patience: Option<u32>,
    /// The learning rate.
    pub schedule: Schedule,
    /// The optimizer.
    #[serde(default)]
    pub optimizer: AdamSettings,
    /// The caller's own entries, such as the model and the data. A run is resumed only if they are unchanged.
    #[serde(default, skip_serializing_if = "toml::Table::is_empty")]
    pub about: Table,
}

/// The settings of AdamW.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdamSettings {
    /// The decay rate of the mean gradient.
    pub beta_1: f32,
    /// The decay rate of the mean squared gradient.
    pub beta_2: f32,
    /// Keeps the division from dividing by zero.
    pub epsilon: f32,
    /// The decay of weights per step and unit of the learning rate. Vectors, such as norms and biases, do not decay.
    pub weight_decay: f32,
}

impl Default for AdamSettings {
    fn default() -> Self {
        Self { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-8, weight_decay: 0.01 }
    }
}

impl Settings {
    /// So many steps with this learning rate, and the defaults for the rest.
    pub fn new(steps: u64, schedule: Schedule) -> Self {
        Self {
            seed: 0,
            steps,
            accumulate: one(),
            clip: Some(1.0),
            precision: Precision::default(),
            evaluate_every: hundred(),
            checkpoint_every: hundred(),
            keep: two(),
            patience: None,
            schedule,
            optimizer: AdamSettings::default(),
            about: Table::new(),
        }
    }

    /// The first setting that is another one in `now`.
    pub(crate) fn difference(&self, now: &Self) -> Option<Difference> {
        let value = |settings: &Self| Value::try_from(settings).ok();
        difference(String::new(), value(self).as_ref(), value(now).as_ref())
    }

    pub(crate) fn check(&self) -> Result<(), TrainError> {
        let counts = [
            ("steps", self.steps),
            ("accumulate", u64::from(self.accumulate)),
            ("evaluate_every", self.evaluate_every),
            ("checkpoint_every", self.checkpoint_every),
            ("keep", self.keep as u64),
            ("patience", u64::from(self.patience.unwrap_or(1))),
        ];
        if let Some((setting, _)) = counts.into_iter().find(|&(_, count)| count == 0) {
            let reason = "it has to be at least one";
            return Err(TrainError::Setting { setting, value: "0".into(), reason });
        }
        let wrong = |setting, value: f64, reason| {
            Err(TrainError::Setting { setting, value: value.to_string(), reason })
        };
        if let Some(clip) = self.clip.filter(|clip| !(clip.is_finite() && *clip > 0.0)) {
            return wrong("clip", clip, "it has to be above zero; leave it out not to clip");
        }
        let optimizer = self.optimizer;
        for (setting, beta) in
            [("optimizer.beta_1", optimizer.beta_1), ("optimizer.beta_2", optimizer.beta_2)]
        {
            if !(0.0..1.0).contains(&beta) {
                return wrong(setting, beta.into(), "it has to be at least zero and below one");
            }
        }
        for (setting, value) in
            [("optimizer.epsilon", optimizer.epsilon), ("optimizer.weight_decay", optimizer.weight_decay)]
        {
            if !(value >= 0.0 && value.is_finite()) {
                return wrong(setting, value.into(), "it has to be zero or above");
            }
        }
        self.schedule.check()
    }
}

/// A setting that is another one than it was.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    /// As `run.toml` spells it, with the tables that it is in.
    pub setting: String,
    pub begun: String,
    pub now: String,
}

fn difference(setting: String, begun: Option<&Value>, now: Option<&Value>) -> Option<Difference> {
    let nothing = Value::Table(Table::new());
    match (begun, now) {
        (Some(Value::Table(begun)), Some(Value::Table(now))) => {
            let names: BTreeSet<&String> = begun.keys().chain(now.keys()).collect();
            names.into_iter().find_map(|name| {
                let below = if setting.is_empty() { name.clone() } else { format!("{setting}.{name}") };
                difference(below, begun.get(name), now.get(name))
            })
        }
        // A table that one of them does not have is named by what is in it.
        (None, Some(Value::Table(_))) => difference(setting, Some(&nothing), now),
        (Some(Value::Table(_)), None) => difference(setting, begun, Some(&nothing)),
        _ if begun == now => None,
        _ => {
            let said = |value: Option<&Value>| value.map_or_else(|| "nothing".into(), Value::to_string);
            Some(Difference { setting, begun: said(begun), now: said(now) })
        }
    }
}

fn one() -> u32 {
    1
}

fn two() -> usize {
    2
}

fn hundred() -> u64 {
    100
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings::new(10, Schedule { peak: 1e-3, warm_up: 1, floor: 0.0 })
    }

    #[test]
    fn they_survive_their_file() {
        let mut settings = settings();
        settings.patience = Some(3);
        settings.about.insert("model".into(), "qwen3".into());
        let text = toml::to_string_pretty(&settings).unwrap();
        assert_eq!(toml::from_str::<Settings>(&text).unwrap(), settings);
        let short = "steps = 5\n[schedule]\npeak = 0.1\n";
        assert_eq!(toml::from_str::<Settings>(short).unwrap().evaluate_every, 100);
        assert!(toml::from_str::<Settings>(&format!("stepz = 3\n{short}")).is_err());
    }

    #[test]
    fn the_one_that_differs_is_named() {
        let mut begun = settings();
        let form = Table::from_iter([("scale".to_owned(), Value::from(0.1))]);
        begun.about.insert("form".into(), Value::Table(form));
        let text = toml::to_string_pretty(&begun).unwrap();
        assert_eq!(begun.difference(&toml::from_str(&text).unwrap()), None);
        type Spoil = fn(&mut Settings);
        let others: [(&str, &str, &str, Spoil); 4] = [
            ("steps", "10", "11", |settings| settings.steps = 11),
            ("clip", "1.0", "nothing", |settings| settings.clip = None),
            ("schedule.peak", "0.001", "0.5", |settings| settings.schedule.peak = 0.5),
            ("about.form.scale", "0.1", "nothing", |settings| settings.about.clear()),
        ];
        for (setting, was, is, spoil) in others {
            let mut now = begun.clone();
            spoil(&mut now);
            let found = begun.difference(&now).unwrap();
            assert_eq!((&*found.setting, &*found.begun, &*found.now), (setting, was, is));
        }
    }

    #[test]
    fn impossible_ones_are_refused_by_name() {
        type Spoil = fn(&mut Settings);
        let wrong: [(&str, Spoil); 6] = [
            ("steps", |settings| settings.steps = 0),
            ("accumulate", |settings| settings.accumulate = 0),
            ("patience", |settings| settings.patience = Some(0)),
            ("clip", |settings| settings.clip = Some(0.0)),
            ("optimizer.beta_2", |settings| settings.optimizer.beta_2 = 1.0),
            ("optimizer.weight_decay", |settings| settings.optimizer.weight_decay = f32::NAN),
        ];
        assert!(settings().check().is_ok());
        for (name, spoil) in wrong {
            let mut settings = settings();
            spoil(&mut settings);
            let error = settings.check().unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }
}
