//! Where a run has come to, on disk.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use burn::module::Module;
use firebox_store::{NewTensorFile, TensorFile, files};

use crate::error::TrainError;
use crate::files::{UNFINISHED, beside, create_folder, remove_folder, sync_folder};
use crate::optimizer::Optimizer;
use crate::parameters::{self, Parameter};

const PREFIX: &str = "step-";
const WEIGHTS: &str = "weights.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";

/// Where a run has come to.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Position {
    /// Steps taken.
    pub step: u64,
    /// The epoch of the next batch.
    pub epoch: u64,
    /// The next batch in it.
    pub batch: usize,
    /// The best evaluation so far.
    pub best: Option<Best>,
    /// Evaluations since then.
    pub stale: u32,
}

/// An evaluation that no other was better than.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Best {
    /// Steps taken when it was made.
    pub step: u64,
    /// The mean loss over what is held out.
    pub loss: f64,
}

impl Position {
    fn texts(&self) -> BTreeMap<String, String> {
        let mut texts = BTreeMap::from([
            ("step".to_owned(), self.step.to_string()),
            ("epoch".to_owned(), self.epoch.to_string()),
            ("batch".to_owned(), self.batch.to_string()),
            ("stale".to_owned(), self.stale.to_string()),
        ]);
        if let Some(best) = self.best {
            texts.insert("best_step".to_owned(), best.step.to_string());
            // The shortest text that is read as the same number.
            texts.insert("best_loss".to_owned(), format!("{:?}", best.loss));
        }
        texts
    }

    fn of(file: &TensorFile) -> Result<Self, TrainError> {
        let best = match file.text("best_step") {
            Ok(_) => Some(Best { step: read(file, "best_step")?, loss: read(file, "best_loss")? }),
            Err(_) => None,
        };
        Ok(Self {
            step: read(file, "step")?,
            epoch: read(file, "epoch")?,
            batch: read(file, "batch")?,
            best,
            stale: read(file, "stale")?,
        })
    }
}

fn read<T: FromStr>(file: &TensorFile, key: &str) -> Result<T, TrainError> {
    let text = file.text(key)?;
    text.parse().map_err(|_| TrainError::malformed(file.path(), format!("{key} is no such number: {text}")))
}

/// A checkpoint whose files are whole.
pub(crate) struct Checkpoint {
    pub(crate) position: Position,
    weights: TensorFile,
    optimizer: TensorFile,
}

impl Checkpoint {
    /// Opens one and reads all of it, to see that it is what was written.
    pub(crate) fn open(folder: &Path) -> Result<Self, TrainError> {
        let weights = TensorFile::open(folder.join(WEIGHTS))?;
        let optimizer = TensorFile::open(folder.join(OPTIMIZER))?;
        let position = Position::of(&weights)?;
        if Position::of(&optimizer)? != position {
            return Err(TrainError::malformed(
                folder,
                "weights and optimizer are of different steps; remove it",
            ));
        }
        Ok(Self { position, weights, optimizer })
    }

    /// The network with the weights of the checkpoint.
    pub(crate) fn network<M: Module>(&self, network: M) -> Result<M, TrainError> {
        parameters::read(network, &self.weights)
    }

    /// Gives the optimizer its state back.
    pub(crate) fn optimizer<M: Module>(
        &self,
        network: &M,
        optimizer: &mut Optimizer,
    ) -> Result<(), TrainError> {
        optimizer.read(network, &self.optimizer)
    }
}

/// The checkpoints of a run: folders in a folder.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    folder: PathBuf,
}

impl Checkpoints {
    /// Takes up a folder, and clears away what a process that died has left in it.
    pub(crate) fn open(folder: PathBuf) -> Result<Self, TrainError> {
        create_folder(&folder)?;
        for path in entries(&folder)? {
            if name(&path).starts_with(UNFINISHED) {
                remove_folder(&path)?;
            }
        }
        Ok(Self { folder })
    }

