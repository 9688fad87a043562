//! What can go wrong, said so that the reader knows what to do next.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::excerpt::{Excerpt, shortened, shown};

/// Any failure of this crate. Each names the file, the field in it and the reason.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The operating system refused.
    #[error("{}: cannot {action}: {source}", path.display())]
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
             damaged or replaced: import the model again", file.display())]
    HashMismatch {
        /// The segment file.
        file: PathBuf,
        /// The segment.
        segment: String,
        /// The hash in the manifest.
        expected: String,
        /// The hash of the bytes.
        found: String,
    },
}

impl StoreError {
    pub(crate) fn io(path: &Path, action: impl Into<String>, source: io::Error) -> Self {
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
