//! A server with its three models, in one of the ways that models are served.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use firebox_runtime::engine::Engine;
use firebox_runtime::fit::{Commons, FitConfig, Terms};
use firebox_runtime::heads::RackConfig;
use firebox_runtime::{Budget, Model, RuntimeError, device};
use firebox_server::{Offer, Server, ServerConfig, ServerError, SessionsConfig, Stop};

use crate::client::root;
use crate::weather::Weather;

/// Models by what they are called, and where they lie: one with heads, one with experts, one with recurrent layers.
pub const MODELS: [(&str, &str); 3] = [
    ("pocket", "assets/pocket"),
    ("experts", "tests/fixtures/gguf/qwen3_moe/model.gguf"),
    ("recurrent", "tests/fixtures/gguf/qwen3_5_text/model.gguf"),
];

/// Heads of the first that continue text, its own among them; the router only says who should.
pub const HEADS: [Option<&str>; 4] = [None, Some("chat"), Some("code"), Some("summarize")];

/// What all models share where they do: less than what they and twelve conversations would take.
const SHARED: u64 = 40 << 20;

/// How the models have their memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrangement {
    /// The one with experts streams all but a layer; the others are whole.
    Apart,
    /// All stream, within one budget.
    Together,
}

pub struct House {
    pub address: SocketAddr,
    /// Where conversations are saved.
    pub sessions: PathBuf,
    engine: Engine,
    /// Those that are open.
    models: Arc<Mutex<Vec<Model>>>,
    stop: Stop,
    thread: JoinHandle<Result<(), ServerError>>,
}

/// Opens models one way or the other.
#[derive(Clone)]
enum Opener {
    Apart,
    Together(Commons),
}

impl Opener {
    fn open(&self, name: &str, path: &str) -> Result<Model, RuntimeError> {
        let (path, cpu) = (root(path), device("cpu")?);
        let model = match self {
            Self::Apart if name == "experts" => {
                // More than the process ever takes: what is kept is said, and not what fits.
                let config = FitConfig { layers: Some(1), ..FitConfig::new(8 << 30) };
                Model::open_within(path, &cpu, &config)?
            }
            Self::Apart => Model::open(path, &cpu)?,
            Self::Together(commons) => commons.open(path, &cpu, &Terms::default())?,
        };
        if name == "pocket" { model.with_heads(RackConfig::default()) } else { Ok(model) }
    }
}

impl House {
    pub fn open(arrangement: Arrangement, sessions: &Path) -> Self {
        let opener = match arrangement {
            Arrangement::Apart => Opener::Apart,
            Arrangement::Together => Opener::Together(Commons::beside(&Budget::new(SHARED)).unwrap()),
        };
        let models = Arc::new(Mutex::new(Vec::new()));
        let offer = |(name, path): (&'static str, &'static str)| {
            let (opener, models) = (opener.clone(), models.clone());
            let open = move || {
                let model = opener.open(name, path)?;
                models.lock().unwrap().push(model.clone());
                Ok(model)
            };
            if name == "recurrent" { Offer::later(name, open) } else { Offer::new(name, open().unwrap()) }
        };
        let offers = MODELS.map(offer).into();
        let config = ServerConfig {
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            sessions: SessionsConfig { folder: Some(sessions.into()), ..SessionsConfig::default() },
            ..ServerConfig::default()
        };
        let server = Server::offering(config, offers).unwrap();
        let (address, engine, stop) = (server.address(), server.engine(), server.stop());
        let sessions = sessions.to_owned();
        Self { address, sessions, engine, models, stop, thread: std::thread::spawn(|| server.run()) }
    }

    /// Pressure and heat, until that is ended.
    pub fn weather(&self, seed: u64) -> Weather {
        Weather::begin(self.engine.clone(), self.models.clone(), seed)
    }

    /// Waits until the server has ended, and lets go of all that it had.
    pub fn close(self) {
        self.stop.stop();
        self.thread.join().unwrap().unwrap();
    }
}
