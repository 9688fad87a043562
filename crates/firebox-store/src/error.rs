//! What can go wrong, said so that the reader knows what to do next.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::excerpt::{Excerpt, shortened, shown};
use crate::files::EIO;

/// Any failure of this crate. Each names the file, the field in it and the reason.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The operating system refused. The kind of its answer tells a full disk from a file that is gone or cut short.
    #[error("{}: cannot {action}: {source}{}", path.display(), remedy(source))]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What was tried, as a verb phrase: "open", "read 64 bytes at 4096".
        action: String,
        /// The system's answer.
        source: io::Error,
    },
    /// The path holds nothing this crate can open.
    #[error("{}: not a model: {reason}", path.display())]
    NotAModel {
        /// What was asked for.
        path: PathBuf,
        /// What was looked for, and what to give instead.
        reason: String,
    },
    /// A file breaks its own format: it is damaged, cut short or hostile.
    #[error("{}: {field}: {reason}", file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// The header field, tensor or metadata key.
        field: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A file is well formed but uses something Firebox does not implement.
    #[error("{}: {field}: not supported: {reason}", file.display())]
    Unsupported {
        /// The file.
        file: PathBuf,
        /// The header field, tensor or metadata key.
        field: String,
        /// What is not supported, and what to use instead where there is something.
        reason: String,
    },
    /// A file refers to another outside of the model's own directory.
    #[error("{}: {field}: refuses to follow {}: {reason}", file.display(), shown(target))]
    UnsafePath {
        /// The file that refers, or the link itself.
        file: PathBuf,
        /// The field that refers.
        field: String,
        /// Where it leads.
        target: PathBuf,
        /// Why that is refused.
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
        /// The tensor.
        tensor: String,
        /// What disagrees.
        reason: String,
    },
    /// A tensor cannot be quantized without ruining it.
    #[error("tensor {:?}: cannot quantize: {reason}", Excerpt(tensor))]
    Quantize {
        /// The tensor.
        tensor: String,
        /// What stands in the way.
        reason: String,
    },
    /// An import would overwrite something.
    #[error("{}: already exists and is not empty; choose another destination or remove it", path.display())]
    DestinationExists {
        /// The destination.
        path: PathBuf,
    },
    /// A file was written to or shortened while it was in use.
    #[error("{}: changed while the model was running; leave a model's files alone, and put new ones in \
             their place by renaming", file.display())]
    Changed {
        /// The file.
        file: PathBuf,
    },
    /// The system has no memory left for a buffer.
    #[error("no memory for a buffer of {bytes} bytes: {source}")]
    Memory {
        /// How many bytes were asked for.
        bytes: u64,
        /// The system's answer.
        source: io::Error,
    },
    /// A source of bytes panicked while it was read.
    #[error("reading panicked; what was to be read is not there, and can be asked for again")]
    ReaderPanicked,
    /// A source of bytes says that it has read more than it was asked for.
    #[error("{}: {count} bytes were read where {most} were asked for; mend the source of the bytes", path.display())]
    Overread {
        /// The model.
        path: PathBuf,
        /// How many it says.
        count: usize,
        /// How many there is room for.
        most: usize,
    },
    /// The system does not start another thread.
    #[error("cannot start a thread to read with: {source}")]
    Thread {
        /// The system's answer.
        source: io::Error,
    },
    /// A segment's bytes are not those its manifest was written for.
    #[error("{}: segment {segment}: content hash is {found}, the manifest says {expected}; the file was \
             damaged or replaced: {remedy}", file.display())]
    HashMismatch {
        /// The segment file.
        file: PathBuf,
        /// The segment.
        segment: String,
        /// The hash in the manifest.
        expected: String,
        /// The hash of the bytes.
        found: String,
        /// How to get whole files again.
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
    #[error("{}: no head {name:?}; {}", model.display(), having(installed))]
    UnknownHead {
        /// The model.
        model: PathBuf,
        /// The name asked for.
        name: String,
        /// The heads that it has.
        installed: Vec<String>,
    },
    /// There is nothing to roll a head back to.
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
        /// The trunk that the head names.
        expected: String,
        /// The model's.
        found: String,
    },
    /// A head begins at another layer than the heads that a model has.
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
    /// A model cannot be divided there.
    #[error("{}: a trunk that ends before layer {split}, where the model has {layers} layers; choose 0 to {layers}",
            model.display())]
    NoSuchSplit {
        /// The model.
        model: PathBuf,
        /// The first layer that was to belong to heads.
        split: usize,
        /// How many layers there are.
        layers: usize,
    },
    /// A tensor has no place in a head.
    #[error("tensor {:?}: cannot be part of the head: {reason}", Excerpt(tensor))]
    NotInHead {
        /// The tensor.
        tensor: String,
        /// Why that is so.
        reason: String,
    },
    /// The model is a single file, which has no room for heads.
    #[error("{}: a GGUF file has no place for heads; import it first, and give the bundle", model.display())]
    HeadsNeedImport {
        /// The model.
        model: PathBuf,
    },
}

/// What helps against what the system says, as the end of a sentence.
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

/// The heads that there are, as part of a sentence.
fn having(installed: &[String]) -> String {
    match installed {
        [] => "the model has none".into(),
        names => format!("there are: {}", names.join(", ")),
    }
}

impl StoreError {
    /// What the system refused, said with the file and with what was tried, as a verb phrase.
    pub fn io(path: &Path, action: impl Into<String>, source: io::Error) -> Self {
        Self::Io { path: path.to_owned(), action: action.into(), source }
    }
}

/// A fault found in bytes whose file is not known: what the parsers return, so that they can be run
/// (and fuzzed) on plain slices.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{field}: {reason}")]
pub struct Fault {
    /// The header field, tensor or metadata key.
    pub field: String,
    /// What is wrong with it.
    pub reason: String,
    /// True where the bytes are well formed but ask for something not implemented.
    pub unsupported: bool,
}

impl Fault {
    pub(crate) fn new(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { field: field_of(field.into()), reason: printable(reason.into()), unsupported: false }
    }

    /// A parser's complaint, which repeats what it did not expect.
    pub(crate) fn json(field: impl Into<String>, error: &serde_json::Error) -> Self {
        Self::new(field, shortened(error.to_string()))
    }

    pub(crate) fn unsupported(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { field: field_of(field.into()), reason: printable(reason.into()), unsupported: true }
    }

    /// Names the file the bytes came from.
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

/// A field is named by what the file calls a tensor or a key.
fn field_of(text: String) -> String {
    printable(shortened(text))
}

/// Keeps what a file says from steering the terminal that the error is shown on.
fn printable(text: String) -> String {
    if text.chars().any(char::is_control) { text.escape_debug().to_string() } else { text }
}
