//! What a message shows of what a file says: a file can hold megabytes where a word is expected.

use std::fmt;
use std::path::Path;

/// Characters of a value that are enough to find it by.
const LONGEST: usize = 60;

/// A value from a file: its `Debug` form is that of the string, or of its beginning and how long it is in all.
pub(crate) struct Excerpt<'a>(pub(crate) &'a str);

impl fmt::Debug for Excerpt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.char_indices().nth(LONGEST) {
            None => fmt::Debug::fmt(self.0, f),
            Some((end, _)) => write!(f, "{:?}… ({} bytes)", &self.0[..end], self.0.len()),
        }
    }
}

/// Dimensions that are enough: no model has a tensor of more.
const MOST_DIMENSIONS: usize = 8;

/// A shape from a file.
pub(crate) struct Shape<'a, T>(pub(crate) &'a [T]);

impl<T: fmt::Debug> fmt::Debug for Shape<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.split_at_checked(MOST_DIMENSIONS) {
            Some((first, [_, ..])) => write!(f, "{first:?}… ({} dimensions)", self.0.len()),
            _ => fmt::Debug::fmt(self.0, f),
        }
    }
}

/// A sentence with a value from a file somewhere in it. Its middle goes: it begins with what is wrong, and where it
/// comes from a parser it ends with the place.
pub(crate) fn shortened(text: String) -> String {
    let Some((head, _)) = text.char_indices().nth(LONGEST) else { return text };
    let Some((tail, _)) = text[head..].char_indices().rev().nth(LONGEST - 1) else { return text };
    // Within a few characters of the limit the mark would be as long as what it stands for.
    if tail <= LONGEST / 2 {
        return text;
    }
    format!("{}…{}", &text[..head], &text[head + tail..])
}

/// A path that a file gives.
pub(crate) fn shown(path: &Path) -> String {
    format!("{:?}", shortened(path.to_string_lossy().into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_long_is_cut() {
        assert_eq!(format!("{:?}", Excerpt("a\"b")), r#""a\"b""#);
        assert_eq!(format!("{:?}", Excerpt(&"é".repeat(60))), format!("{:?}", "é".repeat(60)));
        assert_eq!(format!("{:?}", Excerpt(&"é".repeat(61))), format!("\"{}\"… (122 bytes)", "é".repeat(60)));
        assert_eq!(format!("{:?}", Shape(&[1u8; 8])), format!("{:?}", [1; 8]));
        assert_eq!(format!("{:?}", Shape(&[1u8; 9])), format!("{:?}… (9 dimensions)", [1; 8]));
        for length in [0, 59, 60, 61, 120, 150] {
            let text = "e".repeat(length);
            assert_eq!(shortened(text.clone()), text);
        }
        let long = shortened(format!("{}{}{}", "a".repeat(60), "é".repeat(1000), "z".repeat(60)));
        assert_eq!(long, format!("{}…{}", "a".repeat(60), "z".repeat(60)));
    }
}
