//! An opened model, ready for conversations.

use std::path::Path;

use firebox_runtime::heads::HeadPoolConfig;
use firebox_runtime::residency::ResidencyOptions;
use firebox_runtime::{Capacity, Model, RuntimeError, Script, Session, SessionFile, device, pocket_model};

use crate::error::FireboxError;

/// An opened model for conversations.
#[derive(Debug)]
pub(crate) struct OpenModel {
    pub model: Model,
    /// Renders conversations.
    pub script: Script,
    /// Capacity of conversations.
    pub capacity: Capacity,
}

impl OpenModel {
    /// Opens a path or the pocket model, within a memory limit for the process if given.
    pub fn open(path: Option<&Path>, memory: Option<u64>) -> Result<Self, FireboxError> {
        let path = path.map_or_else(pocket_model, |path| Ok(path.to_owned()));
        path.and_then(|path| Self::loaded(&path, memory)).map_err(|source| FireboxError::Model { source })
    }

    fn loaded(path: &Path, memory: Option<u64>) -> Result<Self, RuntimeError> {
        let cpu = device("cpu")?;
        let model = match memory {
            Some(memory) => Model::open_within(path, &cpu, &ResidencyOptions::new(memory))?,
            None => Model::open(path, &cpu)?,
        };
        let model = model.with_heads(HeadPoolConfig::patient())?;
        // Conversations need a tokenizer.
        model.tokenizer()?;
        Ok(Self { script: Script::new(&model)?, capacity: Capacity::for_model(&model)?, model })
    }

    /// Restores a session and its note from a file.
    pub fn restore(&self, path: &Path) -> Result<(Session, String), RuntimeError> {
        let fresh = self.model.session()?;
        let pool = fresh.cache().pool();
        let saved = SessionFile::open(path, &self.model, pool.layout().kv_dtype)?;
        let session = self.model.restored_in(&saved, pool)?;
        Ok((session, saved.note().to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use firebox_runtime::planner::Mode;

    use super::*;

    #[test]
    fn the_capacity_is_limited_by_the_planned_pages() {
        let config = ResidencyOptions { mode: Mode::Throughput, ..ResidencyOptions::new(1 << 30) };
        let model = Model::open_within(pocket_model().unwrap(), &device("cpu").unwrap(), &config).unwrap();
        let pages = model.residency().unwrap().plan().kv_tokens;
        assert!(pages < model.decoder().unwrap().config().max_positions);
        assert!(Capacity::for_model(&model).unwrap().fits(pages));
    }
}
