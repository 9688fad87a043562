//! Reading files by position, past the page cache where that is possible.
//!
//! Nothing here touches a mapping. A mapped page that cannot be read ends the process with SIGBUS; a read that fails is
//! an error like any other.

use std::fmt;
use std::str::FromStr;

use crate::error::StoreError;

/// What offsets, lengths and addresses are multiples of when the page cache is passed by: no disk of today asks for
/// more.
pub(crate) const BLOCK: usize = 4096;

/// How a file is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReadMethod {
    /// From the disk into the buffer, the page cache passed by: as fast when memory is short as when it is not.
    Direct,
    /// Through the page cache: faster where the file fits into memory that nothing else needs.
    Buffered,
}

impl ReadMethod {
    /// Both, the one that holds its rate first.
    pub const ALL: [Self; 2] = [Self::Direct, Self::Buffered];
}

impl fmt::Display for ReadMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Direct => "direct",
            Self::Buffered => "buffered",
        })
    }
}

impl FromStr for ReadMethod {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|method| method.to_string() == text)
            .ok_or_else(|| format!("{text:?} is not a way to read; expected direct or buffered"))
    }
}

/// The files of a checkpoint, read by position. Tests put one in between that fails.
pub trait ReadAt: Send + Sync + fmt::Debug {
    /// Reads into the buffer from byte `start` of a file on, as far as the system likes. Returns how many bytes that
    /// were; none at the end of the file.
    fn read_at(&self, file: usize, buffer: &mut [u8], start: u64) -> Result<usize, StoreError>;
}
