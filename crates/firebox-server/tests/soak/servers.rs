//! A server with three models, with memory arranged in one of several ways.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use firebox_engine::Engine;
use firebox_runtime::heads::HeadPoolConfig;
use firebox_runtime::residency::{ResidencyOptions, ShareOptions, SharedBudget};
use firebox_runtime::{Budget, Model, RuntimeError, device};
use firebox_server::{ModelSpec, Server, ServerConfig, ServerError, SessionsConfig, StopHandle};

use crate::client::root;
use crate::stress::Stress;

/// Names and paths of the models: one with heads, one with experts, one with recurrent layers.
pub const MODELS: [(&str, &str); 3] = [
    ("pocket", "assets/pocket"),
    ("experts", "tests/fixtures/gguf/qwen3_moe/model.gguf"),
    ("recurrent", "tests/fixtures/gguf/qwen3_5_text/model.gguf"),
];

/// The generating heads of the first model, its own among them; the router does not generate.
pub const HEADS: [Option<&str>; 4] = [None, Some("chat"), Some("code"), Some("summarize")];

/// The shared budget, less than the models and twelve sessions would take.
const SHARED_BYTES: u64 = 40 << 20;

/// How the models share memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrangement {
    /// The model with experts streams all but one layer; the others are resident.
    Apart,
    /// All models stream within one budget.
    Together,
}

pub struct TestServer {
    pub address: SocketAddr,
    /// Folder of saved sessions.
    pub sessions: PathBuf,
    engine: Engine,
    /// The open models.
    models: Arc<Mutex<Vec<Model>>>,
    stop: StopHandle,
    thread: JoinHandle<Result<(), ServerError>>,
}

/// Opens models in an arrangement.
#[derive(Clone)]
enum Opener {
    Apart,
    Together(SharedBudget),
}

impl Opener {
    fn open(&self, name: &str, path: &str) -> Result<Model, RuntimeError> {
        let (path, cpu) = (root(path), device("cpu")?);
        let model = match self {
            Self::Apart if name == "experts" => {
                // A budget above all use: the resident layers are set explicitly.
                let config = ResidencyOptions { layers: Some(1), ..ResidencyOptions::new(8 << 30) };
                Model::open_within(path, &cpu, &config)?
            }
            Self::Apart => Model::open(path, &cpu)?,
            Self::Together(shared) => shared.open(path, &cpu, &ShareOptions::default())?,
        };
        if name == "pocket" { model.with_heads(HeadPoolConfig::default()) } else { Ok(model) }
    }
}

impl TestServer {
    pub fn open(arrangement: Arrangement, sessions: &Path) -> Self {
        let opener = match arrangement {
            Arrangement::Apart => Opener::Apart,
            Arrangement::Together => {
                Opener::Together(SharedBudget::beside(&Budget::new(SHARED_BYTES)).unwrap())
            }
        };
        let models = Arc::new(Mutex::new(Vec::new()));
        let offer = |(name, path): (&'static str, &'static str)| {
            let (opener, models) = (opener.clone(), models.clone());
            let open = move || {
                let model = opener.open(name, path)?;
                models.lock().unwrap().push(model.clone());
                Ok(model)
            };
            if name == "recurrent" {
                ModelSpec::lazy(name, open)
            } else {
                ModelSpec::new(name, open().unwrap())
            }
        };
        let offers = MODELS.map(offer).into();
        let config = ServerConfig {
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            sessions: SessionsConfig { folder: Some(sessions.into()), ..SessionsConfig::default() },
            ..ServerConfig::default()
        };
        let server = Server::with_models(config, offers).unwrap();
        let (address, engine, stop) = (server.address(), server.engine(), server.stop());
        let sessions = sessions.to_owned();
        Self { address, sessions, engine, models, stop, thread: std::thread::spawn(|| server.run()) }
    }

    /// Starts memory pressure and heat until it is dropped.
    pub fn stress(&self, seed: u64) -> Stress {
        Stress::begin(self.engine.clone(), self.models.clone(), seed)
    }

    /// Waits for the server to end and frees everything.
    pub fn close(self) {
        self.stop.stop();
        self.thread.join().unwrap().unwrap();
    }
}
