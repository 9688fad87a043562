use std::path::Path;

use crate::ServerError;

/// Who may use a server. Without any key everybody may.
#[derive(Clone, Default)]
pub struct Keys(Vec<String>);

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} keys", self.0.len())
    }
}

impl Keys {
    /// These and no others.
    pub fn new(keys: impl IntoIterator<Item = String>) -> Result<Self, ServerError> {
        let mut all: Vec<String> = Vec::new();
        for key in keys {
            if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(ServerError::Key);
            }
            // A key that is there twice is one key, and its requests belong together.
            if !all.contains(&key) {
                all.push(key);
            }
        }
        Ok(Self(all))
    }

    /// Those of a file, one a line. Empty lines and those that begin with `#` are none.
    pub fn read(path: &Path) -> Result<Self, ServerError> {
        let unusable = |reason: String| ServerError::KeyFile { path: path.to_path_buf(), reason };
        let text = std::fs::read_to_string(path).map_err(|error| unusable(error.to_string()))?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let keys = Self::new(lines.map(str::to_owned))?;
        // A file that was emptied by mistake must not open the door.
        if keys.0.is_empty() { Err(unusable("there is no key in it".into())) } else { Ok(keys) }
    }

    /// The same, with those of another.
    pub fn and(self, other: Self) -> Result<Self, ServerError> {
        Self::new(self.0.into_iter().chain(other.0))
    }

    /// Whether everybody may.
    pub fn is_open(&self) -> bool {
        self.0.is_empty()
    }

    /// What a scope is called on disk: the same after a restart, whatever other keys there are then.
    pub(crate) fn owner(&self, scope: &str) -> String {
        let key = scope.strip_prefix("key ").and_then(|index| self.0.get(index.parse::<usize>().ok()?));
        match key {
            Some(key) => blake3::hash(key.as_bytes()).to_hex()[..32].to_owned(),
            None => "open".into(),
        }
    }

    /// Whose request it is by its `authorization`: a scope that no two keys share. Nothing where it is nobody's.
    pub(crate) fn scope(&self, authorization: Option<&str>) -> Option<String> {
        if self.is_open() {
            return Some(String::new());
        }
        let (scheme, given) = authorization?.split_once(' ')?;
        let given = given.trim();
        // All are compared, whichever it is, so that time does not tell.
        let found = self.0.iter().enumerate().fold(None, |found, (index, key)| {
            if same(key.as_bytes(), given.as_bytes()) { Some(index) } else { found }
        });
        found.filter(|_| scheme.eq_ignore_ascii_case("bearer")).map(|index| format!("key {index}"))
    }
}

/// Takes as long for any two texts of a length.
fn same(one: &[u8], other: &[u8]) -> bool {
    let differs = one.iter().zip(other).fold(0, |differs, (a, b)| std::hint::black_box(differs | (a ^ b)));
    one.len() == other.len() && differs == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_a_scope_of_its_own() {
        let keys = Keys::new(["one", "two", "one"].map(String::from)).unwrap();
        let scope = |header: &str| keys.scope(Some(header));
        assert_eq!(scope("Bearer one"), scope("bearer  one"));
        assert!(scope("Bearer one").is_some() && scope("Bearer two").is_some());
        assert_ne!(scope("Bearer one"), scope("Bearer two"));
        for wrong in ["Bearer", "Bearer ", "Bearer on", "Bearer onee", "Basic one", "one", ""] {
            assert_eq!(scope(wrong), None, "{wrong:?}");
        }
        let owner = |keys: &Keys, header| keys.owner(&keys.scope(Some(header)).unwrap());
        let turned = Keys::new(["two", "one"].map(String::from)).unwrap();
        assert_eq!(owner(&keys, "Bearer one"), owner(&turned, "Bearer one"));
        assert_ne!(owner(&keys, "Bearer one"), owner(&keys, "Bearer two"));
        assert_eq!(keys.scope(None), None);
        assert_eq!(Keys::default().scope(None), Some(String::new()));
    }

    #[test]
    fn a_file_without_a_key_is_no_open_door() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        std::fs::write(&path, "# mine\n one \n\ntwo\n").unwrap();
        assert!(Keys::read(&path).unwrap().scope(Some("Bearer two")).is_some());
        std::fs::write(&path, "# none\n\n").unwrap();
        assert!(matches!(Keys::read(&path), Err(ServerError::KeyFile { .. })));
        assert!(matches!(Keys::new(["a\nb".into()]), Err(ServerError::Key)));
    }
}
