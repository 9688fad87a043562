/// Finds the end of a JSON value that comes in pieces. It knows brackets and strings; what is between them the parser
/// looks at.
#[derive(Debug, Clone, Default)]
pub(super) struct JsonEnd {
    /// Bytes that were looked at.
    seen: usize,
    /// Brackets that wait for theirs.
    open: Vec<u8>,
    in_string: bool,
    escaped: bool,
}

/// Brackets within brackets, beyond which nobody means well.
const DEEPEST: usize = 100;

/// What is known of the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Extent {
    /// More has to come.
    More,
    /// It ends before this byte.
    Ends(usize),
    /// This byte belongs to no value.
    Broken(usize),
}

impl JsonEnd {
    /// Looks for the end of so many objects that have begun before.
    pub fn within(objects: usize) -> Self {
        Self { open: vec![b'{'; objects], ..Self::default() }
    }

    /// What was looked at is gone: the next text begins behind it.
    pub fn passed(&mut self) {
        self.seen = 0;
    }

    /// Looks at a text that begins with `{` or `[`, or where this left off, and with what was looked at before.
    pub fn look(&mut self, text: &str) -> Extent {
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
                    if self.open.len() == DEEPEST {
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
