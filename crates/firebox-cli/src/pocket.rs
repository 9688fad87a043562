//! The model of those who name none.

use std::path::PathBuf;

use crate::outcome::usage;

/// The pocket model; who has none is told where models come from.
pub fn pocket_model() -> anyhow::Result<PathBuf> {
    firebox_runtime::pocket_model().map_err(|error| {
        usage(format!(
            "{error}, as in `firebox chat MODEL`; `firebox pull ORG/NAME` fetches one, and \
             `firebox train assets/pocket/recipe.toml` makes the pocket model"
        ))
    })
}
