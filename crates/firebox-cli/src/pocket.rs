//! The model of those who name none.

use std::path::{Path, PathBuf};

use crate::outcome::usage;

/// Where it is in the source tree that the command was built from.
const IN_THE_SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/pocket");

/// Where it is beside an installed command.
const BESIDE_THE_COMMAND: &str = "../share/firebox/pocket";

/// The pocket model: that of the source tree, or the one that was installed along.
pub fn pocket_model() -> anyhow::Result<PathBuf> {
    let beside = std::env::current_exe().ok();
    let beside = beside.and_then(|command| Some(command.parent()?.join(BESIDE_THE_COMMAND)));
    let places = [Some(PathBuf::from(IN_THE_SOURCES)), beside];
    places.into_iter().flatten().find_map(|place| usable(&place)).ok_or_else(|| {
        usage(
            "no model, and the pocket model is neither in the sources of this command nor installed with it; name a model \
             as in `firebox chat MODEL`, fetch one by `firebox pull ORG/NAME`, or make the pocket model by \
             `firebox train assets/pocket/recipe.toml`",
        )
    })
}

/// The place without its detours, if there is a model.
fn usable(place: &Path) -> Option<PathBuf> {
    // The recipe alone is no model.
    place.join("config.json").is_file().then(|| place.canonicalize().ok()).flatten()
}
