//! Names of the files of a split model: `model-00001-of-00003.gguf`.

use std::path::{Path, PathBuf};

/// The digits of a part's number and of the number of parts.
const DIGITS: usize = 5;

/// The name of one part of a split model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SplitName {
    /// What the names of all parts begin with.
    prefix: String,
    /// The number of this part, from 1.
    pub(super) part: usize,
    /// The number of parts.
    pub(super) count: usize,
}

impl SplitName {
    /// Reads the name of a part, or returns `None` for other names.
    pub(super) fn parse(name: &str) -> Option<Self> {
        let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (prefix, part) = rest.rsplit_once('-')?;
        let number = |digits: &str| {
            let plain = digits.len() == DIGITS && digits.bytes().all(|byte| byte.is_ascii_digit());
            plain.then(|| digits.parse::<usize>().ok()).flatten()
        };
        let (part, count) = (number(part)?, number(count)?);
        (1..=count).contains(&part).then(|| Self { prefix: prefix.to_owned(), part, count })
    }

    /// Reads the name of a part from a path.
    pub(super) fn of(path: &Path) -> Option<Self> {
        Self::parse(path.file_name()?.to_str()?)
    }

    /// The name of a part, from 1.
    pub(super) fn name(&self, part: usize) -> String {
        format!("{}-{part:0DIGITS$}-of-{:0DIGITS$}.gguf", self.prefix, self.count)
    }

    /// The path of a part beside this one.
    pub(super) fn beside(&self, path: &Path, part: usize) -> PathBuf {
        path.with_file_name(self.name(part))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts_are_read_and_written() {
        let name = "a-b-00002-of-00003.gguf";
        let read = SplitName::parse(name).unwrap();
        assert_eq!((read.part, read.count, read.name(2).as_str()), (2, 3, name));
        for other in [
            "a.gguf",
            "a-00004-of-00003.gguf",
            "a-00000-of-00003.gguf",
            "a-1-of-3.gguf",
            "a-+0001-of-00003.gguf",
        ] {
            assert_eq!(SplitName::parse(other), None, "{other}");
        }
    }
}
