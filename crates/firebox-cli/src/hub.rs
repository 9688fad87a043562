//! Models that the Hugging Face hub's cache holds, shared with every other program that uses it.

use std::env;
use std::ffi::OsStr;
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context as _, anyhow, bail};

use crate::configuration::ModelEntry;
#[cfg(feature = "hub")]
use crate::outcome::usage;

#[cfg(feature = "hub")]
const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
const DEFAULT_REVISION: &str = "main";

/// The models of firebox.toml, by their names. Every command resolves names, and none knows another.
static KNOWN: OnceLock<Vec<ModelEntry>> = OnceLock::new();

/// Has names of models mean those of firebox.toml.
pub fn know(models: Vec<ModelEntry>) {
    // Only the command line's own file is ever known.
    let _ = KNOWN.set(models);
}

/// A model of firebox.toml, if that is what a name means.
pub fn known(name: &Path) -> Option<&'static ModelEntry> {
    let is_path = name.symlink_metadata().is_ok();
    KNOWN.get().into_iter().flatten().find(|model| model.is_called(name) && !is_path)
}

/// A model on the hub: `ORG/NAME`, and which version of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubModel {
    /// `ORG/NAME`
    pub id: String,
    /// A branch, a tag or a commit.
    pub revision: String,
}

impl HubModel {
    /// Reads `ORG/NAME` or `ORG/NAME@REVISION`.
    pub fn parse(text: &str) -> Option<Self> {
        let (id, revision) = text.split_once('@').unwrap_or((text, DEFAULT_REVISION));
        let (org, name) = id.split_once('/')?;
        let plain = |part: &str| {
            let mut letters = part.chars();
            letters.next().is_some_and(|first| first.is_ascii_alphanumeric() || first == '_')
                && letters.all(|letter| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_' | '.'))
        };
        let model = Self { id: id.to_owned(), revision: revision.to_owned() };
        (plain(org) && plain(name) && is_plain_path(revision)).then_some(model)
    }

    #[cfg(feature = "hub")]
    /// Parses a model of the hub as [`parse`](Self::parse) does, or returns an error that shows the expected form.
    pub fn required(text: &str) -> anyhow::Result<Self> {
        Self::parse(text).ok_or_else(|| usage(format!("{text:?} is no model of the hub; write ORG/NAME")))
    }

    #[cfg(feature = "hub")]
    /// Returns the same model at another revision.
    pub fn at(self, revision: &str) -> anyhow::Result<Self> {
        if !is_plain_path(revision) {
            return Err(usage(format!("--revision {revision:?}: should be a branch, a tag or a commit")));
        }
        Ok(Self { revision: revision.to_owned(), ..self })
    }

    /// Its folder in the cache.
    pub fn folder(&self) -> anyhow::Result<PathBuf> {
        Ok(cache_folder()?.join(format!("models--{}", self.id.replace('/', "--"))))
    }

    /// The folder of its version in the cache, if there is one.
    pub fn snapshot(&self) -> anyhow::Result<Option<PathBuf>> {
        let folder = self.folder()?;
        let commit = match std::fs::read_to_string(folder.join("refs").join(&self.revision)) {
            Ok(commit) => commit.trim().to_owned(),
            Err(_) => self.revision.clone(),
        };
        if !is_plain_path(&commit) {
            bail!(
                "{}: refs/{} names no commit: {commit:?}; fetch the model again",
                folder.display(),
                self.revision
            );
        }
        let snapshot = folder.join("snapshots").join(commit);
        Ok(snapshot.is_dir().then_some(snapshot))
    }
}

/// Returns whether a relative path stays below its root.
pub fn is_plain_path(path: &str) -> bool {
    !path.is_empty()
        && !path.contains(['\\', '\0'])
        && Path::new(path).components().all(|part| matches!(part, Component::Normal(_)))
}

/// Where the hub's cache is: HF_HUB_CACHE, else `hub` in HF_HOME, else in the user's cache.
pub fn cache_folder() -> anyhow::Result<PathBuf> {
    match set("HF_HUB_CACHE") {
        Some(folder) => Ok(folder.into()),
        None => Ok(home()?.join("hub")),
    }
}

#[cfg(feature = "hub")]
/// The token to introduce ourselves with, from HF_TOKEN or from where `hf auth login` leaves it.
pub fn token() -> anyhow::Result<Option<String>> {
    let given = match set("HF_TOKEN") {
        Some(token) => Some(token),
        None => {
            let path = set("HF_TOKEN_PATH")
                .map_or_else(|| home().map(|home| home.join("token")), |path| Ok(path.into()));
            std::fs::read_to_string(path?).ok()
        }
    };
    let token = given.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty());
    match token {
        Some(token) if !token.chars().all(|letter| letter.is_ascii_graphic()) => {
            Err(usage("HF_TOKEN holds characters that no token has; copy it anew, or unset it"))
        }
        token => Ok(token),
    }
}