    /// The steps there are checkpoints of, whole or not, in ascending order.
    pub(crate) fn steps(&self) -> Result<Vec<u64>, TrainError> {
        let mut steps: Vec<u64> = entries(&self.folder)?
            .iter()
            .filter_map(|path| name(path).strip_prefix(PREFIX)?.parse().ok())
            .collect();
        steps.sort_unstable();
        Ok(steps)
    }

    pub(crate) fn path(&self, step: u64) -> PathBuf {
        self.folder.join(format!("{PREFIX}{step:06}"))
    }

    /// The last whole checkpoint, and those behind it that are not whole.
    pub(crate) fn latest(&self) -> Result<(Option<Checkpoint>, Vec<PathBuf>), TrainError> {
        let mut torn = Vec::new();
        for step in self.steps()?.into_iter().rev() {
            let path = self.path(step);
            match Checkpoint::open(&path) {
                Ok(checkpoint) if checkpoint.position.step == step => {
                    return Ok((Some(checkpoint), torn));
                }
                // One that the disk did not give is no torn one: to begin again before it would be to lose it.
                Err(error) if !error.tells_of_content() => return Err(error),
                _ => torn.push(path),
            }
        }
        Ok((None, torn))
    }

    /// Writes one. It is there as a whole or not at all, and replaces one of the same step.
    pub(crate) fn save<M: Module>(
        &self,
        network: &M,
        trainable: &[Parameter],
        optimizer: &Optimizer,
        position: &Position,
    ) -> Result<(), TrainError> {
        let path = self.path(position.step);
        let beside = beside(&path);
        remove_folder(&beside)?;
        create_folder(&beside)?;
        let texts = position.texts();
        let plan: Vec<_> = trainable.iter().map(Parameter::plan).collect();
        let mut file = NewTensorFile::create(beside.join(WEIGHTS), &texts, &plan)?;
        parameters::write(network, &mut file)?;
        file.publish()?;
        let mut file = NewTensorFile::create(beside.join(OPTIMIZER), &texts, &Optimizer::plan(trainable))?;
        optimizer.write(network, &mut file)?;
        file.publish()?;
        sync_folder(&beside)?;
        // A torn one, or one of the same bits: the run has come here before.
        remove_folder(&path)?;
        files::rename(&beside, &path)
            .map_err(|error| TrainError::io(&path, "rename the checkpoint to", error))?;
        sync_folder(&self.folder)
    }

    /// Removes all but the best and the last so many up to where the run is. Those beyond are not whole, or it would be
    /// there: they do not count, and are written anew when it comes there.
    pub(crate) fn prune(&self, keep: usize, position: &Position) -> Result<(), TrainError> {
        let mut steps = self.steps()?;
        steps.retain(|step| *step <= position.step);
        let best = position.best.map(|best| best.step);
        let old = &steps[..steps.len().saturating_sub(keep)];
        for &step in old.iter().filter(|&&step| Some(step) != best) {
            let path = self.path(step);
            // Renamed first, so that there is no moment at which it is there in part.
            let doomed = beside(&path);
            remove_folder(&doomed)?;
            files::rename(&path, &doomed).map_err(|error| TrainError::io(&path, "remove", error))?;
            remove_folder(&doomed)?;
        }
        Ok(())
    }
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, TrainError> {
    let failed = |error| TrainError::io(folder, "list", error);
    let entries = files::list(folder).map_err(failed)?;
    entries.map(|entry| entry.map(|entry| entry.path()).map_err(failed)).collect()
}

fn name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_whole_does_not_stand_in_for_what_is() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::open(folder.path().to_owned()).unwrap();
        for step in [100, 120, 150, 200, 300] {
            std::fs::create_dir(checkpoints.path(step)).unwrap();
        }
        // The last two were found to be broken, and the run has gone on from the one before them.
        let mut position = Position { step: 150, ..Position::default() };
        position.best = Some(Best { step: 100, loss: 1.0 });
        checkpoints.prune(1, &position).unwrap();
        assert_eq!(checkpoints.steps().unwrap(), [100, 150, 200, 300]);
    }
}
