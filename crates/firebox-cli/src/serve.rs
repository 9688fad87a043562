//! `firebox serve`

use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::str::FromStr as _;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::{ArgAction, Args, ValueEnum};
use firebox_engine::{EngineConfig, OnFailure};
use firebox_runtime::residency::{Residency, ResidencyOptions, ShareOptions, SharedBudget};
use firebox_runtime::schedule::AdmissionConfig;
use firebox_runtime::{Cores, Device, Model, RuntimeError, parse_bytes};
use firebox_server::{
    AllowedOrigins, ApiKey, Credentials, KeyShare, ModelSpec, PipelineSpec, Server, ServerConfig,
    SessionsConfig,
};
use firebox_store::{Checkpoint, Heads, SourceKind};

use crate::compute::{CacheType, DeviceArgs};
use crate::configuration::{Configuration, ModelEntry};
use crate::console::Console;
use crate::credentials::CredentialArgs;
use crate::fitting::{FittingArgs, say_fit};
use crate::head_pool::HeadPoolArgs;
use crate::hub;
use crate::opening::opened_device_on;
use crate::outcome::{Outcome, usage};
use crate::panic_log;
use crate::sharing::Sharing;

/// Options of `firebox serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// The models, or names of those in firebox.toml [default: all of firebox.toml]
    #[arg(value_name = "MODEL")]
    models: Vec<PathBuf>,
    /// What a model is called; once for every model, in their order [default: the name of its folder or file]
    #[arg(long, value_name = "NAME")]
    name: Vec<String>,
    /// Where to listen; 0.0.0.0 lets other machines in, which needs a key or --insecure
    #[arg(long, value_name = "HOST", env = "FIREBOX_HOST", default_value = "127.0.0.1")]
    host: String,
    /// The port; 0 is any that is free
    #[arg(long, value_name = "PORT", env = "FIREBOX_PORT", default_value_t = 8080)]
    port: u16,
    #[command(flatten)]
    credentials: CredentialArgs,
    /// Let pages of this origin use the server, such as `https://app.example`; may be given several times
    #[arg(long, value_name = "ORIGIN", env = "FIREBOX_ALLOW_ORIGIN", value_delimiter = ',')]
    allow_origin: Vec<String>,
    /// Answer who asks this machine for this name, such as `models.example`; may be given several times
    #[arg(long, value_name = "HOST", env = "FIREBOX_ALLOW_HOST", value_delimiter = ',')]
    allow_host: Vec<String>,
    /// Refuse requests with fields that have no effect, instead of naming those in the header x-firebox-ignored
    #[arg(
        long, env = "FIREBOX_STRICT_FIELDS", action = ArgAction::Set, value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_value = "false", default_missing_value = "true", hide_possible_values = true
    )]
    strict_fields: bool,
    /// Where clients may save their sessions; without one they cannot
    #[arg(long, value_name = "FOLDER", env = "FIREBOX_SESSIONS")]
    sessions: Option<PathBuf>,
    /// Sessions that a key may have saved before one more is refused [default: 256]
    #[arg(long, value_name = "N", env = "FIREBOX_SAVED_SESSIONS")]
    saved_sessions: Option<usize>,
    /// What the saved sessions of a key may take, such as 800M or 1.5G [default: 16G]
    #[arg(long, value_name = "SIZE", env = "FIREBOX_SAVED_SIZE", value_parser = parse_bytes)]
    saved_size: Option<u64>,
    /// Requests of a model that are answered together
    #[arg(long, value_name = "N", env = "FIREBOX_PARALLEL", value_parser = clap::value_parser!(u16).range(1..))]
    parallel: Option<u16>,
    /// Requests of a model that may wait before one more is refused
    #[arg(long, value_name = "N", env = "FIREBOX_QUEUE")]
    queue: Option<usize>,
    /// Requests of one key that a model answers together; each choice of a request counts [default: as many as others leave]
    #[arg(long, value_name = "N", env = "FIREBOX_PER_KEY_RUNNING", value_parser = clap::value_parser!(u16).range(1..))]
    per_key_running: Option<u16>,
    /// Requests of one key that may wait for a model before one more is refused [default: the key's part of --queue]
    #[arg(long, value_name = "N", env = "FIREBOX_PER_KEY_WAITING")]
    per_key_waiting: Option<usize>,
    /// Seconds that a request may take as a whole, its answer included; 0 is as long as it takes
    #[arg(
        long,
        visible_alias = "request-timeout",
        value_name = "SECONDS",
        env = "FIREBOX_TIME_LIMIT",
        default_value_t = 3600
    )]
    time_limit: u32,
    /// Seconds after which an answer that its client does not read fails; 0 is never
    #[arg(long, value_name = "SECONDS", env = "FIREBOX_STALL_TIMEOUT", default_value_t = 30)]
    stall_timeout: u32,
    /// What to do when the engine's thread panics, after its requests have failed: restart the engine with the same models, or
    /// exit with code 70 for a supervisor
    #[arg(long, value_name = "ACTION", env = "FIREBOX_ON_ENGINE_FAILURE", value_enum, default_value_t)]
    on_engine_failure: EngineFailureAction,
    /// Draft what followed the last time that a text ended as it does now; tokens stay the same, and come faster where texts
    /// repeat themselves. Requests may choose by `"speculation": {"lookup": true}`
    #[arg(long, conflicts_with = "draft")]
    lookup: bool,
    /// Draft by this model, smaller and with the same tokens as every model that is served
    #[arg(long, value_name = "MODEL", conflicts_with = "memory")]
    draft: Option<PathBuf>,
    /// CPU cores to compute on: performance, where the system tells which are fast, all, or a list such as 0-3,6 [default: all]
    #[arg(long, value_name = "CORES", env = "FIREBOX_CORES", value_parser = Cores::from_str)]
    cores: Option<Cores>,
    #[command(flatten)]
    head_pool: HeadPoolArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    fitting: FittingArgs,
}

