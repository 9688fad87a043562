//! `firebox session`: conversations that `chat --session` keeps in files.

mod rewind;
mod saved_conversation;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, Subcommand, ValueEnum};
use firebox_runtime::{SessionSummary, Turn, TurnKind};
use firebox_text::Message;
use serde_json::{Value, json};

use crate::columns::{printable, table};
use crate::console::{Console, Style, grouped, human_bytes};
use crate::outcome::{Outcome, usage};
use saved_conversation::SavedConversation;

/// Letters of a hash that tell models apart.
const HASH_LETTERS: usize = 12;

/// Letters of a message that tell it from others.
const MESSAGE_LETTERS: usize = 100;

/// What can be done with saved conversations.
#[derive(Debug, Subcommand)]
pub enum SessionCommand {
    /// List the conversations in folders
    List(ListArgs),
    /// Show what is in one: what was said, turns, facts, pins
    Show(ShowArgs),
    /// Copy one, to go on from it in two ways
    Fork(ForkArgs),
    /// Take back the last turns of one
    Rewind(rewind::RewindArgs),
    /// Remove some
    Remove(RemoveArgs),
    /// Print what was said, without what the model remembers of it
    Export(ExportArgs),
}

/// Options of `firebox session list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Folders, or files, which have to be saved conversations
    #[arg(value_name = "PATH", default_value = ".")]
    paths: Vec<PathBuf>,
    /// Print a JSON list
    #[arg(long)]
    json: bool,
}

/// Options of `firebox session show`.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// The file
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Options of `firebox session fork`.
#[derive(Debug, Args)]
pub struct ForkArgs {
    /// The file
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The copy, which must not be there yet
    #[arg(value_name = "NEW")]
    copy: PathBuf,
}

/// Options of `firebox session remove`.
#[derive(Debug, Args)]
pub struct RemoveArgs {
    /// The files
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
}

/// Options of `firebox session export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// The file
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// How to write it
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t)]
    format: Format,
    /// Write to this file instead of stdout
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// How a conversation is written.
#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum Format {
    /// A JSON list of messages, as `/save` writes it
    #[default]
    Json,
    /// For people
    Markdown,
}

/// Does one of them.
pub fn session(command: &SessionCommand, console: &Console) -> anyhow::Result<Outcome> {
    match command {
        SessionCommand::List(args) => list(args, console)?,
        SessionCommand::Show(args) => show(args, console)?,
        SessionCommand::Fork(args) => fork(args, console)?,
        SessionCommand::Rewind(args) => rewind::rewind(args, console)?,
        SessionCommand::Remove(args) => remove(args, console)?,
        SessionCommand::Export(args) => export(args, console)?,
    }
    Ok(Outcome::Done)
}

fn list(args: &ListArgs, console: &Console) -> anyhow::Result<()> {
    let mut files = Vec::new();
    for path in &args.paths {
        if path.is_dir() {
            let entries = fs::read_dir(path).with_context(|| format!("cannot read {}", path.display()))?;
            let mut found: Vec<PathBuf> = entries
                .flatten()
                .map(|entry| entry.path())
                .filter(|path| SessionSummary::is_session_file(path))
                .collect();
            found.sort();
            files.extend(found.into_iter().map(|path| (path, false)));
        } else {
            files.push((path.clone(), true));
        }
    }
    let (mut all, mut failure) = (Vec::new(), None);
    for (path, is_named) in files {
        let error = match SavedConversation::open(&path) {
            Ok(saved) => {
                all.push(saved);
                continue;
            }
            Err(error) => error,
        };
        // One that is broken does not hide the others. Of those that were asked for by name the last is what it all fails
        // with.
        let told = if is_named { failure.replace(error) } else { Some(error) };
        if let Some(error) = told {
            console.error(&crate::outcome::in_one_line(&error));
        }
    }
    listed(&all, args.json, failure.is_some(), console)?;
    failure.map_or(Ok(()), Err)
}

fn listed(all: &[SavedConversation], json: bool, failed: bool, console: &Console) -> anyhow::Result<()> {
    if json {
        return console.json(&all.iter().map(SavedConversation::json).collect::<Vec<_>>());
    }
    if all.is_empty() {
        if !failed {
            console.note("no saved conversation; `firebox chat --session FILE` keeps one");
        }
        return Ok(());
    }
    let rows = all.iter().map(|saved| {
        let counted = |kind| saved.turns(kind).count().to_string();
        let pinned = saved.summary.turns.iter().filter(|turn| turn.pinned).count();
        [
            saved.path.display().to_string(),
            saved.questions().to_string(),
            grouped(saved.summary.tokens.len() as u64),
            counted(TurnKind::Fact),
            pinned.to_string(),
            human_bytes(saved.summary.bytes),
            saved.model(),
        ]
    });
    let header = ["file", "questions", "tokens", "facts", "pinned", "size", "model"];
    console.line(table(Some(header), &[1, 2, 3, 4, 5], rows))
}

