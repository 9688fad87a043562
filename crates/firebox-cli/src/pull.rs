//! `firebox pull`

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use hf_hub::api::Progress;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};
use indicatif::ProgressBar;
use serde_json::Value;

use crate::console::{Console, human_bytes};
use crate::hub::{self, HubModel, is_plain_path};
use crate::outcome::Outcome;

/// The number of times that a broken download is resumed before giving up.
const RETRIES: usize = 5;

/// Files beside the weights that a model is read from.
const SMALL_FILES: [&str; 20] = [
    BUNDLE,
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.json",
    "gguf-vocabulary.json",
    // Modules of sentence-transformers behind the encoder.
    "modules.json",
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "2_Dense/model.safetensors",
    "3_Dense/config.json",
    "3_Dense/model.safetensors",
];

const INDEX: &str = "model.safetensors.index.json";
const BUNDLE: &str = "firebox.json";

/// Options of `firebox pull`.
#[derive(Debug, Args)]
#[command(after_help = "\
Environment:
  HF_HOME, HF_HUB_CACHE  where models are kept
  HF_ENDPOINT            which server to ask
  HF_TOKEN               for private and gated models
  HF_HUB_OFFLINE=1       look into the cache only

An interrupted download goes on where it stopped.")]
pub struct PullArgs {
    /// The model's name on the hub
    #[arg(value_name = "ORG/NAME")]
    model: String,
    /// A branch, a tag or a commit [default: main]
    #[arg(long, value_name = "REVISION")]
    revision: Option<String>,
    /// Fetch the files of this name instead of those a model is read from; * and ? stand for any text and any
    /// letter; may be given several times
    #[arg(long, value_name = "PATTERN")]
    file: Vec<String>,
}

/// Fetches a model into the hub's cache and prints where it is.
pub fn pull(args: &PullArgs, console: &Console) -> anyhow::Result<Outcome> {
    let mut model = HubModel::required(&args.model)?;
    if let Some(revision) = &args.revision {
        model = model.at(revision)?;
    }
    let path = if hub::is_offline() {
        find_cached(&model, &args.file)?
    } else {
        fetch(&model, &args.file, console)?
    };
    console.line(path.display().to_string())?;
    Ok(Outcome::Done)
}

fn find_cached(model: &HubModel, patterns: &[String]) -> anyhow::Result<PathBuf> {
    let place = hub::cache_folder()?;
    let snapshot = model.snapshot()?.with_context(|| {
        format!("{}: not in the cache at {}, and HF_HUB_OFFLINE is set", model.id, place.display())
    })?;
    let missing =
        if patterns.is_empty() { missing_files(&snapshot)? } else { missing_patterns(&snapshot, patterns)? };
    if !missing.is_empty() {
        bail!("{}: the cache lacks {}, and HF_HUB_OFFLINE is set", model.id, missing.join(", "));
    }
    Ok(located(snapshot, patterns))
}

/// Returns the files that are missing in a snapshot to run it.
fn missing_files(snapshot: &Path) -> anyhow::Result<Vec<String>> {
    let path = snapshot.join(INDEX);
    let wanted = match fs::read(&path) {
        Ok(bytes) => shards(&bytes).with_context(|| path.display().to_string())?,
        Err(_) if hub::runnable(snapshot.to_owned()) != *snapshot => return Ok(Vec::new()),
        Err(_) if snapshot.join(BUNDLE).exists() => Vec::new(),
        Err(_) => vec!["model.safetensors".to_owned()],
    };
    let all = wanted.into_iter().chain(["config.json".to_owned()]);
    Ok(all.filter(|file| !snapshot.join(file).exists()).collect())
}

/// The files that an index says the weights are in: their makers call them what they like.
fn shards(index: &[u8]) -> anyhow::Result<Vec<String>> {
    let index: Value = serde_json::from_slice(index)?;
    let shards = index.get("weight_map").and_then(Value::as_object).into_iter().flat_map(|map| map.values());
    let mut shards: Vec<String> = shards.filter_map(Value::as_str).map(str::to_owned).collect();
    shards.sort_unstable();
    shards.dedup();
    Ok(shards)
}

