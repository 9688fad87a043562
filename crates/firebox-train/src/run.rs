//! A folder that a training run lives in.

use std::path::{Path, PathBuf};
use std::{fs, io};

use burn::module::Module;
use firebox_store::files::{self, File};

use crate::checkpoint::{Checkpoint, Checkpoints, Position};
use crate::error::TrainError;
use crate::files::{self as whole, create_folder, write_text};
use crate::metrics::{Metrics, Record};
use crate::optimizer::Optimizer;
use crate::parameters::Parameter;
use crate::plot;
use crate::settings::{Difference, Settings};

const SETTINGS: &str = "run.toml";
const METRICS: &str = "metrics.jsonl";
const PLOT: &str = "loss.svg";
const CHECKPOINTS: &str = "checkpoints";
const LOCK: &str = ".lock";

/// A folder that a training run lives in:
///
/// ```text
/// run.toml                         what the run is: its settings
/// metrics.jsonl                    a line for every step
/// loss.svg                         the same as curves
/// checkpoints/step-000100/         weights.safetensors, optimizer.safetensors
/// ```
///
/// The files of a checkpoint end in their own hashes and come to their place together by one rename. One that is not
/// whole all the same is passed over for the one before. While a run is open no other process can open it.
#[derive(Debug)]
pub struct Run {
    folder: PathBuf,
    settings: Settings,
    checkpoints: Checkpoints,
    /// Held as long as the run is open. The system lets go of it when the process ends, however it ends.
    _lock: File,
}

/// Which checkpoint of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// The last one.
    Latest,
    /// The one with the best evaluation; the last one if there was none.
    Best,
    /// The one after so many steps.
    Step(u64),
}

impl Run {
    /// Begins a run in a folder that holds none. The folder is made where there is none.
    pub fn create(folder: impl Into<PathBuf>, settings: Settings) -> Result<Self, TrainError> {
        let folder = folder.into();
        settings.check()?;
        create_folder(&folder)?;
        let lock = lock(&folder)?;
        let path = folder.join(SETTINGS);
        if path.exists() {
            return Err(TrainError::RunExists { folder });
        }
        let checkpoints = folder.join(CHECKPOINTS);
        if checkpoints.exists() {
            // Settings are written first, so checkpoints without settings mean that `run.toml` was removed.
            let reason = "these are of a run whose run.toml is gone; remove them, or choose another folder";
            return Err(TrainError::malformed(&checkpoints, reason));
        }
        let text = toml::to_string_pretty(&settings)
            .map_err(|error| TrainError::malformed(&path, error.to_string()))?;
        write_text(&path, &text)?;
        Ok(Self { checkpoints: Checkpoints::open(checkpoints)?, folder, settings, _lock: lock })
    }

    /// Opens a run, to go on with it or to take weights out of it.
    pub fn open(folder: impl Into<PathBuf>) -> Result<Self, TrainError> {
        let folder = folder.into();
        let path = folder.join(SETTINGS);
        let text = match files::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(TrainError::NoRun { folder });
            }
            Err(error) => return Err(TrainError::io(&path, "read", error)),
        };
        let settings: Settings =
            toml::from_str(&text).map_err(|error| TrainError::malformed(&path, error.to_string()))?;
        settings.check()?;
        let lock = lock(&folder)?;
        let checkpoints = Checkpoints::open(folder.join(CHECKPOINTS))?;
        Ok(Self { folder, settings, checkpoints, _lock: lock })
    }

    /// Opens the run of a folder, or begins it. If there is one, it has to have been begun with the same settings.
    pub fn create_or_open(folder: impl Into<PathBuf>, settings: Settings) -> Result<Self, TrainError> {
        let folder = folder.into();
        let run = match Self::open(folder.clone()) {
            Err(TrainError::NoRun { .. }) => return Self::create(folder, settings),
            run => run?,
        };
        match run.settings.difference(&settings) {
            None => Ok(run),
            Some(Difference { setting, begun, now }) => {
                Err(TrainError::OtherRun { folder, setting, begun, now })
            }
        }
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the settings that the run was begun with.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Puts the weights of a checkpoint into a network like the one that was trained.
    pub fn restore<M: Module>(&self, network: M, which: Which) -> Result<(M, Position), TrainError> {
        let checkpoint = self.checkpoint(which)?;
        Ok((checkpoint.network(network)?, checkpoint.position))
    }

    /// The folder of a checkpoint.
    pub fn checkpoint_folder(&self, which: Which) -> Result<PathBuf, TrainError> {
        Ok(self.checkpoints.path(self.checkpoint(which)?.position.step))
    }

    fn checkpoint(&self, which: Which) -> Result<Checkpoint, TrainError> {
        let latest = || {
            let (latest, _) = self.checkpoints.latest()?;
            let folder = self.folder.clone();
            latest.ok_or_else(|| TrainError::NoCheckpoint { folder, which: "any step".into() })
        };
        match which {
            Which::Latest => latest(),
            Which::Step(step) => Checkpoint::open(&self.checkpoints.path(step)),
            Which::Best => {
                let latest = latest()?;
                match latest.position.best {
                    Some(best) if best.step != latest.position.step => {
                        Checkpoint::open(&self.checkpoints.path(best.step))
                    }
                    _ => Ok(latest),
                }
            }
        }
    }

    /// The last whole checkpoint, and those behind it that are not whole.
    pub(crate) fn latest(&self) -> Result<(Option<Checkpoint>, Vec<PathBuf>), TrainError> {
        self.checkpoints.latest()
    }

    pub(crate) fn save<M: Module>(
        &self,
        network: &M,
        trainable: &[Parameter],
        optimizer: &Optimizer,
        position: &Position,
    ) -> Result<(), TrainError> {
        self.checkpoints.save(network, trainable, optimizer, position)?;
        self.checkpoints.prune(self.settings.keep, position)
    }

    pub(crate) fn metrics(&self, step: u64) -> Result<Metrics, TrainError> {
        Metrics::open(&self.folder.join(METRICS), step)
    }

    pub(crate) fn plot(&self, records: &[Record]) -> Result<(), TrainError> {
        let path = self.folder.join(PLOT);
        match plot::losses(records) {
            Some(image) => write_text(&path, &image),
            None => Ok(()),
        }
    }
}

fn lock(folder: &Path) -> Result<File, TrainError> {
    let path = folder.join(LOCK);
    let file = File::open_with(&path, fs::File::options().create(true).append(true));
    let file = file.map_err(|error| TrainError::io(&path, "open", error))?;
    whole::lock(&file, &path, "another process has the run open; wait until it has ended, or stop it")?;
    Ok(file)
}
