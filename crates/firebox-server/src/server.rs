use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use firebox_runtime::engine::{Engine, HostConfig};
use firebox_runtime::{Budget, Model};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::connection::serve;
use crate::{Embedded, Keys, Neighbours, Offer, ServerError, SessionsConfig};

/// How a server is to run.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Where it listens. Port 0 is any that is free.
    pub address: SocketAddr,
    /// Who may use it.
    pub keys: Keys,
    /// Of which other sites pages may use it, and by which other names.
    pub neighbours: Neighbours,
    /// How many requests of a model run and wait.
    pub host: HostConfig,
    /// The memory that models share, to tell what it is used for.
    pub memory: Option<Budget>,
    /// How conversations are kept that stay.
    pub sessions: SessionsConfig,
    /// Bytes that a request may send. What it sends may take twelve times as many once it is read.
    pub largest_body: usize,
    /// Clients at once; more wait until one leaves.
    pub most_clients: usize,
    /// How long a client may take from one request to the headers of the next, and to take anything of what it is sent.
    pub patience: Duration,
    /// How long a request may take as a whole, its answer included; as long as it takes, where none is said.
    pub request_time: Option<Duration>,
    /// How long requests that are under way may go on after the server was stopped.
    pub grace: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            address: SocketAddr::from(([127, 0, 0, 1], 8080)),
            keys: Keys::default(),
            neighbours: Neighbours::default(),
            host: HostConfig::default(),
            memory: None,
            sessions: SessionsConfig::default(),
            largest_body: 8 << 20,
            most_clients: 1024,
            patience: Duration::from_secs(30),
            request_time: None,
            grace: Duration::from_secs(30),
        }
    }
}

/// A server that listens, and answers once it [runs](Self::run).
///
/// ```no_run
/// use firebox_runtime::{Model, device};
/// use firebox_server::{Server, ServerConfig};
///
/// let model = Model::open("models/pocket", &device("cpu")?)?;
/// let server = Server::bind(ServerConfig::default(), vec![("pocket".into(), model)])?;
/// println!("http://{}/v1", server.address());
/// server.run()?;
/// # Ok::<(), firebox_server::ServerError>(())
/// ```
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    embedded: Embedded,
    most_clients: usize,
    grace: Duration,
}

/// Stops a server, from any thread.
#[derive(Debug, Clone)]
pub struct Stop(Arc<watch::Sender<bool>>);

impl Stop {
    /// One that has not happened.
    pub(crate) fn new() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }

    /// Sees when it happens.
    pub(crate) fn watch(&self) -> watch::Receiver<bool> {
        self.0.subscribe()
    }

    /// No client is let in any more; requests that are under way have the server's grace to come to an end.
    pub fn stop(&self) {
        self.0.send_replace(true);
    }
}

impl Server {
    /// Listens, and takes models in by the names they are asked for.
    pub fn bind(config: ServerConfig, models: Vec<(String, Model)>) -> Result<Self, ServerError> {
        Self::offering(config, models.into_iter().map(|(name, model)| Offer::new(name, model)).collect())
    }

    /// The same for models on terms of their own, some of which may be opened later.
    pub fn offering(config: ServerConfig, offers: Vec<Offer>) -> Result<Self, ServerError> {
        let ServerConfig { most_clients, grace, address, .. } = config;
        let listen = || {
            let listener = TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            Ok((listener.local_addr()?, listener))
        };
        let (address, listener) = listen().map_err(|source| ServerError::Listen { address, source })?;
        let embedded = Embedded::offering(ServerConfig { address, ..config }, offers)?;
        Ok(Self { listener, address, embedded, most_clients, grace })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What can be asked for: models, and their heads as `model:head`.
    pub fn names(&self) -> Vec<String> {
        self.embedded.names()
    }

    /// What stops it.
    pub fn stop(&self) -> Stop {
        self.embedded.stop()
    }

    /// The engine that answers: see [`Embedded::engine`].
    pub fn engine(&self) -> Engine {
        self.embedded.engine()
    }

    /// Answers requests until it is stopped.
    pub fn run(self) -> Result<(), ServerError> {
        self.run_with(false)
    }

    /// The same, and stops at SIGINT and SIGTERM. At the second one it does not wait for requests that are under way.
    pub fn run_until_signal(self) -> Result<(), ServerError> {
        self.run_with(true)
    }

    fn run_with(self, signals: bool) -> Result<(), ServerError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            // Computing is the engine's; these only wait.
            .worker_threads(2)
            .thread_name("firebox-server")
            .enable_all()
            .build()?;
        let done = runtime.block_on(self.accept(signals));
        runtime.shutdown_timeout(Duration::from_secs(1));
        done
    }

    async fn accept(self, signals: bool) -> Result<(), ServerError> {
        let listener = tokio::net::TcpListener::from_std(self.listener)?;
        let app = self.embedded.app();
        let mut stopping = app.stop.watch();
        let mut signals = if signals { Some(Signals::new()?) } else { None };
        let room = Arc::new(Semaphore::new(self.most_clients));
        let router = self.embedded.router();
        let mut clients = JoinSet::new();
        loop {
            let next = async {
                let place = room.clone().acquire_owned().await;
                (listener.accept().await, place)
            };
            tokio::select! {
                (accepted, place) = next => {
                    let Ok((stream, _)) = accepted else {
                        // Out of file descriptors, most likely: others have to leave first.
                        tokio::time::sleep(Duration::from_millis(50)).await;
                        continue;
                    };
                    let _ = stream.set_nodelay(true);
                    let (app, router) = (app.clone(), router.clone());
                    clients.spawn(async move {
                        let _place = place;
                        serve(stream, router, &app.limits, app.stop.watch()).await;
                    });
                }
                _ = stopping.wait_for(|stop| *stop) => break,
                () = Signals::next(&mut signals) => break,
                Some(_) = clients.join_next() => {}
            }
        }
        drop(listener);
        app.stop.stop();
        let leave = async { while clients.join_next().await.is_some() {} };
        tokio::select! {
            _ = timeout(self.grace, leave) => {}
            () = Signals::next(&mut signals) => {}
        }
        clients.shutdown().await;
        Ok(())
    }
}

/// What asks a process to end.
#[cfg(unix)]
struct Signals([tokio::signal::unix::Signal; 2]);

#[cfg(unix)]
impl Signals {
    fn new() -> Result<Self, ServerError> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self([signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?]))
    }

    async fn next(signals: &mut Option<Self>) {
        match signals {
            Some(Self([interrupt, terminate])) => tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            },
            None => std::future::pending().await,
        }
    }
}

/// What asks a process to end.
#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> Result<Self, ServerError> {
        Ok(Self)
    }

    async fn next(signals: &mut Option<Self>) {
        match signals {
            Some(Self) if tokio::signal::ctrl_c().await.is_ok() => {}
            _ => std::future::pending().await,
        }
    }
}
