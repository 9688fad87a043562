//! Finds the pocket model.

use std::path::{Path, PathBuf};

use crate::RuntimeError;

/// Its path in the source tree that the program was built from.
const IN_THE_SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/pocket");

/// Its path relative to an installed program.
const BESIDE_THE_PROGRAM: &str = "../share/firebox/pocket";

/// Returns the pocket model, the default model: from the source tree, or installed with the program.
pub fn pocket_model() -> Result<PathBuf, RuntimeError> {
    let program = std::env::current_exe().unwrap_or_default();
    let beside = program.parent().unwrap_or(Path::new(".")).join(BESIDE_THE_PROGRAM);
    let places = [PathBuf::from(IN_THE_SOURCES), beside.clone()];
    places.iter().find_map(|place| usable(place)).ok_or(RuntimeError::NoPocketModel { beside })
}

/// Returns the canonical path, if there is a model.
fn usable(place: &Path) -> Option<PathBuf> {
    // A folder with only the recipe is not a model.
    place.join("config.json").is_file().then(|| place.canonicalize().ok()).flatten()
}