/// What happens when the engine's thread panics.
#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum EngineFailureAction {
    #[default]
    Restart,
    Exit,
}

/// Serves until Ctrl-C.
pub fn serve(args: &ServeArgs, configuration: &Configuration, console: &Console) -> anyhow::Result<Outcome> {
    let entries = entries(args, configuration)?;
    let sharing = match entries.len() {
        1 => None,
        _ => Sharing::of(&entries, args.fitting.memory, args.fitting.read)?,
    };
    say_what_changes_nothing(&entries, sharing.as_ref(), configuration, console);
    let memory = sharing.as_ref().map(|sharing| sharing.budget().clone());
    let pipelines = pipelines(args, &entries, configuration, console);
    let credential_source = Some(args.credentials.source(configuration, console));
    let config = ServerConfig { memory, pipelines, credential_source, ..config(args, configuration.keys())? };
    config.check_exposure()?;
    if config.keys.is_open() && !config.address.ip().is_loopback() {
        console.note(
            "note: every machine that reaches this one may use the server; --api-key lets only some in",
        );
    }
    let scheme = if args.credentials.encrypts() { "https" } else { "http" };
    let server = Server::with_models(config, offers(args, &entries, sharing.as_ref(), console)?)?;
    panic_log::install();
    console.note(format!("serves {} at {scheme}://{}/v1", server.names().join(", "), server.address()));
    console.note(format!("the console is at {scheme}://{}/", server.address()));
    server.run_until_signal()?;
    Ok(Outcome::Done)
}

fn say_what_changes_nothing(
    entries: &[ModelEntry],
    sharing: Option<&Sharing>,
    configuration: &Configuration,
    console: &Console,
) {
    if sharing.is_none() {
        let remedy = match entries {
            [_] => "it has its memory for itself",
            _ => "give models some to share, as in --memory 4G",
        };
        for entry in entries.iter().filter(|entry| entry.pinned) {
            console.note(format!("note: {}: pinned changes nothing; {remedy}", entry.path.display()));
        }
        return;
    }
    let of_one = ["mode", "keep_layers", "placement", "buffers"];
    for id in of_one.into_iter().filter(|id| configuration.is_given(id)) {
        let flag = id.replace('_', "-");
        console.note(format!(
            "note: --{flag} is for a model that has its memory for itself; of several whatever is urgent is kept"
        ));
    }
}