fn missing_patterns(snapshot: &Path, patterns: &[String]) -> anyhow::Result<Vec<String>> {
    let mut files = Vec::new();
    collect_files(snapshot, "", &mut files)?;
    let lacking = patterns.iter().filter(|pattern| !files.iter().any(|file| matches(pattern, file)));
    Ok(lacking.cloned().collect())
}

fn collect_files(folder: &Path, prefix: &str, files: &mut Vec<String>) -> anyhow::Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            collect_files(&entry.path(), &format!("{name}/"), files)?;
        } else {
            files.push(name);
        }
    }
    Ok(())
}

/// Returns the path to give to `run`: the file if a pattern asked for one, else the path that the snapshot is run from.
fn located(snapshot: PathBuf, patterns: &[String]) -> PathBuf {
    let mut files = Vec::new();
    if patterns.is_empty() || collect_files(&snapshot, "", &mut files).is_err() {
        return hub::runnable(snapshot);
    }
    files.retain(|file| file.ends_with(".gguf") && patterns.iter().any(|pattern| matches(pattern, file)));
    match &files[..] {
        [only] => snapshot.join(only),
        _ => snapshot,
    }
}

fn fetch(model: &HubModel, patterns: &[String], console: &Console) -> anyhow::Result<PathBuf> {
    let endpoint = hub::endpoint();
    let cache = Cache::new(hub::cache_folder()?);
    let api = ApiBuilder::from_cache(cache.clone())
        .with_endpoint(endpoint.clone())
        .with_token(hub::token()?)
        .with_progress(false)
        .with_retries(RETRIES)
        .with_user_agent("firebox", env!("CARGO_PKG_VERSION"))
        .build()?;
    let repo = Repo::with_revision(model.id.clone(), RepoType::Model, model.revision.clone());
    let remote = api.repo(repo.clone());
    let info = remote.info().map_err(|error| explained(error, model, &endpoint, None))?;
    if !is_plain_path(&info.sha) {
        bail!("{endpoint}: the commit {:?} of {} is none", info.sha, model.id);
    }
    let listed: Vec<&str> = info.siblings.iter().map(|file| file.rfilename.as_str()).collect();
    let wanted = if patterns.is_empty() { model_files(&listed) } else { matching(&listed, patterns) };
    let wanted = wanted.with_context(|| model.id.clone())?;

    let cached = cache.repo(repo);
    let snapshot = cached.pointer_path(&info.sha);
    let fetcher =
        Fetcher { api: &api, remote: &remote, model, endpoint: &endpoint, commit: &info.sha, console };
    let bring = |file: &str| {
        if !is_plain_path(file) {
            bail!("{endpoint}: {} lists a file {file:?} that would lie outside of it", model.id);
        }
        let place = snapshot.join(file);
        if place.exists() {
            console.detail(format!("{file}: already here"));
            return Ok(());
        }
        fetcher.fetch(file, &place, |etag| cached.blob_path(etag))
    };
    wanted.iter().try_for_each(|file| bring(file))?;
    // A bundle says by itself what it is made of.
    if patterns.is_empty() && wanted.contains(&INDEX) && !wanted.contains(&BUNDLE) {
        let index = fs::read(snapshot.join(INDEX)).context("cannot read the cache")?;
        let shards = shards(&index).with_context(|| format!("{}: {INDEX}", model.id))?;
        if shards.is_empty() {
            bail!("{}: {INDEX} names no weights; choose files by --file: {}", model.id, listed.join(", "));
        }
        if let Some(lacking) = shards.iter().find(|shard| !listed.contains(&shard.as_str())) {
            bail!(
                "{}: {INDEX} names {lacking}, which is not there; choose files by --file: {}",
                model.id,
                listed.join(", ")
            );
        }
        shards.iter().try_for_each(|shard| bring(shard))?;
    }
    // Every file may have been here already, under another name of the same commit.
    cached.create_ref(&info.sha).context("cannot write to the cache")?;
    Ok(located(snapshot, patterns))
}

struct Fetcher<'a> {
    api: &'a Api,
    remote: &'a ApiRepo,
    model: &'a HubModel,
    endpoint: &'a str,
    commit: &'a str,
    console: &'a Console,
}

