//! Parsing of `firebox.toml` into settings and model entries, with errors that name the line.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, Command};
use firebox_runtime::parse_bytes;
use firebox_runtime::schedule::Priority;
use firebox_server::PipelineSpec;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::model::ModelEntry;
use super::{Configuration, SERVE, key_of};
use crate::outcome::usage;

const TABLES: [&str; 5] = ["serve", "defaults", "model", "key", "pipelines"];
const PIPELINE_KEYS: [&str; 4] = ["router", "specialists", "fallback", "confidence"];
const MODEL_KEYS: [&str; 7] = ["name", "path", "memory", "heads", "priority", "pinned", "lazy"];

/// A name is as near as this to what was probably meant.
const NEAR: f64 = 0.6;

/// Settings by the names of their flags.
pub(super) type Values = BTreeMap<String, Value>;

/// The value of a setting in the file.
#[derive(Debug)]
pub(super) struct Value {
    /// The values as they would be written on a command line.
    pub texts: Vec<String>,
}

/// A file, for errors that say where in it something is.
pub(super) struct File<'a> {
    pub(super) path: &'a Path,
    pub(super) text: &'a str,
}

pub(super) type Item<'a, 'i> = (&'a Spanned<std::borrow::Cow<'i, str>>, &'a Spanned<DeValue<'i>>);

/// Reads a file, and checks it against what the command knows.
pub fn read(command: &Command, path: &Path, text: &str) -> anyhow::Result<Configuration> {
    let file = File { path, text };
    let parsed = file.parse()?;
    let mut found = Configuration { path: Some(path.to_owned()), ..Configuration::default() };
    for (key, value) in parsed.get_ref() {
        match (&**key.get_ref(), value.get_ref()) {
            ("defaults", DeValue::Table(table)) => found.defaults = file.values(command, None, table)?,
            ("serve", DeValue::Table(table)) => found.serve = file.values(command, Some(SERVE), table)?,
            ("model", DeValue::Array(models)) => {
                for model in models.iter() {
                    let model = file.model(model)?;
                    if model.0.name.is_some() && found.models.iter().any(|other| other.name == model.0.name) {
                        let name = model.0.name.unwrap_or_default();
                        return Err(
                            file.wrong(model.1, format!("two models are called {name:?}; give each a name"))
                        );
                    }
                    found.models.push(model.0);
                }
            }
            ("model", _) => {
                return Err(file.wrong(key.span(), "write [[model]], once for every model".into()));
            }
            ("key", DeValue::Array(keys)) => {
                found.keys = keys.iter().map(|key| file.key(key)).collect::<Result<_, _>>()?;
            }
            ("key", _) => return Err(file.wrong(key.span(), "write [[key]], once for every key".into())),
            ("pipelines", DeValue::Table(table)) => {
                let pipelines = table.iter().map(|pipeline| file.pipeline(pipeline));
                found.pipelines = pipelines.collect::<Result<_, _>>()?;
            }
            ("pipelines", _) => {
                let reason = "write [pipelines.NAME], once for every pipeline";
                return Err(file.wrong(key.span(), reason.into()));
            }
            (name @ ("defaults" | "serve"), _) => {
                return Err(file.wrong(key.span(), format!("write [{name}], and settings below it")));
            }
            (name, _) => {
                let reason = format!(
                    "there is no [{name}]; there are [serve], [defaults], [[model]], [[key]] and [pipelines.NAME]"
                );
                let belongs = key_in(command, None, name).or_else(|| key_in(command, Some(SERVE), name));
                let reason = match belongs {
                    Some(_) => format!("{name} belongs below [defaults] or [serve]"),
                    None => meant(reason, name, TABLES.into_iter()),
                };
                return Err(file.wrong(key.span(), reason));
            }
        }
    }
    Ok(found)
}