/// Returns the models to serve: those that the command line names, or else all of firebox.toml.
fn entries(args: &ServeArgs, configuration: &Configuration) -> anyhow::Result<Vec<ModelEntry>> {
    let named = |path: &PathBuf| hub::known(path).cloned().unwrap_or_else(|| ModelEntry::of(path));
    let mut entries: Vec<ModelEntry> = match args.models.is_empty() {
        false => args.models.iter().map(named).collect(),
        true => configuration.models(),
    };
    if entries.is_empty() {
        return Err(usage(
            "no model to serve; name one as in `firebox serve MODEL`, or write [[model]] with its path into \
             firebox.toml",
        ));
    }
    if !args.name.is_empty() && args.name.len() != entries.len() {
        return Err(usage(format!(
            "--name: {} names for {} models; give one for each, or none",
            args.name.len(),
            entries.len()
        )));
    }
    for (entry, name) in entries.iter_mut().zip(&args.name) {
        entry.name = Some(name.clone());
    }
    for entry in &mut entries {
        entry.memory = entry.memory.or(args.fitting.memory);
    }
    Ok(entries)
}

/// Returns the pipelines to serve: all of firebox.toml, or those whose models the command line names.
fn pipelines(
    args: &ServeArgs,
    entries: &[ModelEntry],
    configuration: &Configuration,
    console: &Console,
) -> Vec<PipelineSpec> {
    let names: Vec<String> = entries.iter().map(served_name).collect();
    let is_served = |model: &str| {
        let base = model.rsplit_once(':').map_or(model, |(base, _)| base);
        names.iter().any(|name| name == model || name == base)
    };
    let mut pipelines = configuration.pipelines().to_vec();
    if !args.models.is_empty() {
        pipelines.retain(|pipeline| {
            let missing = pipeline.models().find(|model| !is_served(model));
            if let Some(model) = missing {
                let name = pipeline.name();
                console.note(format!("note: the pipeline {name} is left out; {model} is not served"));
            }
            missing.is_none()
        });
    }
    pipelines
}

/// Of a list, which an empty variable is of nothing.
fn parts_of(list: &[String]) -> impl Iterator<Item = String> {
    list.iter().map(|part| part.trim().to_owned()).filter(|part| !part.is_empty())
}

fn config(args: &ServeArgs, listed: &[ApiKey]) -> anyhow::Result<ServerConfig> {
    let Credentials { keys, certificate } = args.credentials.read(listed)?;
    let per_key = KeyShare {
        running: args.per_key_running.map(usize::from),
        waiting: args.per_key_waiting,
        ..KeyShare::default()
    };
    let seconds = |seconds: u32| (seconds > 0).then(|| Duration::from_secs(seconds.into()));
    let mut admission = AdmissionConfig::default();
    if let Some(parallel) = args.parallel {
        admission.most_running = parallel.into();
    }
    if let Some(queue) = args.queue {
        admission.most_waiting = queue;
    }
    let on_failure = match args.on_engine_failure {
        EngineFailureAction::Restart => OnFailure::Restart,
        EngineFailureAction::Exit => OnFailure::End,
    };
    let allowed_origins = AllowedOrigins::new(parts_of(&args.allow_origin), parts_of(&args.allow_host));
    let allowed_origins = allowed_origins.map_err(|error| usage(error.to_string()))?;
    let mut sessions = SessionsConfig { folder: args.sessions.clone(), ..SessionsConfig::default() };
    if let Some(most) = args.saved_sessions {
        sessions.max_saved = most;
    }
    if let Some(bytes) = args.saved_size {
        sessions.max_saved_bytes = bytes;
    }
    Ok(ServerConfig {
        address: address(&args.host, args.port)?,
        keys,
        per_key,
        certificate,
        insecure: args.credentials.insecure,
        allowed_origins,
        engine: EngineConfig {
            admission,
            lookup: args.lookup,
            on_failure,
            stall_timeout: seconds(args.stall_timeout),
            ..EngineConfig::default()
        },
        request_timeout: seconds(args.time_limit),
        sessions,
        strict_fields: args.strict_fields,
        ..ServerConfig::default()
    })
}

fn address(host: &str, port: u16) -> anyhow::Result<SocketAddr> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, port));
    }
    let mut found = (host, port)
        .to_socket_addrs()
        .with_context(|| format!("--host {host}: cannot find it; give an address such as 127.0.0.1"))?;
    found
        .next()
        .ok_or_else(|| usage(format!("--host {host}: there is no such address; give one such as 127.0.0.1")))
}

