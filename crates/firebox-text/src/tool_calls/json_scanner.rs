//! Finds the end of a JSON value in streamed text.

/// Finds the end of a streamed JSON value by tracking brackets and strings. Everything between them is left to the parser.
#[derive(Debug, Clone, Default)]
pub(super) struct JsonScanner {
    /// The number of bytes already scanned.
    seen: usize,
    /// Open brackets.
    open: Vec<u8>,
    in_string: bool,
    escaped: bool,
}

/// The deepest nesting of brackets.
const MAX_DEPTH: usize = 100;

/// The state of the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Extent {
    /// Incomplete.
    More,
    /// The value ends before this byte.
    Ends(usize),
    /// The byte at this position cannot be part of the value.
    Broken(usize),
}

impl JsonScanner {
    /// Begins inside of so many objects.
    pub fn within(objects: usize) -> Self {
        Self { open: vec![b'{'; objects], ..Self::default() }
    }

    /// Forgets the scanned text, which the caller removed: the next text begins behind it.
    pub fn discard_scanned(&mut self) {
        self.seen = 0;
    }

    /// Scans a text that begins with the value, or with the part that was scanned before.
    pub fn scan(&mut self, text: &str) -> Extent {
        for (at, &byte) in text.as_bytes().iter().enumerate().skip(self.seen) {
            self.seen = at + 1;
            if self.in_string {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => self.in_string = false,
                    _ => {}
                }
                continue;
            }
            let opens = match byte {
                b'"' => {
                    self.in_string = true;
                    continue;
                }
                b'{' | b'[' => {
                    if self.open.len() == MAX_DEPTH {
                        return self.broken(at);
                    }
                    self.open.push(byte);
                    continue;
                }
                b'}' => b'{',
                b']' => b'[',
                b',' | b':' | b'+' | b'-' | b'.' | b' ' | b'\n' | b'\r' | b'\t' => continue,
                byte if byte.is_ascii_alphanumeric() => continue,
                _ => return self.broken(at),
            };
            if self.open.pop() != Some(opens) {
                return self.broken(at);
            }
            if self.open.is_empty() {
                return Extent::Ends(at + 1);
            }
        }
        Extent::More
    }

    fn broken(&mut self, at: usize) -> Extent {
        self.seen = at;
        Extent::Broken(at)
    }
}