impl Fetcher<'_> {
    fn fetch(&self, file: &str, place: &Path, blob: impl Fn(&str) -> PathBuf) -> anyhow::Result<()> {
        let explain = |error| explained(error, self.model, self.endpoint, Some(file));
        let metadata = self.api.metadata(&self.remote.url(file)).map_err(explain)?;
        if metadata.commit_hash() != self.commit {
            bail!(
                "{}: changed on the server while it was fetched; run the same command again",
                self.model.id
            );
        }
        let etag = metadata.etag();
        if !is_plain_path(etag) || etag.contains('/') {
            bail!("{}: {file}: the server's ETag {etag:?} is no name of a blob", self.endpoint);
        }
        let size = metadata.size() as u64;
        let blob = blob(etag);
        let length = |path: &Path| fs::metadata(path).ok().map(|metadata| metadata.len());
        let partial = blob.with_extension("part");
        match length(&partial) {
            // Nothing is left to ask for, and servers refuse an empty range.
            Some(len) if len == size => fs::rename(&partial, &blob).context("cannot write to the cache")?,
            Some(len) if len > size => fs::remove_file(&partial).context("cannot write to the cache")?,
            Some(len) if len > 0 => {
                self.console.detail(format!("{file}: going on after {}", human_bytes(len)));
            }
            _ => {}
        }
        if length(&blob) == Some(size) && link(&blob, place).is_ok() {
            self.console.detail(format!("{file}: already here"));
            return Ok(());
        }
        let bar = self.console.bar(size);
        let fetched = self.remote.download_with_progress(file, Bar(bar.clone()));
        bar.finish_and_clear();
        fetched.map_err(explain)?;
        // A server that ignores ranges sends the beginning twice.
        let found = length(&blob);
        if found != Some(size) {
            let _ = fs::remove_file(&blob);
            let _ = fs::remove_file(place);
            bail!(
                "{file}: the server sent {} bytes and not {size}; run the same command again",
                found.unwrap_or(0)
            );
        }
        self.console.note(format!("{file}: {}", human_bytes(size)));
        Ok(())
    }
}

/// Puts a blob that is here already into a snapshot, as the cache's other users do.
fn link(blob: &Path, place: &Path) -> std::io::Result<()> {
    let (Some(folder), Some(repository), Some(name)) =
        (place.parent(), blob.parent().and_then(Path::parent), blob.file_name())
    else {
        return Err(std::io::ErrorKind::InvalidInput.into());
    };
    fs::create_dir_all(folder)?;
    #[cfg(unix)]
    {
        let depth = folder.strip_prefix(repository).map_or(2, |below| below.components().count());
        let up: PathBuf = std::iter::repeat_n("..", depth).collect();
        std::os::unix::fs::symlink(up.join("blobs").join(name), place)
    }
    #[cfg(not(unix))]
    {
        let _ = (repository, name);
        fs::copy(blob, place).map(drop)
    }
}

/// The files a model is read from, without those that an index names.
fn model_files<'a>(listed: &[&'a str]) -> anyhow::Result<Vec<&'a str>> {
    let mut files: Vec<&str> = listed.iter().copied().filter(|file| SMALL_FILES.contains(file)).collect();
    let among = |wanted: &dyn Fn(&str) -> bool| {
        listed.iter().copied().filter(|file| wanted(file)).collect::<Vec<_>>()
    };
    let weights = if listed.contains(&BUNDLE) {
        among(&|file| file.starts_with("segments/") || file.starts_with("heads/") || file == INDEX)
    } else if listed.contains(&INDEX) {
        vec![INDEX]
    } else if listed.contains(&"model.safetensors") {
        vec!["model.safetensors"]
    } else {
        among(&|file| file.ends_with(".safetensors") && !file.contains('/'))
    };
    if weights.is_empty() {
        let gguf = among(&|file| file.ends_with(".gguf"));
        return match &gguf[..] {
            [only] => Ok(vec![only]),
            [] => Err(anyhow!("holds no weights that this program reads: no safetensors and no GGUF file")),
            several => {
                Err(anyhow!("holds {} GGUF files; choose by --file: {}", several.len(), several.join(", ")))
            }
        };
    }
    files.extend(weights);
    Ok(files)
}

