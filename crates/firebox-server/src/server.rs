//! The server: listening, accepting connections and stopping.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use axum::Router;
use firebox_engine::{Engine, EngineHealth};
use firebox_runtime::Model;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use crate::app::App;
use crate::client_slots::{Activity, ClientSlots};
use crate::connection::serve;
use crate::credentials::{CredentialSource, CredentialStore};
use crate::embedded_server::EmbeddedServer;
use crate::error::ServerError;
use crate::model_spec::ModelSpec;
use crate::server_config::ServerConfig;
use crate::stop_handle::StopHandle;
use crate::tls::TlsCertificate;

/// Interval at which the server checks whether the engine has ended.
const ENGINE_CHECK: Duration = Duration::from_millis(200);

/// A listening server, which serves once it [runs](Self::run).
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
    embedded: EmbeddedServer,
    max_clients: usize,
    shutdown_grace: Duration,
    credential_source: Option<CredentialSource>,
}

impl Server {
    /// Listens, and serves models under their names.
    pub fn bind(config: ServerConfig, models: Vec<(String, Model)>) -> Result<Self, ServerError> {
        Self::with_models(
            config,
            models.into_iter().map(|(name, model)| ModelSpec::new(name, model)).collect(),
        )
    }

    /// Listens, and serves models with options of their own, some of which may be opened on first use.
    pub fn with_models(config: ServerConfig, models: Vec<ModelSpec>) -> Result<Self, ServerError> {
        config.check_exposure()?;
        let ServerConfig { max_clients, shutdown_grace, address, .. } = config;
        let credential_source = config.credential_source.clone();
        let listen = || {
            let listener = TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            Ok((listener.local_addr()?, listener))
        };
        let (address, listener) = listen().map_err(|source| ServerError::Listen { address, source })?;
        let embedded = EmbeddedServer::with_models(ServerConfig { address, ..config }, models)?;
        Ok(Self { listener, address, embedded, max_clients, shutdown_grace, credential_source })
    }

    /// Returns the address it listens at.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the names of the models, and of their heads as `model:head`.
    pub fn names(&self) -> Vec<String> {
        self.embedded.names()
    }

    /// Returns a handle that stops the server.
    pub fn stop(&self) -> StopHandle {
        self.embedded.stop()
    }

    /// Returns the credentials, to change them while the server runs.
    pub fn credentials(&self) -> CredentialStore {
        self.embedded.credentials()
    }

    /// Returns the engine: see [`EmbeddedServer::engine`].
    pub fn engine(&self) -> Engine {
        self.embedded.engine()
    }

    /// Serves until it is stopped, or the engine ends after a failure.
    pub fn run(self) -> Result<(), ServerError> {
        self.run_with(false)
    }

    /// Serves until it is stopped or receives SIGINT or SIGTERM. A second signal ends running requests. SIGHUP has it read its
    /// credentials anew.
    pub fn run_until_signal(self) -> Result<(), ServerError> {
        self.run_with(true)
    }

    fn run_with(self, signals: bool) -> Result<(), ServerError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            // The engine computes on its own threads; these only do I/O.
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
        let source = self.credential_source.filter(|_| signals.is_some());
        let mut hangups = if source.is_some() { Hangups::new()? } else { Hangups::default() };
        let slots = ClientSlots::new(self.max_clients);
        let router = self.embedded.router();
        let mut clients = JoinSet::new();
        let mut checks = tokio::time::interval(ENGINE_CHECK);
        let mut engine_ended = false;
        // A connection that waits for a place.
        let mut arrived = None;
        loop {
            tokio::select! {
                accepted = listener.accept(), if arrived.is_none() => match accepted {
                    Ok((stream, _)) => arrived = Some(stream),
                    // Probably out of file descriptors: wait for a connection to close.
                    Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
                },
                place = slots.acquire(), if arrived.is_some() => {
                    let Some(stream) = arrived.take() else { continue };
                    let _ = stream.set_nodelay(true);
                    let (app, router, slot) = (app.clone(), router.clone(), slots.enter(place));
                    clients.spawn(async move {
                        tokio::select! {
                            () = serve_client(stream, router, &app, slot.activity()) => {}
                            () = slot.evicted() => {}
                        }
                    });
                }
                _ = stopping.wait_for(|stop| *stop) => break,
                () = Signals::next(&mut signals) => break,
                _ = checks.tick() => {
                    engine_ended = app.engine.health() == EngineHealth::Ended;
                    if engine_ended {
                        break;
                    }
                }
                () = hangups.next() => {
                    let (source, store) = (source.clone(), app.credentials.clone());
                    tokio::task::spawn_blocking(move || {
                        if let Some(credentials) = source.and_then(|source| source.read()) {
                            store.replace(credentials);
                        }
                    });
                }
                Some(_) = clients.join_next() => {}
            }
        }
        drop(listener);
        app.stop.stop();
        let leave = async { while clients.join_next().await.is_some() {} };
        tokio::select! {
            _ = timeout(self.shutdown_grace, leave) => {}
            () = Signals::next(&mut signals) => {}
        }
        clients.shutdown().await;
        if engine_ended {
            let reason = app.engine.last_failure().unwrap_or_else(|| "its thread could not start".into());
            return Err(ServerError::EngineEnded { reason });
        }
        Ok(())
    }
}

/// Serves a connection, encrypted if the server has a certificate.
async fn serve_client(stream: TcpStream, router: Router, app: &App, activity: Activity) {
    let (limits, stopping) = (&app.limits, app.stop.watch());
    let Some(TlsCertificate(config)) = app.credentials.current().certificate.clone() else {
        return serve(stream, router, limits, activity, stopping).await;
    };
    let mut stopped = stopping.clone();
    let accepted = tokio::select! {
        accepted = timeout(limits.head_timeout, TlsAcceptor::from(config).accept(stream)) => accepted,
        _ = stopped.wait_for(|stop| *stop) => return,
    };
    // A client that is slow or speaks no TLS is disconnected.
    if let Ok(Ok(stream)) = accepted {
        serve(stream, router, limits, activity, stopping).await;
    }
}

/// SIGHUP, which asks to read files anew.
#[derive(Default)]
struct Hangups(#[cfg(unix)] Option<tokio::signal::unix::Signal>);

impl Hangups {
    #[cfg(unix)]
    fn new() -> Result<Self, ServerError> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self(Some(signal(SignalKind::hangup())?)))
    }

    #[cfg(not(unix))]
    fn new() -> Result<Self, ServerError> {
        Ok(Self())
    }

    async fn next(&mut self) {
        #[cfg(unix)]
        if let Some(signal) = &mut self.0
            && signal.recv().await.is_some()
        {
            return;
        }
        std::future::pending().await
    }
}

/// The signals that end a process.
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

/// The signals that end a process.
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
