//! The `[[key]]` entries of `firebox.toml`.

use std::path::Path;

use firebox_server::{ApiKey, KeyShare};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::file::{File, meant};

const KEYS: [&str; 5] = ["key", "admin", "weight", "running", "waiting"];

/// Reads the keys of a file, and nothing else of it.
pub(super) fn read_keys(path: &Path, text: &str) -> anyhow::Result<Vec<ApiKey>> {
    let file = File { path, text };
    let table = file.parse()?;
    match table.get_ref().get("key").map(Spanned::get_ref) {
        Some(DeValue::Array(keys)) => keys.iter().map(|key| file.key(key)).collect(),
        _ => Ok(Vec::new()),
    }
}

impl<'a> File<'a> {
    /// Parses the file as TOML.
    pub(super) fn parse(&self) -> anyhow::Result<Spanned<DeTable<'a>>> {
        DeTable::parse(self.text)
            .map_err(|error| self.wrong(error.span().unwrap_or_default(), error.message().to_owned()))
    }

    /// Reads a key of clients.
    pub(super) fn key(&self, entry: &Spanned<DeValue<'_>>) -> anyhow::Result<ApiKey> {
        let DeValue::Table(table) = entry.get_ref() else {
            return Err(self.wrong(entry.span(), "write [[key]], and key = \"…\" below".into()));
        };
        let (mut key, mut is_admin, mut share) = (None, false, KeyShare::default());
        for item @ (name, value) in table {
            match &**name.get_ref() {
                "key" => {
                    let read = ApiKey::new(self.text(item)?);
                    key = Some(read.map_err(|error| self.wrong(value.span(), error.to_string()))?);
                }
                "admin" => is_admin = self.truth(item)?,
                "weight" => share.weight = Some(self.count(item, 1)?),
                "running" => share.running = Some(self.count(item, 1)? as usize),
                "waiting" => share.waiting = Some(self.count(item, 0)? as usize),
                other => {
                    let reason = format!("a key has no {other:?}; it has {}", KEYS.join(", "));
                    return Err(self.wrong(name.span(), meant(reason, other, KEYS.into_iter())));
                }
            }
        }
        match key {
            Some(key) => Ok(key.with_admin(is_admin).with_share(share)),
            None => Err(self.wrong(entry.span(), "a key needs its text, such as key = \"secret\"".into())),
        }
    }
}
