//! Files of examples: JSONL that is read line by line.

use std::fmt;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use firebox_store::files::File;

use crate::error::TrainError;
use crate::format::{Format, Sample};

/// Reasons that are kept to be shown; the others are counted.
const REASONS: usize = 20;
/// Bytes that are kept of the hash of a sample.
const HASH: usize = 8;

/// The limits on what is read from a file and on how much of it is held in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExamplesConfig {
    /// Samples of more tokens are left out.
    pub most_tokens: usize,
    /// Lines of more bytes are left out without being read whole.
    pub most_line_bytes: usize,
    /// Samples beyond this are not held but made from the file again whenever they are asked for.
    pub memory_bytes: usize,
}

impl ExamplesConfig {
    /// Samples of so many tokens at most, from lines of 4 MiB at most, 256 MiB of them in memory.
    pub fn new(most_tokens: usize) -> Self {
        Self { most_tokens, most_line_bytes: 4 << 20, memory_bytes: 256 << 20 }
    }
}

/// The samples of a file, by number.
///
/// The memory that it takes is bounded, apart from 24 bytes for each sample.
pub struct Examples {
    path: PathBuf,
    file: BufReader<File>,
    format: Format,
    entries: Vec<Entry>,
    /// The first samples, as many as there is memory for.
    held: Vec<Sample>,
    summary: Summary,
    fingerprint: blake3::Hash,
    most_line_bytes: usize,
}

/// A sample, and where it is in the file.
#[derive(Debug, Clone, Copy)]
struct Entry {
    offset: u64,
    /// Which of the samples of its line.
    part: u32,
    tokens: u32,
    hash: [u8; HASH],
}

/// Counts of a file's lines and samples.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Summary {
    /// Lines with something on them.
    pub lines: u64,
    /// Samples they make.
    pub samples: u64,
    /// Tokens of the samples.
    pub tokens: u64,
    /// Tokens that are learned.
    pub targets: u64,
    /// Lines of which nothing is used.
    pub bad: u64,
    /// Samples that are too long, and lines.
    pub too_long: u64,
    /// The first of them, with reasons.
    pub skipped: Vec<Skipped>,
}

/// Something that was left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skipped {
    /// The number of its line, from one.
    pub line: u64,
    /// Why.
    pub reason: String,
}

impl Examples {
    /// Reads a file through. Lines that cannot be used are left out; the [summary](Self::summary) says which and why.
    pub fn open(
        path: impl Into<PathBuf>,
        format: Format,
        config: ExamplesConfig,
    ) -> Result<Self, TrainError> {
        let path = path.into();
        let file = File::open(&path).map_err(|error| TrainError::io(&path, "open", error))?;
        let mut examples = Self {
            file: BufReader::new(file),
            format,
            entries: Vec::new(),
            held: Vec::new(),
            summary: Summary::default(),
            fingerprint: blake3::hash(&[]),
            most_line_bytes: config.most_line_bytes,
            path,
        };
        examples.scan(&config)?;
        if examples.entries.is_empty() {
            let what = examples.path.display().to_string();
            return Err(TrainError::NoData { what, reason: examples.summary.to_string() });
        }
        Ok(examples)
    }

    fn scan(&mut self, config: &ExamplesConfig) -> Result<(), TrainError> {
        let mut hasher = blake3::Hasher::new();
        let (mut offset, mut number, mut held_bytes) = (0, 0, 0);
        let mut line = Vec::new();
        loop {
            let (length, whole) = next_line(&mut self.file, &mut line, config.most_line_bytes)
                .map_err(|error| TrainError::io(&self.path, "read", error))?;
            if length == 0 {
                break;
            }
            let begin = offset;
            offset += length;
            number += 1;
            if whole && line.trim_ascii().is_empty() {
                continue;
            }
            self.summary.lines += 1;
            if !whole {
                self.summary.too_long += 1;
                self.summary.skip(number, format!("{length} bytes, more than {}", config.most_line_bytes));
                continue;
            }
            let samples = match samples(&self.format, &line) {
                Ok(samples) => samples,
                Err(reason) => {
                    self.summary.bad += 1;
                    self.summary.skip(number, reason);
                    continue;
                }
            };
            for (part, sample) in (0..).zip(samples) {
                let tokens = sample.tokens.len();
                if tokens > config.most_tokens {
                    self.summary.too_long += 1;
                    self.summary.skip(number, format!("{tokens} tokens, more than {}", config.most_tokens));
                    continue;
                }
                if sample.targets() == 0 {
                    continue;
                }
                update(&mut hasher, &sample);
                let hash = digest(&sample);
                self.summary.samples += 1;
                self.summary.tokens += tokens as u64;
                self.summary.targets += sample.targets() as u64;
                let bytes = size_of::<Sample>() + tokens * (size_of::<u32>() + size_of::<bool>());
                if self.held.len() == self.entries.len() && held_bytes + bytes <= config.memory_bytes {
                    held_bytes += bytes;
                    self.held.push(sample);
                }
                self.entries.push(Entry { offset: begin, part, tokens: tokens as u32, hash });
            }
        }
        self.fingerprint = hasher.finalize();
        Ok(())
    }

