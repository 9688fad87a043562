//! The certificate of a server that speaks TLS.

use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::ServerConfig as RustlsConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::error::ServerError;

/// A certificate and its private key, with which connections are encrypted.
#[derive(Debug, Clone)]
pub struct TlsCertificate(pub(crate) Arc<RustlsConfig>);

impl TlsCertificate {
    /// Reads a chain of certificates and the private key of the first from PEM files.
    pub fn read(certificate: &Path, key: &Path) -> Result<Self, ServerError> {
        let unusable = |path: &Path, reason: String| ServerError::Tls { path: path.to_path_buf(), reason };
        let pem =
            |path: &Path| std::fs::read(path).map_err(|error: io::Error| unusable(path, error.to_string()));
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem(certificate)?).collect();
        let chain = chain.map_err(|error| unusable(certificate, error.to_string()))?;
        if chain.is_empty() {
            return Err(unusable(certificate, "it contains no certificate".into()));
        }
        let private =
            PrivateKeyDer::from_pem_slice(&pem(key)?).map_err(|error| unusable(key, error.to_string()))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = RustlsConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config =
            config.and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, private));
        let mut config = config.map_err(|error| unusable(certificate, error.to_string()))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(Arc::new(config)))
    }
}
