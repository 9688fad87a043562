//! The result of an export.

use std::path::PathBuf;

/// The result of writing a model in the format of other engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportReport {
    /// What was written: a folder or a file.
    pub path: PathBuf,
    /// The number of tensors.
    pub tensors: usize,
    /// The number of quantized tensors that were unpacked to floats.
    pub unpacked: usize,
    /// Bytes of tensors read.
    pub bytes_read: u64,
    /// Bytes of tensors written.
    pub bytes_written: u64,
    /// What is not as the model had it.
    pub notes: Vec<String>,
}