    /// Returns the number of samples.
    #[expect(clippy::len_without_is_empty, reason = "an empty file is an error")]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the number of tokens of each sample.
    pub fn lengths(&self) -> Vec<usize> {
        self.entries.iter().map(|entry| entry.tokens as usize).collect()
    }

    /// A sample.
    ///
    /// # Panics
    ///
    /// If there is no sample of that number.
    pub fn sample(&mut self, index: usize) -> Result<Sample, TrainError> {
        if let Some(sample) = self.held.get(index) {
            return Ok(sample.clone());
        }
        let Entry { offset, part, hash, .. } = self.entries[index];
        let mut line = Vec::new();
        let read = self
            .file
            .seek(SeekFrom::Start(offset))
            .and_then(|_| next_line(&mut self.file, &mut line, self.most_line_bytes));
        read.map_err(|error| TrainError::io(&self.path, "read", error))?;
        let mut samples = samples(&self.format, &line).unwrap_or_default();
        if part as usize >= samples.len() {
            return Err(TrainError::Changed { file: self.path.clone() });
        }
        let sample = samples.swap_remove(part as usize);
        if digest(&sample) != hash {
            return Err(TrainError::Changed { file: self.path.clone() });
        }
        Ok(sample)
    }

    /// Returns the counts of the file's lines and samples.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// The hash of all tokens of all samples and of which of them are learned, as hexadecimal digits: of the data, and of
    /// the tokenizer and the template as far as they matter to it.
    pub fn fingerprint(&self) -> String {
        self.fingerprint.to_hex().to_string()
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn samples(format: &Format, line: &[u8]) -> Result<Vec<Sample>, String> {
    let text = std::str::from_utf8(line).map_err(|error| format!("it is not UTF-8: {error}"))?;
    format.samples(text.trim_start_matches('\u{feff}'))
}

/// Adds all that a sample is to a hash.
fn update(hasher: &mut blake3::Hasher, sample: &Sample) {
    hasher.update(&(sample.tokens.len() as u64).to_le_bytes());
    hasher.update(bytemuck::cast_slice(&sample.tokens));
    hasher.update(bytemuck::cast_slice(&sample.learn));
}

fn digest(sample: &Sample) -> [u8; HASH] {
    let mut hasher = blake3::Hasher::new();
    update(&mut hasher, sample);
    hasher.finalize().as_bytes().first_chunk().copied().unwrap_or_default()
}

/// Reads a line into the buffer. Of one that is too long nothing is kept. Says how many bytes it has, and whether the
/// buffer has them.
fn next_line(file: &mut impl BufRead, line: &mut Vec<u8>, most: usize) -> std::io::Result<(u64, bool)> {
    line.clear();
    let most = most as u64;
    let mut length = file.by_ref().take(most.saturating_add(1)).read_until(b'\n', line)? as u64;
    if length <= most || line.last() == Some(&b'\n') {
        return Ok((length, true));
    }
    line.clear();
    loop {
        let available = file.fill_buf()?;
        let end = available.iter().position(|&byte| byte == b'\n');
        let taken = end.map_or(available.len(), |end| end + 1);
        file.consume(taken);
        length += taken as u64;
        if end.is_some() || taken == 0 {
            return Ok((length, false));
        }
    }
}

impl Summary {
    fn skip(&mut self, line: u64, reason: String) {
        if self.skipped.len() < REASONS {
            self.skipped.push(Skipped { line, reason });
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { lines, samples, tokens, targets, bad, too_long, skipped } = self;
        write!(f, "{samples} samples of {lines} lines, {tokens} tokens, {targets} of them learned")?;
        if bad + too_long > 0 {
            write!(f, "; left out: {bad} bad lines, {too_long} too long")?;
        }
        for Skipped { line, reason } in skipped {
            write!(f, "\n  line {line}: {reason}")?;
        }
        match (bad + too_long).saturating_sub(skipped.len() as u64) {
            0 => Ok(()),
            more => write!(f, "\n  and {more} more"),
        }
    }
}

impl fmt::Debug for Examples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Examples").field("path", &self.path).field("summary", &self.summary).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use super::*;
    use crate::format::tests::tokenizer;

    fn format() -> Format {
        Format { tokenizer: tokenizer(), template: None, thinking: None }
    }

    fn line(completion: &str) -> String {
        format!("{{\"prompt\": \"ask\", \"completion\": \"{completion}\"}}\n")
    }

    #[test]
    fn bad_and_long_lines_are_left_out_and_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.jsonl");
        let mut text = Vec::from("\u{feff}".as_bytes());
        text.extend(line("one").bytes());
        text.extend(b"\n  \r\n{\"prompt\": 3}\n\xff\n");
        text.extend(line(&"x".repeat(2000)).bytes());
        text.extend(line(&"y".repeat(60)).bytes());
        text.extend(line("two").trim_end().bytes());
        std::fs::write(&path, &text).unwrap();
        let config = ExamplesConfig { most_tokens: 40, most_line_bytes: 500, memory_bytes: 1 << 20 };
        let mut examples = Examples::open(&path, format(), config).unwrap();
        let summary = examples.summary().clone();
        assert_eq!((summary.lines, summary.samples, summary.bad, summary.too_long), (6, 2, 2, 2));
        let lines: Vec<u64> = summary.skipped.iter().map(|skipped| skipped.line).collect();
        assert_eq!(lines, [4, 5, 6, 7]);
        let shown = summary.to_string();
        assert!(shown.contains("line 5: it is not UTF-8") && shown.contains("more than 500"), "{shown}");
        assert!(shown.contains("more than 40"), "{shown}");
        assert_eq!(examples.len(), 2);
        assert_eq!(examples.sample(1).unwrap().targets(), 4);

        std::fs::write(&path, "{}\n").unwrap();
        assert!(matches!(Examples::open(&path, format(), config), Err(TrainError::NoData { .. })));
    }

    /// Equal tokens with different learned positions have different fingerprints.
    #[test]
    fn the_fingerprint_tells_what_is_learned() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.jsonl");
        let fingerprint = |text: &str| {
            std::fs::write(&path, text).unwrap();
            let mut examples = Examples::open(&path, format(), ExamplesConfig::new(40)).unwrap();
            (examples.sample(0).unwrap().tokens, examples.fingerprint())
        };
        let (tokens, one) = fingerprint("{\"prompt\": \"ab\", \"completion\": \"cd\"}\n");
        let (same, other) = fingerprint("{\"prompt\": \"abc\", \"completion\": \"d\"}\n");
        assert_eq!(tokens, same);
        assert_ne!(one, other);
    }

    #[test]
    fn what_is_not_held_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.jsonl");
        let text = (0..50).fold(String::new(), |mut text, number| {
            write!(text, "{}", line(&"z".repeat(1 + number % 7))).unwrap();
            text
        });
        std::fs::write(&path, &text).unwrap();
        let config = ExamplesConfig::new(100);
        let mut all = Examples::open(&path, format(), config).unwrap();
        let few = ExamplesConfig { memory_bytes: 500, ..config };
        let mut few = Examples::open(&path, format(), few).unwrap();
        assert!(few.held.len() < 10 && !few.held.is_empty(), "{}", few.held.len());
        for index in (0..50).rev() {
            assert_eq!(all.sample(index).unwrap(), few.sample(index).unwrap());
        }
        assert_eq!(all.fingerprint(), few.fingerprint());
        assert_eq!(all.lengths().len(), 50);
        // The last are as long as they were.
        for changed in [text.replace("zz", "q"), text.replace('z', "q")] {
            std::fs::write(&path, changed).unwrap();
            assert!(matches!(few.sample(48), Err(TrainError::Changed { .. })));
        }
    }
}
