//! Holds nothing: a development dependency that selects features (see `Cargo.toml`).
