use std::path::Path;

use firebox_runtime::fit::FitConfig;
use firebox_runtime::heads::RackConfig;
use firebox_runtime::{Capacity, Model, RuntimeError, Saved, Script, Session, device, pocket_model};

use crate::FireboxError;

/// An opened model that one can talk to.
#[derive(Debug)]
pub(crate) struct Opened {
    pub model: Model,
    /// What conversations with it are written by.
    pub script: Script,
    /// How much of a conversation is remembered.
    pub capacity: Capacity,
}

impl Opened {
    /// By its path, or the pocket model; in so many bytes for the whole process, or as a whole.
    pub fn open(path: Option<&Path>, memory: Option<u64>) -> Result<Self, FireboxError> {
        let path = path.map_or_else(pocket_model, |path| Ok(path.to_owned()));
        path.and_then(|path| Self::loaded(&path, memory)).map_err(|source| FireboxError::Model { source })
    }

    fn loaded(path: &Path, memory: Option<u64>) -> Result<Self, RuntimeError> {
        let cpu = device("cpu")?;
        let model = match memory {
            Some(memory) => Model::open_within(path, &cpu, &FitConfig::new(memory))?,
            None => Model::open(path, &cpu)?,
        };
        let model = model.with_heads(RackConfig::patient())?;
        // Nobody talks to a model whose text cannot be read.
        model.tokenizer()?;
        Ok(Self { script: Script::of(&model)?, capacity: remembered(&model)?, model })
    }

    /// A session that goes on from a file.
    pub fn resumed(&self, path: &Path) -> Result<(Session, String), RuntimeError> {
        let fresh = self.model.session()?;
        let pool = fresh.cache().pool();
        let saved = Saved::open(path, &self.model, pool.layout().kv_dtype)?;
        let session = self.model.restored_in(&saved, pool)?;
        Ok((session, saved.note().to_owned()))
    }
}

/// What conversations remember.
fn remembered(model: &Model) -> Result<Capacity, RuntimeError> {
    let context = model.decoder()?.config().max_positions.min(model.planned_tokens());
    Ok(Capacity::of(context, None, None))
}

#[cfg(test)]
mod tests {
    use firebox_runtime::planner::Mode;

    use super::*;

    #[test]
    fn no_more_is_remembered_than_there_are_pages_for() {
        let config = FitConfig { mode: Mode::Throughput, ..FitConfig::new(1 << 30) };
        let model = Model::open_within(pocket_model().unwrap(), &device("cpu").unwrap(), &config).unwrap();
        let pages = model.fit().unwrap().plan().kv_tokens;
        assert!(pages < model.decoder().unwrap().config().max_positions);
        assert!(remembered(&model).unwrap().fits(pages));
    }
}
