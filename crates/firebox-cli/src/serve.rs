//! `firebox serve`

use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use firebox_runtime::Model;
use firebox_runtime::engine::HostConfig;
use firebox_runtime::heads::RackConfig;
use firebox_runtime::schedule::AdmissionConfig;
use firebox_server::{Keys, Server, ServerConfig, SessionsConfig};

use crate::args::{CacheType, DeviceArgs};
use crate::configuration::{Configuration, ModelEntry};
use crate::console::Console;
use crate::fitting::FittingArgs;
use crate::generating::open_fitted;
use crate::hub;
use crate::outcome::{Outcome, usage};

/// Options of `firebox serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// The models, or names of those in firebox.toml [default: all of firebox.toml]
    #[arg(value_name = "MODEL")]
    models: Vec<PathBuf>,
    /// What a model is called; once for every model, in their order [default: the name of its folder or file]
    #[arg(long, value_name = "NAME")]
    name: Vec<String>,
    /// Where to listen; 0.0.0.0 lets other machines in
    #[arg(long, value_name = "HOST", env = "FIREBOX_HOST", default_value = "127.0.0.1")]
    host: String,
    /// The port; 0 is any that is free
    #[arg(long, value_name = "PORT", env = "FIREBOX_PORT", default_value_t = 8080)]
    port: u16,
    /// Let only those in who send this key; may be given several times
    #[arg(long, value_name = "KEY", env = "FIREBOX_API_KEY", hide_env_values = true)]
    api_key: Vec<String>,
    /// The same for the keys in a file, one a line
    #[arg(long, value_name = "FILE", env = "FIREBOX_API_KEY_FILE")]
    api_key_file: Option<PathBuf>,
    /// Where clients may save their sessions; without one they cannot
    #[arg(long, value_name = "FOLDER", env = "FIREBOX_SESSIONS")]
    sessions: Option<PathBuf>,
    /// Requests of a model that are answered together
    #[arg(long, value_name = "N", env = "FIREBOX_PARALLEL", value_parser = clap::value_parser!(u16).range(1..))]
    parallel: Option<u16>,
    /// Requests of a model that may wait before one more is refused
    #[arg(long, value_name = "N", env = "FIREBOX_QUEUE")]
    queue: Option<usize>,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    fitting: FittingArgs,
}

/// Serves until Ctrl-C.
pub fn serve(args: &ServeArgs, configuration: &Configuration, console: &Console) -> anyhow::Result<Outcome> {
    let entries = entries(args, configuration)?;
    if entries.len() > 1 && entries.iter().any(|entry| entry.memory.is_some()) {
        return Err(usage("--memory: several models have no common budget so far; serve one of them alone"));
    }
    for entry in entries.iter().filter(|entry| entry.priority.is_some() || entry.pinned) {
        console.note(format!(
            "note: {}: priority and pinned of firebox.toml wait for a common budget of models and change nothing yet",
            entry.path.display()
        ));
    }
    let config = config(args)?;
    if config.keys.is_open() && !config.address.ip().is_loopback() {
        console
            .note("note: everybody who reaches this machine may use the server; --api-key lets only some in");
    }
    let mut models = Vec::new();
    for entry in &entries {
        let name = entry.name.clone().unwrap_or_else(|| name_of(&entry.path));
        models.push((name, open(args, entry, console)?));
    }
    let server = Server::bind(config, models)?;
    console.note(format!("serves {} at http://{}/v1", server.names().join(", "), server.address()));
    console.note(format!("the console is at http://{}/", server.address()));
    server.run_until_signal()?;
    Ok(Outcome::Done)
}

/// What is to be served: what the command line names, or else all that firebox.toml has.
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

fn config(args: &ServeArgs) -> anyhow::Result<ServerConfig> {
    let mut keys = Keys::new(args.api_key.iter().cloned())?;
    if let Some(path) = &args.api_key_file {
        keys = keys.and(Keys::read(path)?)?;
    }
    let mut admission = AdmissionConfig::default();
    if let Some(parallel) = args.parallel {
        admission.most_running = parallel.into();
    }
    if let Some(queue) = args.queue {
        admission.most_waiting = queue;
    }
    Ok(ServerConfig {
        address: address(&args.host, args.port)?,
        keys,
        host: HostConfig { admission, ..HostConfig::default() },
        sessions: SessionsConfig { folder: args.sessions.clone(), ..SessionsConfig::default() },
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

fn open(args: &ServeArgs, entry: &ModelEntry, console: &Console) -> anyhow::Result<Model> {
    let fitting = FittingArgs { memory: entry.memory, ..args.fitting.clone() };
    let fit = fitting.config(CacheType::default(), None);
    let model = open_fitted(&entry.path, &args.device, fit.as_ref(), console)?;
    // Encoders have no heads.
    if model.decoder().is_err() {
        return Ok(model);
    }
    let model = model.with_heads(RackConfig::default())?;
    let known = model.heads().map(|rack| rack.names()).unwrap_or_default();
    for head in &entry.heads {
        let Some(rack) = model.heads().filter(|_| known.contains(head)) else {
            return Err(usage(format!(
                "{}: there is no head {head:?}; {}",
                entry.path.display(),
                if known.is_empty() { "it has none".into() } else { format!("it has {}", known.join(", ")) }
            )));
        };
        rack.hint(head);
    }
    Ok(model)
}

/// A model by the last part of where it is; of a file without its ending.
fn name_of(path: &Path) -> String {
    let found = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
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
    }

    #[test]
    fn addresses_are_numbers_or_names() {
        assert_eq!(address("::1", 80).unwrap(), "[::1]:80".parse().unwrap());
        assert!(address("localhost", 80).unwrap().ip().is_loopback());
    }
}
