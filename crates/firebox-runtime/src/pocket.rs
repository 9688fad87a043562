use std::path::{Path, PathBuf};

use crate::RuntimeError;

/// Where it is in the source tree that the program was built from.
const IN_THE_SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/pocket");

/// Where it is beside an installed program.
const BESIDE_THE_PROGRAM: &str = "../share/firebox/pocket";

/// The model of those who name none: that of the source tree, or the one that was installed along.
pub fn pocket_model() -> Result<PathBuf, RuntimeError> {
    let program = std::env::current_exe().unwrap_or_default();
    let beside = program.parent().unwrap_or(Path::new(".")).join(BESIDE_THE_PROGRAM);
    let places = [PathBuf::from(IN_THE_SOURCES), beside.clone()];
    places.iter().find_map(|place| usable(place)).ok_or(RuntimeError::NoPocketModel { beside })
}

/// The place without its detours, if there is a model.
fn usable(place: &Path) -> Option<PathBuf> {
    // The recipe alone is no model.
    place.join("config.json").is_file().then(|| place.canonicalize().ok()).flatten()
}
