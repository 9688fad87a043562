//! What clients and the server prove themselves with, and how it changes while the server runs.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use crate::api_keys::ApiKeys;
use crate::tls::TlsCertificate;

/// The keys of clients, and the certificate of the server.
#[derive(Debug, Clone, Default)]
pub struct Credentials {
    /// Keys that clients need.
    pub keys: ApiKeys,
    /// The certificate; without one, connections are not encrypted.
    pub certificate: Option<TlsCertificate>,
}

/// Reads the credentials anew, when the process receives SIGHUP. It reports by itself what it cannot read, and returns `None` to
/// keep what is there.
#[derive(Clone)]
pub struct CredentialSource(Arc<dyn Fn() -> Option<Credentials> + Send + Sync>);

impl CredentialSource {
    /// Creates a source that calls a function, which may read files.
    pub fn new(read: impl Fn() -> Option<Credentials> + Send + Sync + 'static) -> Self {
        Self(Arc::new(read))
    }

    pub(crate) fn read(&self) -> Option<Credentials> {
        (self.0)()
    }
}

impl fmt::Debug for CredentialSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CredentialSource")
    }
}

/// The credentials in use. Each request and each connection takes those of its beginning.
#[derive(Debug, Clone)]
pub struct CredentialStore(Arc<RwLock<Arc<Credentials>>>);

impl CredentialStore {
    pub(crate) fn new(credentials: Credentials) -> Self {
        Self(Arc::new(RwLock::new(Arc::new(credentials))))
    }

    /// Returns the credentials in use.
    pub(crate) fn current(&self) -> Arc<Credentials> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the credentials. Running requests and open connections go on. A server with keys stays one with keys, and one with
    /// TLS stays one with TLS: without new ones the old ones stay.
    pub fn replace(&self, mut credentials: Credentials) {
        let mut current = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if credentials.keys.is_open() {
            credentials.keys = current.keys.clone();
        }
        credentials.certificate = credentials.certificate.or_else(|| current.certificate.clone());
        *current = Arc::new(credentials);
    }
}
