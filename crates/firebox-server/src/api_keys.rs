//! The API keys of a server, and the scope that each key gives its requests.

use std::path::Path;

use crate::error::ServerError;

/// The API keys that a server accepts. Without any, the server is open to all.
#[derive(Clone, Default)]
pub struct ApiKeys(Vec<String>);

impl std::fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} keys", self.0.len())
    }
}

impl ApiKeys {
    /// Accepts these keys. Duplicates count once.
    pub fn new(keys: impl IntoIterator<Item = String>) -> Result<Self, ServerError> {
        let mut all: Vec<String> = Vec::new();
        for key in keys {
            if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(ServerError::Key);
            }
            // Requests with a duplicated key share one scope.
            if !all.contains(&key) {
                all.push(key);
            }
        }
        Ok(Self(all))
    }

    /// Reads keys from a file, one a line. Empty lines and lines that begin with `#` are skipped.
    pub fn read(path: &Path) -> Result<Self, ServerError> {
        let unusable = |reason: String| ServerError::KeyFile { path: path.to_path_buf(), reason };
        let text = std::fs::read_to_string(path).map_err(|error| unusable(error.to_string()))?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let keys = Self::new(lines.map(str::to_owned))?;
        // An accidentally emptied file must not open the server.
        if keys.0.is_empty() { Err(unusable("it contains no key".into())) } else { Ok(keys) }
    }

    /// Returns the keys of both sets.
    pub fn merge(self, other: Self) -> Result<Self, ServerError> {
        Self::new(self.0.into_iter().chain(other.0))
    }

    /// Returns true if no key is required.
    pub fn is_open(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the name of a scope on disk. It depends on the key alone, so it survives restarts and changes to
    /// other keys.
    pub(crate) fn owner(&self, scope: &str) -> String {
        let key = scope.strip_prefix("key ").and_then(|index| self.0.get(index.parse::<usize>().ok()?));
        match key {
            Some(key) => blake3::hash(key.as_bytes()).to_hex()[..32].to_owned(),
            None => "open".into(),
        }
    }

    /// Returns the scope of a request by its `authorization` header, unique to each key; `None` if the key is
    /// missing or wrong.
    pub(crate) fn scope(&self, authorization: Option<&str>) -> Option<String> {
        if self.is_open() {
            return Some(String::new());
        }
        let (scheme, given) = authorization?.split_once(' ')?;
        let given = given.trim();
        // Compares with every key, so that timing reveals nothing.
        let found = self.0.iter().enumerate().fold(None, |found, (index, key)| {
            if same(key.as_bytes(), given.as_bytes()) { Some(index) } else { found }
        });
        found.filter(|_| scheme.eq_ignore_ascii_case("bearer")).map(|index| format!("key {index}"))
    }
}

/// Compares in time that depends on the lengths alone.
fn same(one: &[u8], other: &[u8]) -> bool {
    let differs = one.iter().zip(other).fold(0, |differs, (a, b)| std::hint::black_box(differs | (a ^ b)));
    one.len() == other.len() && differs == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_a_scope_of_its_own() {
        let keys = ApiKeys::new(["one", "two", "one"].map(String::from)).unwrap();
        let scope = |header: &str| keys.scope(Some(header));
        assert_eq!(scope("Bearer one"), scope("bearer  one"));
        assert!(scope("Bearer one").is_some() && scope("Bearer two").is_some());
        assert_ne!(scope("Bearer one"), scope("Bearer two"));
        for wrong in ["Bearer", "Bearer ", "Bearer on", "Bearer onee", "Basic one", "one", ""] {
            assert_eq!(scope(wrong), None, "{wrong:?}");
        }
        let owner = |keys: &ApiKeys, header| keys.owner(&keys.scope(Some(header)).unwrap());
        let turned = ApiKeys::new(["two", "one"].map(String::from)).unwrap();
        assert_eq!(owner(&keys, "Bearer one"), owner(&turned, "Bearer one"));
        assert_ne!(owner(&keys, "Bearer one"), owner(&keys, "Bearer two"));
        assert_eq!(keys.scope(None), None);
        assert_eq!(ApiKeys::default().scope(None), Some(String::new()));
    }

    #[test]
    fn a_key_file_without_keys_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        std::fs::write(&path, "# mine\n one \n\ntwo\n").unwrap();
        assert!(ApiKeys::read(&path).unwrap().scope(Some("Bearer two")).is_some());
        std::fs::write(&path, "# none\n\n").unwrap();
        assert!(matches!(ApiKeys::read(&path), Err(ServerError::KeyFile { .. })));
        assert!(matches!(ApiKeys::new(["a\nb".into()]), Err(ServerError::Key)));
    }
}