impl File<'_> {
    pub(super) fn wrong(&self, at: Range<usize>, reason: String) -> anyhow::Error {
        let before = self.text.get(..at.start).unwrap_or(self.text);
        let line = 1 + before.bytes().filter(|byte| *byte == b'\n').count();
        usage(format!("{}, line {line}: {reason}", self.path.display()))
    }

    /// The settings below `[defaults]`, or below the table of one command.
    fn values(&self, command: &Command, of: Option<&str>, table: &DeTable<'_>) -> anyhow::Result<Values> {
        let mut values = Values::new();
        for (name, value) in table {
            let key = name.get_ref().replace('_', "-");
            let Some((command, arg)) = key_in(command, of, &key) else {
                return Err(self.wrong(name.span(), unknown(command, of, name.get_ref(), &key)));
            };
            let texts = self.texts(value, matches!(arg.get_action(), ArgAction::Append))?;
            for text in &texts {
                check(command, &key, text).map_err(|reason| self.wrong(value.span(), reason))?;
            }
            if values.insert(key, Value { texts }).is_some() {
                return Err(self.wrong(name.span(), format!("{} is there twice", name.get_ref())));
            }
        }
        Ok(values)
    }

    /// Converts a value to the texts that would be written on a command line.
    fn texts(&self, value: &Spanned<DeValue<'_>>, several: bool) -> anyhow::Result<Vec<String>> {
        let text = |value: &Spanned<DeValue<'_>>| match value.get_ref() {
            DeValue::String(text) => Ok(text.to_string()),
            DeValue::Integer(number) if number.radix() == 10 => Ok(number.as_str().to_owned()),
            DeValue::Float(number) => Ok(number.as_str().to_owned()),
            DeValue::Boolean(is) => Ok(is.to_string()),
            DeValue::Integer(_) => Err(self.wrong(value.span(), "write the number in decimal digits".into())),
            _ if several => {
                Err(self.wrong(value.span(), "should be a text or a number, or a list of them".into()))
            }
            _ => Err(self.wrong(value.span(), "should be a text or a number".into())),
        };
        match value.get_ref() {
            DeValue::Array(items) if several => items.iter().map(text).collect(),
            _ => Ok(vec![text(value)?]),
        }
    }

    fn model(&self, model: &Spanned<DeValue<'_>>) -> anyhow::Result<(ModelEntry, Range<usize>)> {
        let DeValue::Table(table) = model.get_ref() else {
            return Err(self.wrong(model.span(), "write [[model]], and its name and path below".into()));
        };
        let mut entry = ModelEntry::default();
        let mut has_path = false;
        for item @ (key, value) in table {
            match &**key.get_ref() {
                "name" => {
                    let name = self.text(item)?;
                    self.name(&name, value.span())?;
                    entry.name = Some(name);
                }
                "path" => {
                    has_path = true;
                    entry.path = self.beside(&self.text(item)?);
                }
                "memory" => {
                    let size = parse_bytes(&self.texts(value, false)?.concat());
                    entry.memory = Some(size.map_err(|error| self.wrong(value.span(), error.to_string()))?);
                    entry.reserved = entry.memory;
                }
                "heads" => entry.heads = self.texts(value, true)?,
                "priority" => entry.priority = Some(self.priority(item)?),
                "pinned" => entry.pinned = self.truth(item)?,
                "lazy" => entry.lazy = self.truth(item)?,
                name => {
                    let reason = format!("a model has no {name:?}; it has {}", MODEL_KEYS.join(", "));
                    return Err(self.wrong(key.span(), meant(reason, name, MODEL_KEYS.into_iter())));
                }
            }
        }
        if !has_path {
            return Err(
                self.wrong(model.span(), "a model needs a path, such as path = \"models/small\"".into())
            );
        }
        if entry.pinned && entry.lazy {
            let reason = "what is pinned is there from the beginning; leave out one of pinned and lazy";
            return Err(self.wrong(model.span(), reason.into()));
        }
        Ok((entry, model.span()))
    }

    /// Reads a whole number of at least `least`.
    pub(super) fn count(&self, (key, value): Item<'_, '_>, least: u32) -> anyhow::Result<u32> {
        let number = self.texts(value, false)?.concat().parse().ok();
        number.filter(|number| *number >= least).ok_or_else(|| {
            let reason = format!("{} is a whole number from {least} on", key.get_ref());
            self.wrong(value.span(), reason)
        })
    }

    /// Reads a pipeline: its router, its specialists and its fallback.
    fn pipeline(&self, (name, value): Item<'_, '_>) -> anyhow::Result<PipelineSpec> {
        let wrong = |at: Range<usize>, reason: &str| self.wrong(at, reason.into());
        let example = "such as router = \"small\", specialists = { code = \"coder\" }, fallback = \"small\"";
        let DeValue::Table(table) = value.get_ref() else {
            return Err(wrong(value.span(), &format!("a pipeline is a table, {example}")));
        };
        self.name(name.get_ref(), name.span())?;
        let (mut router, mut fallback, mut confidence) = (None, None, 0.0);
        let mut specialists = Vec::new();
        for item @ (key, value) in table {
            match &**key.get_ref() {
                "router" => router = Some(self.text(item)?),
                "fallback" => fallback = Some(self.text(item)?),
                "confidence" => {
                    let parsed = self.texts(value, false)?.concat().parse().ok();
                    confidence = parsed.filter(|share| (0.0..=1.0).contains(share)).ok_or_else(|| {
                        wrong(value.span(), "confidence is a number from 0 to 1, such as 0.5")
                    })?;
                }
                "specialists" => {
                    let DeValue::Table(table) = value.get_ref() else {
                        let reason = "write specialists = { LABEL = \"MODEL\" }, with the router's labels";
                        return Err(wrong(value.span(), reason));
                    };
                    for item @ (label, _) in table {
                        specialists.push((label.get_ref().to_string(), self.text(item)?));
                    }
                }
                name => {
                    let reason = format!("a pipeline has no {name:?}; it has {}", PIPELINE_KEYS.join(", "));
                    return Err(self.wrong(key.span(), meant(reason, name, PIPELINE_KEYS.into_iter())));
                }
            }
        }
        let (Some(router), Some(fallback), false) = (router, fallback, specialists.is_empty()) else {
            let reason = format!("a pipeline needs a router, specialists and a fallback, {example}");
            return Err(self.wrong(name.span(), reason));
        };
        let spec =
            PipelineSpec::new(name.get_ref().to_string(), router, fallback).with_confidence(confidence);
        Ok(specialists.into_iter().fold(spec, |spec, (label, model)| spec.with_specialist(label, model)))
    }

    /// Refuses names that clients could not ask for.
    fn name(&self, name: &str, at: Range<usize>) -> anyhow::Result<()> {
        if name.is_empty() || name.contains(['/', ':']) || name.contains(char::is_whitespace) {
            let reason = "a name has no spaces, no slashes and no colons, and is not empty";
            return Err(self.wrong(at, reason.into()));
        }
        Ok(())
    }

    pub(super) fn text(&self, (key, value): Item<'_, '_>) -> anyhow::Result<String> {
        match value.get_ref() {
            DeValue::String(text) => Ok(text.to_string()),
            _ => Err(self.wrong(value.span(), format!("{} should be a text in quotes", key.get_ref()))),
        }
    }

    pub(super) fn truth(&self, (key, value): Item<'_, '_>) -> anyhow::Result<bool> {
        match value.get_ref() {
            DeValue::Boolean(is) => Ok(*is),
            _ => Err(self.wrong(value.span(), format!("{} is true or false", key.get_ref()))),
        }
    }

    fn priority(&self, item: Item<'_, '_>) -> anyhow::Result<Priority> {
        let text = self.text(item)?;
        let found = Priority::ALL.into_iter().find(|priority| priority.to_string() == text);
        found.ok_or_else(|| {
            let known = Priority::ALL.map(|priority| priority.to_string());
            let reason = format!("{text:?} is no priority; there are {}", known.join(", "));
            self.wrong(item.1.span(), meant(reason, &text, known.iter().map(String::as_str)))
        })
    }

    /// A path as the file means it: from where the file is. What is not there may be a name of the hub.
    fn beside(&self, path: &str) -> PathBuf {
        let beside = self.path.parent().unwrap_or(Path::new("")).join(path);
        if beside.exists() { beside } else { PathBuf::from(path) }
    }
}