/// The models, those that are pinned opened first, while there is room for all of them.
fn offers(
    args: &ServeArgs,
    entries: &[ModelEntry],
    sharing: Option<&Sharing>,
    console: &Console,
) -> anyhow::Result<Vec<ModelSpec>> {
    let device = opened_device_on(&args.device, args.cores.as_ref().unwrap_or(&Cores::All))?;
    let mut openings = Vec::new();
    for (at, entry) in entries.iter().enumerate() {
        openings.push((at, entry, Opening::of(args, entry, sharing, &device)?));
    }
    openings.sort_by_key(|(_, entry, _)| !entry.pinned);
    let (mut offers, mut models) = (Vec::new(), Vec::new());
    for (at, entry, opening) in openings {
        let name = served_name(entry);
        let offer = if entry.lazy {
            ModelSpec::lazy(name, move || opening.open())
        } else {
            let began = Instant::now();
            let model = opening.open()?;
            if opening.sharing.is_none() {
                say_fit(&model, console);
            }
            let took = began.elapsed().as_secs_f64();
            console.detail(format!("opened {} in {took:.2} s", opening.path.display()));
            models.push(model.clone());
            ModelSpec::new(name, model)
        };
        offers.push((at, offer.with_priority(entry.priority.unwrap_or_default())));
    }
    // Weights are read once all models are open: the next model to open could evict those read before.
    models.iter().filter_map(Model::residency).try_for_each(Residency::preload)?;
    offers.sort_by_key(|(at, _)| *at);
    Ok(offers.into_iter().map(|(_, offer)| offer).collect())
}

/// The settings to open a model with, at the start or at its first request.
struct Opening {
    path: PathBuf,
    device: Device,
    sharing: Option<(SharedBudget, ShareOptions)>,
    /// The options for fitting it into memory that it does not share.
    limit: Option<ResidencyOptions>,
    head_pool: HeadPoolArgs,
    heads: Vec<String>,
    /// The model that drafts its answers.
    draft: Option<PathBuf>,
}

impl Opening {
    /// Says now what is wrong with a model that may only be opened later.
    fn of(
        args: &ServeArgs,
        entry: &ModelEntry,
        sharing: Option<&Sharing>,
        device: &Device,
    ) -> anyhow::Result<Self> {
        let path = hub::resolve(&entry.path)?;
        let checkpoint = Checkpoint::open(&path)?;
        if !entry.heads.is_empty() {
            expect_heads(entry, checkpoint)?;
        }
        let fitting = FittingArgs { memory: entry.memory, ..args.fitting.clone() };
        Ok(Self {
            path,
            device: device.clone(),
            sharing: sharing.map(|sharing| (sharing.shared().clone(), sharing.options(entry))),
            limit: fitting.config(CacheType::default(), None),
            head_pool: args.head_pool.clone(),
            heads: entry.heads.clone(),
            draft: args.draft.as_deref().map(hub::resolve).transpose()?,
        })
    }

    fn open(&self) -> Result<Model, RuntimeError> {
        let Self { path, device, .. } = self;
        let model = match (&self.sharing, &self.limit) {
            (Some((shared, options)), _) => shared.open(path, device, options)?,
            (None, Some(limit)) => Model::open_within(path, device, limit)?,
            (None, None) => Model::open(path, device)?,
        };
        // Encoders have no heads.
        if model.decoder().is_err() {
            return Ok(model);
        }
        let model = model.with_heads(self.head_pool.config())?;
        if let Some(head_pool) = model.heads() {
            self.heads.iter().for_each(|head| head_pool.prefetch(head));
        }
        let model = match &self.draft {
            Some(draft) => model.with_draft(Model::open(draft, device)?)?,
            None => model,
        };
        Ok(model)
    }
}

fn expect_heads(entry: &ModelEntry, checkpoint: Checkpoint) -> anyhow::Result<()> {
    let known: Vec<String> = match checkpoint.source() {
        SourceKind::Gguf => Vec::new(),
        _ => Heads::of(checkpoint)?.list()?.into_iter().map(|head| head.name).collect(),
    };
    let Some(head) = entry.heads.iter().find(|head| !known.contains(head)) else { return Ok(()) };
    Err(usage(format!(
        "{}: there is no head {head:?}; {}",
        entry.path.display(),
        if known.is_empty() { "it has none".into() } else { format!("it has {}", known.join(", ")) }
    )))
}

/// Returns the name that clients use.
fn served_name(entry: &ModelEntry) -> String {
    entry.name.clone().unwrap_or_else(|| name_of(&entry.path))
}

