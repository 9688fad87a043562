//! Many short strings in one allocation.

use crate::error::TextError;

/// Strings stored end to end.
#[derive(Debug, Clone, Default)]
pub(crate) struct StringColumn {
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

impl StringColumn {
    pub fn push(&mut self, value: &[u8]) -> Result<(), TextError> {
        self.bytes.extend_from_slice(value);
        let end = u32::try_from(self.bytes.len()).map_err(|_| TextError::InvalidVocabulary {
            field: "tokens",
            reason: "its texts take more than 4 GiB".to_owned(),
        })?;
        self.ends.push(end);
        Ok(())
    }

    pub fn get(&self, index: usize) -> Option<&[u8]> {
        let end = *self.ends.get(index)? as usize;
        let start = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        Some(&self.bytes[start..end])
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Releases unused capacity.
    pub fn shrink(&mut self) {
        self.bytes.shrink_to_fit();
        self.ends.shrink_to_fit();
    }
}
