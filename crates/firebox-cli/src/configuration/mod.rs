//! `firebox.toml`: what options are where neither the command line nor the environment says.
//!
//! An option that has an environment variable is a setting, and the file may have it too, under the name of its flag:
//! in `[serve]` for the server alone, else in `[defaults]`. What the file says becomes the default of the option, so
//! that it is the parser of the command line that has flags outrank the environment, and both outrank the file.

mod file;
mod key;
mod model;

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::parser::{RawValues, ValueSource};
use clap::{Arg, ArgMatches, Command};
use firebox_server::{ApiKey, PipelineSpec};

use file::Values;
pub use file::read;
pub use model::ModelEntry;

use crate::outcome::usage;

/// The flag that names the file.
const FLAG: &str = "config";

/// The default name of the file.
const NAME: &str = "firebox.toml";

/// The command whose settings have a table of their own.
const SERVE: &str = "serve";

/// The contents of a configuration file.
#[derive(Debug, Default)]
pub struct Configuration {
    defaults: Values,
    serve: Values,
    models: Vec<ModelEntry>,
    pipelines: Vec<PipelineSpec>,
    keys: Vec<ApiKey>,
    /// The file, if there is one.
    path: Option<PathBuf>,
    /// Options that the command line or the environment has.
    given: BTreeSet<String>,
}

impl Configuration {
    /// The file that a command line names, or else the one in this folder, or else the user's own; an empty one where
    /// there is none.
    pub fn of(command: &Command, args: &[OsString]) -> anyhow::Result<Self> {
        // Help is shown even if the file is broken.
        let Ok(matches) = command.clone().ignore_errors(true).try_get_matches_from(args) else {
            return Ok(Self::default());
        };
        let named = matches.get_one::<PathBuf>(FLAG).cloned();
        match named.or_else(|| usual_places().into_iter().find(|place| place.is_file())) {
            Some(path) => Self::open(command, &path),
            None => Ok(Self::default()),
        }
    }

    fn open(command: &Command, path: &Path) -> anyhow::Result<Self> {
        read(command, path, &contents(path)?)
    }

    /// The command with what the file says as the defaults of its options.
    pub fn over(&self, command: Command) -> Command {
        let is_serve = command.get_name() == SERVE;
        let command = command.mut_args(|arg| {
            let value = key_of(&arg).and_then(|key| {
                let own = is_serve.then(|| self.serve.get(&key)).flatten();
                own.or_else(|| self.defaults.get(&key))
            });
            match value {
                Some(value) => with_default(arg, &value.texts),
                None => arg,
            }
        });
        command.mut_subcommands(|command| self.over(command))
    }

    /// Takes note of what the command line and the environment have.
    pub fn note(&mut self, matches: &ArgMatches) {
        let given = matches.ids().map(|id| id.as_str()).filter(|id| {
            let source = matches.value_source(id);
            matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable))
        });
        self.given.extend(given.map(str::to_owned));
        if let Some((_, matches)) = matches.subcommand() {
            self.note(matches);
        }
    }

    /// Returns whether the command line or the environment sets an option, given by its name in the code.
    pub fn is_given(&self, id: &str) -> bool {
        self.given.contains(id)
    }

    /// The models of the file, for those who name one. What is said of one outranks what the file says of all, and
    /// nothing outranks the command line and the environment.
    pub fn models(&self) -> Vec<ModelEntry> {
        let memory = |model: &ModelEntry| model.memory.filter(|_| !self.is_given("memory"));
        self.models.iter().map(|model| ModelEntry { memory: memory(model), ..model.clone() }).collect()
    }

    /// Returns the keys of the file.
    pub fn keys(&self) -> &[ApiKey] {
        &self.keys
    }

    /// Returns what reads the keys of the file as they are when it is called.
    pub fn key_source(&self) -> impl Fn() -> anyhow::Result<Vec<ApiKey>> + Send + Sync + use<> {
        let path = self.path.clone();
        move || match &path {
            Some(path) => key::read_keys(path, &contents(path)?),
            None => Ok(Vec::new()),
        }
    }

    /// Returns the pipelines of the file.
    pub fn pipelines(&self) -> &[PipelineSpec] {
        &self.pipelines
    }
}

/// Refuses options about the use of memory if no memory is given by the command line, the environment or the file,
/// including the file's `[[model]]` entries.
pub fn expect_memory(matches: &ArgMatches, models: &[ModelEntry]) -> anyhow::Result<()> {
    expect_memory_of("", matches, models)
}

fn expect_memory_of(command: &str, matches: &ArgMatches, models: &[ModelEntry]) -> anyhow::Result<()> {
    if let Some((command, matches)) = matches.subcommand() {
        return expect_memory_of(command, matches, models);
    }
    if given(matches, "memory").is_some() || has_own_memory(command, matches, models) {
        return Ok(());
    }
    for id in ["mode", "keep_layers", "placement", "buffers", "read"] {
        if given(matches, id).is_some() && matches.value_source(id) == Some(ValueSource::CommandLine) {
            let flag = id.replace('_', "-");
            return Err(usage(format!(
                "--{flag} says what --memory is used for; give that as well, as in --memory 1.5G"
            )));
        }
    }
    Ok(())
}

/// Returns the values of an argument. Whether a command without it is an error differs between builds of clap.
fn given<'a>(matches: &'a ArgMatches, id: &str) -> Option<RawValues<'a>> {
    matches.try_get_raw(id).ok().flatten()
}

/// Returns whether the file gives memory to a model that the command line names or, if a server names none, to one of those
/// that it serves.
fn has_own_memory(command: &str, matches: &ArgMatches, models: &[ModelEntry]) -> bool {
    let named: Vec<&OsStr> = ["first", "place", "model", "models"]
        .into_iter()
        .filter_map(|id| given(matches, id))
        .flatten()
        .collect();
    let serves_all = command == "serve" && given(matches, "models").is_none();
    let is_meant =
        |model: &ModelEntry| serves_all || named.iter().any(|name| model.is_called(Path::new(name)));
    models.iter().any(|model| model.memory.is_some() && is_meant(model))
}

fn contents(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

fn usual_places() -> Vec<PathBuf> {
    let own = dirs::config_dir().map(|folder| folder.join("firebox").join(NAME));
    [Some(PathBuf::from(NAME)), own].into_iter().flatten().collect()
}

/// Returns the key of an option in a file, if it may be set there.
fn key_of(arg: &Arg) -> Option<String> {
    (arg.get_env().is_some() && arg.get_id() != FLAG).then(|| arg.get_long().map(str::to_owned)).flatten()
}

fn with_default(arg: Arg, texts: &[String]) -> Arg {
    // Help says what the usual default is, where there is one that the parser does not know, and tells no secrets.
    let hidden = arg.get_default_values().is_empty() || arg.is_hide_env_values_set();
    // The parser wants its texts to live as long as the program, and they do.
    let texts = texts.iter().map(|text| &*Box::leak(text.clone().into_boxed_str()));
    arg.default_values(texts).hide_default_value(hidden)
}

/// Every setting of a command and of those below it, with its variable.
#[cfg(test)]
pub fn settings(command: &Command) -> BTreeSet<[String; 2]> {
    let own = command.get_arguments().filter_map(|arg| {
        let variable = arg.get_env()?.to_string_lossy().into_owned();
        Some([key_of(arg)?, variable])
    });
    own.chain(command.get_subcommands().flat_map(settings)).collect()
}

#[cfg(test)]
mod tests;