fn matching<'a>(listed: &[&'a str], patterns: &[String]) -> anyhow::Result<Vec<&'a str>> {
    if let Some(vain) = patterns.iter().find(|pattern| !listed.iter().any(|file| matches(pattern, file))) {
        bail!("holds no file {vain:?}; it holds {}", listed.join(", "));
    }
    let wanted = |file: &&str| patterns.iter().any(|pattern| matches(pattern, file));
    Ok(listed.iter().copied().filter(wanted).collect())
}

/// Returns whether a name matches a pattern with `*` and `?`.
fn matches(pattern: &str, name: &str) -> bool {
    let mut letters = pattern.chars();
    match letters.next() {
        None => name.is_empty(),
        Some('*') => {
            let rest = letters.as_str();
            name.char_indices().map(|(at, _)| at).chain([name.len()]).any(|at| matches(rest, &name[at..]))
        }
        Some(wanted) => {
            let mut found = name.chars();
            found.next().is_some_and(|letter| wanted == '?' || wanted == letter)
                && matches(letters.as_str(), found.as_str())
        }
    }
}

/// The hub answers alike for what does not exist and what may not be seen, so the remedy names both.
fn explained(error: ApiError, model: &HubModel, endpoint: &str, file: Option<&str>) -> anyhow::Error {
    let what = match file {
        Some(file) => format!("{}: {file}", model.id),
        None => model.id.clone(),
    };
    let mut cause = &error;
    while let ApiError::TooManyRetries(inner) = cause {
        cause = inner;
    }
    let ApiError::RequestError(request) = cause else {
        return anyhow!("{what}: {error}; what has arrived is kept, so run the same command again to go on");
    };
    match **request {
        ureq::Error::StatusCode(401) => anyhow!(
            "{what}: {endpoint} says 401: there is no such model, or it is private or gated and HF_TOKEN is missing or wrong"
        ),
        ureq::Error::StatusCode(403) => anyhow!(
            "{what}: {endpoint} says 403: access is restricted; accept the model's terms at {endpoint}/{} and set HF_TOKEN",
            model.id
        ),
        ureq::Error::StatusCode(404) => anyhow!(
            "{what}: {endpoint} says 404: there is no such model or file at revision {:?}",
            model.revision
        ),
        ureq::Error::StatusCode(code) => anyhow!("{what}: {endpoint} says {code}; try again later"),
        _ => anyhow!("{what}: cannot reach {endpoint}: {request}; HF_ENDPOINT names another server"),
    }
}

/// Shows a download's progress; a download that goes on begins where the one before it stopped.
struct Bar(ProgressBar);

impl Progress for Bar {
    fn init(&mut self, size: usize, filename: &str) {
        self.0.set_length(size as u64);
        self.0.set_position(0);
        self.0.set_message(filename.to_owned());
    }

    fn update(&mut self, size: usize) {
        self.0.inc(size as u64);
    }

    fn finish(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_in_a_shell() {
        for (pattern, name) in
            [("*.gguf", "a.gguf"), ("*Q4_?_M*", "m-Q4_K_M.gguf"), ("**", ""), ("a/*", "a/b"), ("ü*", "üb")]
        {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("*.gguf", "a.ggu"), ("?", ""), ("a", "ab"), ("", "a")] {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn a_model_comes_once_and_without_what_is_not_read() {
        let listed = [
            "README.md",
            "1_Pooling/config.json",
            "2_Dense/model.safetensors",
            "config.json",
            "consolidated.safetensors",
            "model.safetensors",
            "pytorch_model.bin",
        ];
        assert_eq!(
            model_files(&listed).unwrap(),
            ["1_Pooling/config.json", "2_Dense/model.safetensors", "config.json", "model.safetensors"]
        );
        let listed = [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            INDEX,
            "onnx/model.onnx",
        ];
        assert_eq!(model_files(&listed).unwrap(), [INDEX]);
        assert_eq!(model_files(&["a.gguf"]).unwrap(), ["a.gguf"]);
        assert!(model_files(&["a.gguf", "b.gguf"]).unwrap_err().to_string().contains("--file"));
        assert!(model_files(&["README.md"]).is_err());
    }
}