#[cfg(feature = "hub")]
/// The server to ask: HF_ENDPOINT, else the hub.
pub fn endpoint() -> String {
    let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned());
    endpoint.trim_end_matches('/').to_owned()
}

#[cfg(feature = "hub")]
/// Returns whether HF_HUB_OFFLINE forbids requests to the server.
pub fn is_offline() -> bool {
    set("HF_HUB_OFFLINE")
        .is_some_and(|value| matches!(value.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE"))
}

fn home() -> anyhow::Result<PathBuf> {
    if let Some(home) = set("HF_HOME") {
        return Ok(home.into());
    }
    let cache = match set("XDG_CACHE_HOME") {
        Some(cache) => PathBuf::from(cache),
        None => dirs::home_dir()
            .context("there is no home directory; say by HF_HOME where models go")?
            .join(".cache"),
    };
    Ok(cache.join("huggingface"))
}

fn set(variable: &str) -> Option<String> {
    env::var(variable).ok().filter(|value| !value.is_empty())
}

/// The path of a model that a command line names: a path, or else a name in firebox.toml, or else `ORG/NAME` of what has
/// been pulled.
pub fn resolve(name: &Path) -> anyhow::Result<PathBuf> {
    if name.symlink_metadata().is_ok() {
        return Ok(name.to_owned());
    }
    let known = known(name);
    let name = known.map_or(name, |model| &model.path);
    if known.is_some() && name.symlink_metadata().is_ok() {
        return Ok(name.to_owned());
    }
    let Some(model) = name.to_str().and_then(HubModel::parse) else {
        let known = KNOWN.get().into_iter().flatten().filter_map(|model| model.name.as_deref());
        let known: Vec<&str> = known.collect();
        let known = match known.is_empty() {
            true => String::new(),
            false => format!(", or a name in firebox.toml ({})", known.join(", ")),
        };
        return Err(anyhow!(
            "{}: no such file or directory; a model is a Hugging Face directory, a GGUF file, a bundle, ORG/NAME of the \
             hub{known}",
            name.display()
        ));
    };
    match model.snapshot()? {
        Some(snapshot) => Ok(runnable(snapshot)),
        None => Err(anyhow!(
            "{0}: no such file or directory, and the cache at {1} does not hold it; fetch it by `firebox pull {0}`",
            name.display(),
            cache_folder()?.display()
        )),
    }
}

/// The name, without that of its organization, of the model whose version in the cache a folder is.
pub fn name_of_snapshot(folder: &Path) -> Option<&str> {
    let versions = folder.parent().filter(|parent| parent.file_name() == Some(OsStr::new("snapshots")))?;
    let id = versions.parent()?.file_name()?.to_str()?.strip_prefix("models--")?;
    Some(id.split_once("--").map_or(id, |(_, name)| name))
}

/// Returns the path to open in a snapshot: the folder, or the only GGUF file that it holds.
pub fn runnable(snapshot: PathBuf) -> PathBuf {
    if snapshot.join("config.json").exists() {
        return snapshot;
    }
    let Ok(entries) = std::fs::read_dir(&snapshot) else { return snapshot };
    let files = entries.flatten().map(|entry| entry.path());
    let mut found: Vec<PathBuf> = files.filter(|path| path.extension() == Some(OsStr::new("gguf"))).collect();
    match (found.pop(), found.is_empty()) {
        (Some(only), true) => only,
        _ => snapshot,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_hub_are_told_from_paths() {
        let model = HubModel::parse("Qwen/Qwen3-0.6B").unwrap();
        assert_eq!((model.id.as_str(), model.revision.as_str()), ("Qwen/Qwen3-0.6B", "main"));
        assert_eq!(HubModel::parse("a/b@refs/pr/1").unwrap().revision, "refs/pr/1");
        for path in
            ["model", "./model", "../model", "/a/b", "a/b/c", "a/", "/b", "a/..", "a b/c", "a/b@../c", "a/b@"]
        {
            assert_eq!(HubModel::parse(path), None, "{path}");
        }
    }
}