fn show(args: &ShowArgs, console: &Console) -> anyhow::Result<()> {
    let saved = SavedConversation::open(&args.file)?;
    if args.json {
        return console.json(&saved.json());
    }
    let facts = [
        ("file", saved.path.display().to_string()),
        ("size", human_bytes(saved.summary.bytes)),
        ("tokens", grouped(saved.summary.tokens.len() as u64)),
        ("model", saved.model()),
        ("head", saved.head().to_owned()),
        ("kept in", format!("{:?}", saved.summary.kv_type).to_lowercase()),
    ];
    console.line(table(None, &[], facts.map(|(name, value)| [name.to_owned(), value])))?;
    let turn = |turn: &Turn| {
        [
            turn.id.0.to_string(),
            format!("{:?}", turn.kind).to_lowercase(),
            turn.tokens.to_string(),
            roles(turn),
            marks(turn),
        ]
    };
    console.line(format!(
        "\n{}",
        table(Some(["turn", "kind", "tokens", "roles", ""]), &[0, 2], saved.summary.turns.iter().map(turn))
    ))?;
    for message in saved.messages.iter().flatten() {
        let said = message.text();
        let mut excerpt: String = said.chars().take(MESSAGE_LETTERS).collect::<String>().replace('\n', " ");
        if excerpt.len() < said.len() {
            excerpt.push('…');
        }
        let role = console.styled(Style::Strong, &printable(&message.role));
        console.line(format!("\n{role}: {}", printable(&excerpt)))?;
    }
    Ok(())
}

fn fork(args: &ForkArgs, console: &Console) -> anyhow::Result<()> {
    let saved = SavedConversation::open(&args.file)?;
    let folder = args.copy.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Beside first, so that the copy is whole or not there.
    let mut beside = tempfile::NamedTempFile::new_in(folder)
        .with_context(|| format!("cannot write to {}", folder.display()))?;
    let copying = || format!("cannot copy {} to {}", args.file.display(), args.copy.display());
    let mut original = fs::File::open(&args.file).with_context(copying)?;
    std::io::copy(&mut original, &mut beside).with_context(copying)?;
    beside.as_file().sync_all().with_context(copying)?;
    if args.copy.symlink_metadata().is_ok() {
        return Err(usage(format!("{} is there already; name a file that is not", args.copy.display())));
    }
    beside.persist_noclobber(&args.copy).map_err(|error| error.error).with_context(copying)?;
    console.detail(format!("copied {}", human_bytes(saved.summary.bytes)));
    console.line(args.copy.display().to_string())
}

fn remove(args: &RemoveArgs, console: &Console) -> anyhow::Result<()> {
    for path in &args.files {
        if !SessionSummary::is_session_file(path) {
            let reason = if path.exists() { "is no saved conversation, and stays" } else { "is not there" };
            return Err(usage(format!("{} {reason}", path.display())));
        }
        fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))?;
        console.note(format!("removed {}", path.display()));
    }
    Ok(())
}

fn export(args: &ExportArgs, console: &Console) -> anyhow::Result<()> {
    let saved = SavedConversation::open(&args.file)?;
    let Some(messages) = &saved.messages else {
        return Err(usage(format!(
            "{} holds a session, but not what was said; `firebox session show` says what it holds",
            saved.path.display()
        )));
    };
    let text = match args.format {
        Format::Json => serde_json::to_string_pretty(messages)? + "\n",
        Format::Markdown => messages.iter().map(markdown).collect(),
    };
    match &args.output {
        Some(path) => fs::write(path, text).with_context(|| format!("cannot write {}", path.display())),
        None => console.print(&text),
    }
}

fn markdown(message: &Message) -> String {
    format!("**{}:** {}\n\n", message.role, message.text())
}

fn roles(turn: &Turn) -> String {
    let roles: Vec<String> = turn.roles.iter().map(|role| format!("{role:?}").to_lowercase()).collect();
    roles.join(", ")
}

fn marks(turn: &Turn) -> String {
    let hidden = turn.hidden.map(|hidden| format!("{hidden:?}").to_lowercase());
    let pinned = turn.pinned.then(|| "pinned".to_owned());
    [pinned, hidden].into_iter().flatten().collect::<Vec<_>>().join(", ")
}

impl SavedConversation {
    fn turns(&self, kind: TurnKind) -> impl Iterator<Item = &Turn> {
        self.summary.turns.iter().filter(move |turn| turn.kind == kind)
    }

    /// Returns the number of messages of the user.
    fn questions(&self) -> usize {
        match &self.messages {
            Some(messages) => messages.iter().filter(|message| message.role == "user").count(),
            None => self.turns(TurnKind::Turn).count(),
        }
    }

    fn model(&self) -> String {
        self.summary.trunk.chars().take(HASH_LETTERS).collect()
    }

    fn head(&self) -> &str {
        match self.summary.head.as_str() {
            "" => "none yet",
            firebox_runtime::OWN_HEAD => "the model's own",
            name => name,
        }
    }

    fn json(&self) -> Value {
        let turn = |turn: &Turn| {
            json!({
                "id": turn.id.0,
                "kind": format!("{:?}", turn.kind).to_lowercase(),
                "tokens": turn.tokens,
                "roles": turn.roles.iter().map(|role| format!("{role:?}").to_lowercase()).collect::<Vec<_>>(),
                "pinned": turn.pinned,
                "hidden": turn.hidden.map(|hidden| format!("{hidden:?}").to_lowercase()),
            })
        };
        json!({
            "path": self.path,
            "bytes": self.summary.bytes,
            "tokens": self.summary.tokens.len(),
            "questions": self.questions(),
            "trunk": self.summary.trunk,
            "head": self.summary.head,
            "kept": format!("{:?}", self.summary.kv_type).to_lowercase(),
            "turns": self.summary.turns.iter().map(turn).collect::<Vec<_>>(),
            "messages": self.messages,
        })
    }
}