/// The option behind a key: one of a command, or else one of any command but those with tables of their own.
fn key_in<'a>(command: &'a Command, of: Option<&str>, key: &str) -> Option<(&'a Command, &'a Arg)> {
    let own = command.get_arguments().find(|arg| key_of(arg).as_deref() == Some(key));
    let is_meant =
        of.is_none_or(|of| of == command.get_name()) && (of.is_some() || command.get_name() != SERVE);
    match own.filter(|_| is_meant) {
        Some(arg) => Some((command, arg)),
        None => command.get_subcommands().find_map(|command| key_in(command, of, key)),
    }
}

/// All keys that there could have been.
fn keys(command: &Command, of: Option<&str>) -> Vec<String> {
    let all = command.get_arguments().filter_map(key_of);
    let mut all: Vec<String> = all.filter(|key| key_in(command, of, key).is_some()).collect();
    all.extend(command.get_subcommands().flat_map(|command| keys(command, of)));
    all.sort();
    all.dedup();
    all
}

fn unknown(command: &Command, of: Option<&str>, name: &str, key: &str) -> String {
    let table = of.unwrap_or("defaults");
    if of.is_none() && key_in(command, Some(SERVE), key).is_some() {
        return format!("{name} is a setting of the server and belongs below [serve]");
    }
    if of.is_some() && key_in(command, None, key).is_some() {
        return format!("{name} is no setting of the server; it belongs below [defaults]");
    }
    let known = keys(command, of);
    meant(format!("there is no {name:?} in [{table}]"), key, known.iter().map(String::as_str))
}

/// A complaint about a name, with the one that was probably meant.
pub(super) fn meant<'a>(reason: String, name: &str, known: impl Iterator<Item = &'a str>) -> String {
    let likeness = |known: &&str| strsim::jaro_winkler(name, known);
    let nearest = known.max_by(|one, other| likeness(one).total_cmp(&likeness(other)));
    match nearest.filter(|nearest| likeness(nearest) >= NEAR) {
        Some(nearest) => format!("{reason}; did you mean {nearest}?"),
        None => reason,
    }
}

/// Checks a value with the parser of the command line, and returns the reason if it is refused.
fn check(command: &Command, key: &str, text: &str) -> Result<(), String> {
    // Other arguments that the command requires are not checked here.
    let alone = command.clone().mut_args(|arg| arg.required(false)).no_binary_name(true);
    let Err(error) = alone.try_get_matches_from([format!("--{key}={text}")]) else { return Ok(()) };
    match error.kind() {
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => {
            let text = error.to_string();
            let text = text.split("For more information").next().unwrap_or(&text);
            Err(text.trim().trim_start_matches("error: ").to_owned())
        }
        _ => Ok(()),
    }
}
