//! Errors, each with the file, the field in it and what to do next.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::excerpt::{Excerpt, quoted_path, shorten};
use crate::files::EIO;

/// Any failure of this crate.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The operating system refused. The error's kind tells a full disk from a file that is gone or truncated.
    #[error("{}: cannot {action}: {source}{}", path.display(), remedy(source))]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The attempted action as a verb phrase: "open", "read 64 bytes at 4096".
        action: String,
        /// The system's error.
        source: io::Error,
    },
    /// The path holds nothing this crate can open.
    #[error("{}: not a model: {reason}", path.display())]
    NotAModel {
        /// The requested path.
        path: PathBuf,
        /// What was looked for, and what to give instead.
        reason: String,
    },
    /// A file violates its format: it is damaged, truncated or hostile.
    #[error("{}: {field}: {reason}", file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// The header field, tensor or metadata key.
        field: String,
        /// The violation.
        reason: String,
    },
    /// A file is well formed but uses something that Firebox does not implement.
    #[error("{}: {field}: not supported: {reason}", file.display())]
    Unsupported {
        /// The file.
        file: PathBuf,
        /// The header field, tensor or metadata key.
        field: String,
        /// What is not supported, and an alternative if there is one.
        reason: String,
    },
    /// A file refers to another one outside of the model's directory.
    #[error("{}: {field}: refuses to follow {}: {reason}", file.display(), quoted_path(target))]
    UnsafePath {
        /// The file with the reference, or the link itself.
        file: PathBuf,
        /// The field with the reference.
        field: String,
        /// The target.
        target: PathBuf,
        /// The reason why it is refused.
        reason: String,
    },
    /// The model has no tensor of this name.
    #[error("{}: no tensor named {:?}", model.display(), Excerpt(tensor))]
    MissingTensor {
        /// The model.
        model: PathBuf,
        /// The name asked for.
        tensor: String,
    },
    /// A tensor's bytes cannot be decoded, because shape, encoding and size disagree.
    #[error("tensor {:?}: cannot decode: {reason}", Excerpt(tensor))]
    Decode {
        /// The disagreement.
        tensor: String,
        /// What disagrees.
        reason: String,
    },
    /// A tensor cannot be quantized without destroying it.
    #[error("tensor {:?}: cannot quantize: {reason}", Excerpt(tensor))]
    Quantize {
        /// The tensor.
        tensor: String,
        /// The obstacle.
        reason: String,
    },
    /// An import would overwrite something.
    #[error("{}: already exists and is not empty; choose another destination or remove it", path.display())]
    DestinationExists {
        /// The destination.
        path: PathBuf,
    },
    /// A file was changed or truncated while it was in use.
    #[error("{}: changed while the model was running; leave a model's files alone, and put new ones in \
             their place by renaming", file.display())]
    Changed {
        /// The file.
        file: PathBuf,
    },
    /// The system has no memory left for a buffer.
    #[error("no memory for a buffer of {bytes} bytes: {source}")]
    Memory {
        /// The requested size.
        bytes: u64,
        /// The system's error.
        source: io::Error,
    },
    /// A source of bytes panicked during a read.
    #[error("the source of a read panicked; nothing was read, and the read can be repeated")]
    ReaderPanicked,
    /// A source of bytes claims to have read more than was requested.
    #[error("{}: {count} bytes were read where {most} were requested; fix the source of the bytes", path.display())]
    Overread {
        /// The model.
        path: PathBuf,
        /// The number it claims.
        count: usize,
        /// The number requested.
        most: usize,
    },
    /// The system refused to start another thread.
    #[error("cannot start a thread to read with: {source}")]
    Thread {
        /// The system's error.
        source: io::Error,
    },
    /// A segment's content does not match the hash in its manifest.
    #[error("{}: segment {segment}: content hash is {found}, the manifest says {expected}; the file was \
             damaged or replaced: {remedy}", file.display())]
    HashMismatch {
        /// The segment file.
        file: PathBuf,
        /// The segment.
        segment: String,
        /// The hash in the manifest.
        expected: String,
        /// The hash of the content.
        found: String,
        /// How to get undamaged files.
        remedy: &'static str,
    },
    /// A head cannot have this name.
    #[error(
        "{:?} cannot name a head; use 1 to 64 of a-z, 0-9, dots, dashes and underscores, beginning with a \
             letter, a digit or an underscore, and not heads.json",
        Excerpt(name)
    )]
    HeadName {
        /// The name asked for.
        name: String,
    },
    /// The model has no head of this name.
    #[error("{}: no head {name:?}; {}", model.display(), list_of_heads(installed))]
    UnknownHead {
        /// The model.
        model: PathBuf,
        /// The name asked for.
        name: String,
        /// The installed heads.
        installed: Vec<String>,
    },
    /// The head has no earlier generation to roll back to.
    #[error("{}: head {name:?} has generation {generation} only, and none before it to go back to", model.display())]
    NoEarlierHead {
        /// The model.
        model: PathBuf,
        /// The head.
        name: String,
        /// Its only generation.
        generation: u64,
    },
    /// A head was made for another trunk than the model's.
    #[error("{}: made for a trunk whose hash up to layer {split} is {expected}, but that of {} is {found}; train \
             the head for this model, or install it in the one it was made for", head.display(), model.display())]
    WrongTrunk {
        /// The head's directory.
        head: PathBuf,
        /// The model.
        model: PathBuf,
        /// The first layer that belongs to the head.
        split: usize,
        /// The trunk hash in the head's manifest.
        expected: String,
        /// The trunk hash of the model.
        found: String,
    },
    /// A head begins at another layer than the installed heads.
    #[error("{}: the head begins at layer {split}, but those that are installed begin at layer {installed}: {}; all \
             heads of a model share one trunk, so remove these first or train the head for layer {installed}",
            model.display(), others.join(", "))]
    WrongSplit {
        /// The model.
        model: PathBuf,
        /// The first layer that belongs to the head.
        split: usize,
        /// The first layer that belongs to the installed heads.
        installed: usize,
        /// The installed heads.
        others: Vec<String>,
    },
    /// The model has too few layers for a split there.
    #[error("{}: a trunk that ends before layer {split}, where the model has {layers} layers; choose 0 to {layers}",
            model.display())]
    NoSuchSplit {
        /// The model.
        model: PathBuf,
        /// The requested first layer of heads.
        split: usize,
        /// The number of layers.
        layers: usize,
    },
    /// A tensor cannot be part of a head.
    #[error("tensor {:?}: cannot be part of the head: {reason}", Excerpt(tensor))]
    NotInHead {
        /// The tensor.
        tensor: String,
        /// The reason.
        reason: String,
    },
    /// The model is a single file, beside which heads cannot be installed.
    #[error("{}: a GGUF file has no place for heads; import it first, and give the bundle", model.display())]
    HeadsNeedImport {
        /// The model.
        model: PathBuf,
    },
}

