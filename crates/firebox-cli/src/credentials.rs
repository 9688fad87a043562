//! The keys and the certificate of `firebox serve`.

use std::path::PathBuf;

use clap::{ArgAction, Args};
use firebox_server::{ApiKey, ApiKeys, CredentialSource, Credentials, TlsCertificate};

use crate::configuration::Configuration;
use crate::console::Console;
use crate::outcome::usage;

/// Options about who may use the server, and how it proves what it is.
#[derive(Debug, Clone, Args)]
pub struct CredentialArgs {
    /// Let only those in who send this key; may be given several times
    #[arg(long, value_name = "KEY", env = "FIREBOX_API_KEY", hide_env_values = true)]
    api_key: Vec<String>,
    /// The same for the keys in a file, one a line, `admin` behind those that may load heads; read anew at SIGHUP
    #[arg(long, value_name = "FILE", env = "FIREBOX_API_KEY_FILE")]
    api_key_file: Option<PathBuf>,
    /// A key that may also load and evict the heads that all use; may be given several times
    #[arg(long, value_name = "KEY", env = "FIREBOX_ADMIN_KEY", hide_env_values = true)]
    admin_key: Vec<String>,
    /// Let other machines use a server that needs no key
    #[arg(
        long, env = "FIREBOX_INSECURE", action = ArgAction::Set, value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_value = "false", default_missing_value = "true", hide_possible_values = true
    )]
    pub insecure: bool,
    /// Encrypt connections with the certificates in this PEM file; read anew at SIGHUP
    #[arg(long, value_name = "FILE", env = "FIREBOX_TLS_CERT")]
    tls_cert: Option<PathBuf>,
    /// The private key of --tls-cert, as PEM
    #[arg(long, value_name = "FILE", env = "FIREBOX_TLS_KEY")]
    tls_key: Option<PathBuf>,
}

impl CredentialArgs {
    /// Returns whether connections are encrypted.
    pub fn encrypts(&self) -> bool {
        self.tls_cert.is_some()
    }

    /// Reads the keys and the certificate. `listed` are the keys of firebox.toml.
    pub fn read(&self, listed: &[ApiKey]) -> anyhow::Result<Credentials> {
        let mut keys = ApiKeys::new(self.api_key.iter().cloned())?.with(listed.iter().cloned());
        for key in &self.admin_key {
            keys = keys.with([ApiKey::new(key.clone())?.with_admin(true)]);
        }
        if let Some(path) = &self.api_key_file {
            keys = keys.merge(ApiKeys::read(path)?);
        }
        let certificate = match (&self.tls_cert, &self.tls_key) {
            (Some(certificate), Some(key)) => Some(TlsCertificate::read(certificate, key)?),
            (None, None) => None,
            (Some(_), None) => return Err(usage("--tls-cert needs its private key; give --tls-key FILE")),
            (None, Some(_)) => return Err(usage("--tls-key needs its certificate; give --tls-cert FILE")),
        };
        Ok(Credentials { keys, certificate })
    }

    /// Returns what reads them anew at SIGHUP: the files, and the keys of firebox.toml.
    pub fn source(&self, configuration: &Configuration, console: &Console) -> CredentialSource {
        let (args, console) = (self.clone(), console.clone());
        let keys_of_file = configuration.key_source();
        CredentialSource::new(move || {
            let credentials = keys_of_file().and_then(|listed| args.read(&listed));
            match credentials {
                Ok(credentials) => {
                    console.note("keys and certificate are read anew");
                    Some(credentials)
                }
                Err(error) => {
                    console.note(format!("note: keys and certificate stay as they were; {error:#}"));
                    None
                }
            }
        })
    }
}
