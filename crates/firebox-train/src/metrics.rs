//! The metrics file of a run: a line of JSON for every step.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use firebox_store::files::{self, File};
use serde::{Deserialize, Serialize};

use crate::error::TrainError;
use crate::files::write_text;

/// A line of `metrics.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Steps taken, this one included.
    pub step: u64,
    /// The mean loss over the step's target tokens.
    pub loss: f64,
    /// The learning rate.
    pub learning_rate: f64,
    /// The norm of all gradients together, before clipping.
    pub gradient_norm: f64,
    /// Target tokens per second.
    pub tokens_per_second: f64,
    /// The mean loss over what is held out, where it was computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_out_loss: Option<f64>,
}

/// The file and what is in it.
#[derive(Debug)]
pub(crate) struct Metrics {
    path: PathBuf,
    file: File,
    records: Vec<Record>,
}

impl Metrics {
    /// Goes on after so many steps. What was measured beyond is measured again, and a line that was cut off is dropped.
    pub(crate) fn open(path: &Path, step: u64) -> Result<Self, TrainError> {
        let text = match files::read(path) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(TrainError::io(path, "read", error)),
        };
        let records: Vec<Record> = text
            .lines()
            .map_while(|line| serde_json::from_str::<Record>(line).ok())
            .take_while(|record| record.step <= step)
            .collect();
        let mut kept = String::new();
        for line in text.lines().take(records.len()) {
            kept.push_str(line);
            kept.push('\n');
        }
        if kept != text {
            write_text(path, &kept)?;
        }
        let file = File::open_with(path, fs::File::options().create(true).append(true));
        let file = file.map_err(|error| TrainError::io(path, "open", error))?;
        Ok(Self { path: path.to_owned(), file, records })
    }

    pub(crate) fn push(&mut self, record: Record) -> Result<(), TrainError> {
        let mut line = serde_json::to_string(&record)
            .map_err(|error| TrainError::malformed(&self.path, error.to_string()))?;
        line.push('\n');
        // In one piece, so that a process that dies leaves whole lines.
        self.file.write_all(line.as_bytes()).map_err(|error| TrainError::io(&self.path, "write", error))?;
        self.records.push(record);
        Ok(())
    }

    pub(crate) fn records(&self) -> &[Record] {
        &self.records
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: u64) -> Record {
        Record {
            step,
            loss: 0.1,
            learning_rate: 1e-3,
            gradient_norm: 2.0,
            tokens_per_second: 9.0,
            held_out_loss: (step == 2).then_some(0.25),
        }
    }

    #[test]
    fn what_is_beyond_the_checkpoint_or_cut_off_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut metrics = Metrics::open(&path, 0).unwrap();
        (1..=4).for_each(|step| metrics.push(record(step)).unwrap());
        drop(metrics);
        let whole = fs::read_to_string(&path).unwrap();
        fs::write(&path, &whole[..whole.len() - 20]).unwrap();
        let mut metrics = Metrics::open(&path, 9).unwrap();
        assert_eq!(metrics.records(), [record(1), record(2), record(3)]);
        metrics.push(record(4)).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), whole);
        assert_eq!(Metrics::open(&path, 2).unwrap().records(), [record(1), record(2)]);
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 2);
    }
}
