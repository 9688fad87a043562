//! The configuration of a server.

use std::net::SocketAddr;
use std::time::Duration;

use firebox_engine::EngineConfig;
use firebox_runtime::Budget;

use crate::allowed_origins::AllowedOrigins;
use crate::api_keys::ApiKeys;
use crate::credentials::CredentialSource;
use crate::error::ServerError;
use crate::key_share::KeyShare;
use crate::pipeline::PipelineSpec;
use crate::sessions::registry::SessionsConfig;
use crate::tls::TlsCertificate;

/// The default of times without progress of a client.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(30);
/// The default time limit of a request. Long answers of slow disks take a good part of it; what takes longer is forgotten.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3600);

/// Configuration of a server.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Address to listen at. Port 0 selects a free port.
    pub address: SocketAddr,
    /// Keys that clients need.
    pub keys: ApiKeys,
    /// What each key may have of a model, unless it has a share of its own.
    pub per_key: KeyShare,
    /// The certificate of the server; without one, connections are not encrypted.
    pub certificate: Option<TlsCertificate>,
    /// Reads keys and certificate anew when the process receives SIGHUP.
    pub credential_source: Option<CredentialSource>,
    /// Lets other machines use a server that needs no key.
    pub insecure: bool,
    /// Other origins and host names that browsers may use.
    pub allowed_origins: AllowedOrigins,
    /// Limits of running and waiting requests.
    pub engine: EngineConfig,
    /// The memory budget that models share, for reporting.
    pub memory: Option<Budget>,
    /// Names for which a router chooses the model.
    pub pipelines: Vec<PipelineSpec>,
    /// Limits and storage of sessions.
    pub sessions: SessionsConfig,
    /// Limit of a request body in bytes. Its parsed JSON may take twelve times as much.
    pub max_body_bytes: usize,
    /// Limit of the memory that the bodies of all requests take with their parsed JSON, at least for one body. A request
    /// beyond it is refused until another one ends, as is one beyond half of it of the same key.
    pub max_bodies_bytes: usize,
    /// Refuses requests with fields that have no effect. Otherwise the header `x-firebox-ignored` of the response names them.
    pub strict_fields: bool,
    /// Simultaneous connections. If all are taken, the one that has been idle longest is closed for a new one, which waits
    /// if none is idle.
    pub max_clients: usize,
    /// How long a connection may be idle before the next request's headers, or without progress while sending.
    pub client_timeout: Duration,
    /// Time limit of a request with its response; unlimited if absent.
    pub request_timeout: Option<Duration>,
    /// How long running requests may take after the server is stopped.
    pub shutdown_grace: Duration,
}

impl ServerConfig {
    /// Rejects an address that other machines reach if no key is needed and nothing says that this is meant.
    pub fn check_exposure(&self) -> Result<(), ServerError> {
        let Self { address, keys, insecure, .. } = self;
        if *insecure || address.ip().is_loopback() || !keys.is_open() {
            return Ok(());
        }
        Err(ServerError::Exposed { address: *address })
    }
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            address: SocketAddr::from(([127, 0, 0, 1], 8080)),
            keys: ApiKeys::default(),
            per_key: KeyShare::default(),
            certificate: None,
            credential_source: None,
            insecure: false,
            allowed_origins: AllowedOrigins::default(),
            engine: EngineConfig { stall_timeout: Some(CLIENT_TIMEOUT), ..EngineConfig::default() },
            memory: None,
            pipelines: Vec::new(),
            sessions: SessionsConfig::default(),
            max_body_bytes: 8 << 20,
            max_bodies_bytes: 160 << 20,
            strict_fields: false,
            max_clients: 1024,
            client_timeout: CLIENT_TIMEOUT,
            request_timeout: Some(REQUEST_TIMEOUT),
            shutdown_grace: Duration::from_secs(30),
        }
    }
}
