//! The API keys of a server, and the scope that each key gives its requests.

use std::fmt;
use std::path::Path;

use crate::error::ServerError;
use crate::key_share::KeyShare;

/// A key that a server accepts.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey {
    key: String,
    /// Whether it may change what all keys share, such as the heads in memory.
    is_admin: bool,
    /// What it may have of a model; what is absent is that of every key.
    share: KeyShare,
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiKey").field("is_admin", &self.is_admin).finish_non_exhaustive()
    }
}

impl ApiKey {
    /// Creates a key that may change nothing of others.
    pub fn new(key: String) -> Result<Self, ServerError> {
        if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(ServerError::Key);
        }
        Ok(Self { key, is_admin: false, share: KeyShare::default() })
    }

    /// Lets the key change what all keys share, or not.
    pub fn with_admin(mut self, is_admin: bool) -> Self {
        self.is_admin = is_admin;
        self
    }

    /// Sets what the key may have of a model beside others.
    pub fn with_share(mut self, share: KeyShare) -> Self {
        self.share = share;
        self
    }

    /// Reads a line of a file: a key, or a key and `admin`.
    fn from_line(line: &str) -> Result<Self, String> {
        let mut words = line.split_whitespace();
        let key =
            Self::new(words.next().unwrap_or_default().to_owned()).map_err(|error| error.to_string())?;
        words.try_fold(key, |key, word| match word {
            "admin" => Ok(key.with_admin(true)),
            other => Err(format!("{other:?} behind a key is not known; there is `admin`")),
        })
    }

    /// Returns the scope of the key's requests. It depends on the key alone, so it survives restarts and changes to other keys.
    fn scope(&self) -> String {
        format!("{SCOPE}{}", &blake3::hash(self.key.as_bytes()).to_hex()[..32])
    }
}

/// The API keys that a server accepts. Without any, the server is open to all.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ApiKeys(Vec<ApiKey>);

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} keys", self.0.len())
    }
}

/// A request's sender: the scope of its key, and what the key may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    pub scope: String,
    pub is_admin: bool,
}

impl ApiKeys {
    /// Accepts these keys. Duplicates count once.
    pub fn new(keys: impl IntoIterator<Item = String>) -> Result<Self, ServerError> {
        Ok(Self::default().with(keys.into_iter().map(ApiKey::new).collect::<Result<Vec<_>, _>>()?))
    }

    /// Accepts more keys. A key that is there twice may do what either may.
    pub fn with(mut self, keys: impl IntoIterator<Item = ApiKey>) -> Self {
        for key in keys {
            // Requests with a duplicated key share one scope.
            match self.0.iter_mut().find(|known| known.key == key.key) {
                Some(known) => {
                    known.is_admin |= key.is_admin;
                    known.share = key.share.or(known.share);
                }
                None => self.0.push(key),
            }
        }
        self
    }

    /// Reads keys from a file, one a line, each alone or followed by `admin`. Empty lines and lines that begin with `#` are
    /// skipped.
    pub fn read(path: &Path) -> Result<Self, ServerError> {
        let unusable = |reason: String| ServerError::KeyFile { path: path.to_path_buf(), reason };
        let text = std::fs::read_to_string(path).map_err(|error| unusable(error.to_string()))?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let keys =
            lines.map(|line| ApiKey::from_line(line).map_err(unusable)).collect::<Result<Vec<_>, _>>()?;
        // An accidentally emptied file must not open the server.
        if keys.is_empty() {
            Err(unusable("it contains no key".into()))
        } else {
            Ok(Self::default().with(keys))
        }
    }

    /// Returns the keys of both sets.
    pub fn merge(self, other: Self) -> Self {
        self.with(other.0)
    }

    /// Returns true if no key is required.
    pub fn is_open(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the share of the key that requests of a scope have.
    pub(crate) fn share(&self, scope: &str) -> KeyShare {
        self.0.iter().find(|key| key.scope() == scope).map(|key| key.share).unwrap_or_default()
    }

    /// Returns the sender of a request by its `authorization` header; `None` if the key is missing or wrong. Without keys, all
    /// requests have one scope, and the senders are no admins.
    pub(crate) fn identify(&self, authorization: Option<&str>) -> Option<Identity> {
        if self.is_open() {
            return Some(Identity { scope: String::new(), is_admin: false });
        }
        let (scheme, given) = authorization?.split_once(' ')?;
        let given = given.trim();
        // Compares with every key, so that timing reveals nothing.
        let found = self.0.iter().fold(None, |found, key| {
            if same(key.key.as_bytes(), given.as_bytes()) { Some(key) } else { found }
        });
        let found = found.filter(|_| scheme.eq_ignore_ascii_case("bearer"))?;
        Some(Identity { scope: found.scope(), is_admin: found.is_admin })
    }
}

/// The beginning of the scopes of keys.
const SCOPE: &str = "key ";

/// Returns the name of a scope on disk.
pub(crate) fn owner(scope: &str) -> String {
    scope.strip_prefix(SCOPE).unwrap_or("open").to_owned()
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
        let scope = |header: &str| keys.identify(Some(header)).map(|found| found.scope);
        assert_eq!(scope("Bearer one"), scope("bearer  one"));
        assert!(scope("Bearer one").is_some() && scope("Bearer two").is_some());
        assert_ne!(scope("Bearer one"), scope("Bearer two"));
        for wrong in ["Bearer", "Bearer ", "Bearer on", "Bearer onee", "Basic one", "one", ""] {
            assert_eq!(scope(wrong), None, "{wrong:?}");
        }
        let owner = |keys: &ApiKeys, header| owner(&keys.identify(Some(header)).unwrap().scope);
        let turned = ApiKeys::new(["two", "one"].map(String::from)).unwrap();
        assert_eq!(owner(&keys, "Bearer one"), owner(&turned, "Bearer one"));
        assert_ne!(owner(&keys, "Bearer one"), owner(&keys, "Bearer two"));
        assert_eq!(keys.identify(None), None);
        let open = Identity { scope: String::new(), is_admin: false };
        assert_eq!(ApiKeys::default().identify(None), Some(open));
    }

    #[test]
    fn a_key_file_without_keys_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        std::fs::write(&path, "# mine\n one \n\ntwo\n").unwrap();
        assert!(!ApiKeys::read(&path).unwrap().identify(Some("Bearer two")).unwrap().is_admin);
        std::fs::write(&path, "one\ntwo  admin\n").unwrap();
        let keys = ApiKeys::read(&path).unwrap();
        assert!(keys.identify(Some("Bearer two")).unwrap().is_admin);
        assert!(!keys.identify(Some("Bearer one")).unwrap().is_admin);
        std::fs::write(&path, "one administrator\n").unwrap();
        assert!(ApiKeys::read(&path).unwrap_err().to_string().contains("administrator"));
        std::fs::write(&path, "# none\n\n").unwrap();
        assert!(matches!(ApiKeys::read(&path), Err(ServerError::KeyFile { .. })));
        assert!(matches!(ApiKeys::new(["a\nb".into()]), Err(ServerError::Key)));
    }
}