/// A model by the last part of where it is; of a file without its ending. Where that is a link to says nothing: in the hub's
/// cache it is a hash.
fn name_of(path: &Path) -> String {
    let found = match path.file_name() {
        Some(_) => path.to_path_buf(),
        None => path.canonicalize().unwrap_or_else(|_| path.to_path_buf()),
    };
    if let Some(name) = hub::name_of_snapshot(&found) {
        return name.to_owned();
    }
    let name = if found.is_file() { found.file_stem() } else { found.file_name() };
    name.unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_called_by_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("small.Q4.gguf");
        std::fs::write(&file, "").unwrap();
        assert_eq!(name_of(&file), "small.Q4");
        assert_eq!(name_of(Path::new("/nowhere/org/model-1.5b")), "model-1.5b");
        let here = std::env::current_dir().unwrap();
        assert_eq!(name_of(Path::new(".")), here.file_name().unwrap().to_str().unwrap());
        let snapshot = folder.path().join("models--org--model-1.5b/snapshots/0123abcd");
        std::fs::create_dir_all(&snapshot).unwrap();
        assert_eq!(name_of(&snapshot), "model-1.5b");
        #[cfg(unix)]
        {
            let link = snapshot.join("small.Q8.gguf");
            std::os::unix::fs::symlink(&file, &link).unwrap();
            assert_eq!(name_of(&link), "small.Q8");
        }
    }

    /// Parses a command line into the server's configuration.
    fn configured(options: &[&str]) -> anyhow::Result<ServerConfig> {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            args: ServeArgs,
        }
        let line = std::iter::once("serve").chain(options.iter().copied());
        config(&<Line as clap::Parser>::try_parse_from(line)?.args, &[])
    }

    #[test]
    fn origins_and_hosts_are_lists_and_each_of_them_is_one() {
        let found =
            configured(&["--allow-origin", "https://a.example, http://b:80,", "--allow-host", "c.example"]);
        let origins = ["https://a.example", "http://b"].map(str::to_owned);
        assert_eq!(
            found.unwrap().allowed_origins,
            AllowedOrigins::new(origins, ["c.example".to_owned()]).unwrap()
        );
        let twice = ["--allow-origin", "https://a", "--allow-origin", "https://b"];
        let both = ["https://a", "https://b"].map(str::to_owned);
        assert_eq!(configured(&twice).unwrap().allowed_origins, AllowedOrigins::new(both, None).unwrap());
        assert_eq!(configured(&[]).unwrap().allowed_origins, AllowedOrigins::default());
        assert_eq!(configured(&["--allow-origin="]).unwrap().allowed_origins, AllowedOrigins::default());
        for (option, value) in
            [("--allow-origin", "https://a/b"), ("--allow-origin", "*"), ("--allow-host", "https://a")]
        {
            let error = configured(&[option, value]).unwrap_err();
            assert_eq!(crate::outcome::code_of(&error), 2);
            assert!(error.to_string().contains(value), "{error}");
        }
    }

    #[test]
    fn times_have_defaults_and_zero_is_none() {
        let times = |options: &[&str]| {
            let config = configured(options).unwrap();
            let seconds = |time: Option<Duration>| time.map(|time| time.as_secs());
            (seconds(config.request_timeout), seconds(config.engine.stall_timeout))
        };
        assert_eq!(times(&[]), (Some(3600), Some(30)));
        let usual = ServerConfig::default();
        assert_eq!(usual.request_timeout.map(|time| time.as_secs()), times(&[]).0);
        assert_eq!(usual.engine.stall_timeout.map(|time| time.as_secs()), times(&[]).1);
        assert_eq!(times(&["--request-timeout", "9", "--stall-timeout", "2"]), (Some(9), Some(2)));
        assert_eq!(times(&["--time-limit", "0", "--stall-timeout", "0"]), (None, None));
    }

    #[test]
    fn saved_sessions_have_a_limit_that_options_change() {
        let usual = SessionsConfig::default();
        let sessions = configured(&["--sessions", "kept"]).unwrap().sessions;
        assert_eq!((sessions.max_saved, sessions.max_saved_bytes), (usual.max_saved, usual.max_saved_bytes));
        assert_eq!((usual.max_saved, usual.max_saved_bytes), (256, 16 << 30), "as the help says");
        let sessions = configured(&["--saved-sessions", "3", "--saved-size", "1.5G"]).unwrap().sessions;
        assert_eq!((sessions.max_saved, sessions.max_saved_bytes), (3, 3 << 29));
    }

    #[test]
    fn addresses_are_numbers_or_names() {
        assert_eq!(address("::1", 80).unwrap(), "[::1]:80".parse().unwrap());
        assert!(address("localhost", 80).unwrap().ip().is_loopback());
    }
}