/// A remedy for an error of the system, as the end of a sentence.
fn remedy(source: &io::Error) -> &'static str {
    match source.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "; make room there, and try again",
        ErrorKind::UnexpectedEof => "; the file is shorter than it was: put a whole one in its place",
        ErrorKind::NotFound => "; look whether the name is right, and where the file went",
        _ if cfg!(unix) && source.raw_os_error() == Some(EIO) => {
            "; the disk fails: try again, and have a copy elsewhere if it goes on"
        }
        _ => "",
    }
}

/// The installed heads, as part of a sentence.
fn list_of_heads(installed: &[String]) -> String {
    match installed {
        [] => "the model has none".into(),
        names => format!("there are: {}", names.join(", ")),
    }
}

impl StoreError {
    /// Wraps an error of the system with the file and the attempted action, a verb phrase.
    pub fn io(path: &Path, action: impl Into<String>, source: io::Error) -> Self {
        Self::Io { path: path.to_owned(), action: action.into(), source }
    }
}

/// A fault in bytes of an unknown file. Parsers return it, so that they can run (and be fuzzed) on plain slices.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{field}: {reason}")]
pub struct Fault {
    /// The header field, tensor or metadata key.
    pub field: String,
    /// The violation.
    pub reason: String,
    /// True if the bytes are well formed but ask for something not implemented.
    pub unsupported: bool,
}

impl Fault {
    pub(crate) fn new(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { field: field_name(field.into()), reason: escape_controls(reason.into()), unsupported: false }
    }

    /// Wraps a JSON parser's error, shortened because it repeats the input.
    pub(crate) fn json(field: impl Into<String>, error: &serde_json::Error) -> Self {
        Self::new(field, shorten(error.to_string()))
    }

    pub(crate) fn unsupported(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { field: field_name(field.into()), reason: escape_controls(reason.into()), unsupported: true }
    }

    /// Adds the file that the bytes came from.
    pub fn in_file(self, file: &Path) -> StoreError {
        let Self { field, reason, unsupported } = self;
        let file = file.to_owned();
        if unsupported {
            StoreError::Unsupported { file, field, reason }
        } else {
            StoreError::Malformed { file, field, reason }
        }
    }
}

/// Fields are named by text from the file, so that text is shortened and escaped.
fn field_name(text: String) -> String {
    escape_controls(shorten(text))
}

/// Escapes control characters, so that text from a file cannot control the terminal.
fn escape_controls(text: String) -> String {
    if text.chars().any(char::is_control) { text.escape_debug().to_string() } else { text }
}
