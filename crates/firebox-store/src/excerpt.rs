//! Shortens values from files for messages: a damaged file can hold megabytes where a word is expected.

use std::fmt;
use std::path::Path;

/// The most characters of a value that a message shows.
const MAX_EXCERPT_CHARS: usize = 60;

/// A value from a file. Its `Debug` form is that of the string, or of its beginning followed by its full length.
pub(crate) struct Excerpt<'a>(pub(crate) &'a str);

impl fmt::Debug for Excerpt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.char_indices().nth(MAX_EXCERPT_CHARS) {
            None => fmt::Debug::fmt(self.0, f),
            Some((end, _)) => write!(f, "{:?}… ({} bytes)", &self.0[..end], self.0.len()),
        }
    }
}

/// The most dimensions that a message shows; tensors of models have fewer.
const MAX_SHOWN_DIMENSIONS: usize = 8;

/// A shape from a file.
pub(crate) struct Shape<'a, T>(pub(crate) &'a [T]);

impl<T: fmt::Debug> fmt::Debug for Shape<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.split_at_checked(MAX_SHOWN_DIMENSIONS) {
            Some((first, [_, ..])) => write!(f, "{first:?}… ({} dimensions)", self.0.len()),
            _ => fmt::Debug::fmt(self.0, f),
        }
    }
}

/// Shortens a sentence that contains a value from a file by cutting its middle: the beginning says what is wrong, and
/// parsers append the location at the end.
pub(crate) fn shorten(text: String) -> String {
    let Some((head, _)) = text.char_indices().nth(MAX_EXCERPT_CHARS) else { return text };
    let Some((tail, _)) = text[head..].char_indices().rev().nth(MAX_EXCERPT_CHARS - 1) else { return text };
    // Cutting a few characters would replace them with a mark of the same length.
    if tail <= MAX_EXCERPT_CHARS / 2 {
        return text;
    }
    format!("{}…{}", &text[..head], &text[head + tail..])
}

/// A quoted and shortened path from a file.
pub(crate) fn quoted_path(path: &Path) -> String {
    format!("{:?}", shorten(path.to_string_lossy().into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_long_values_are_cut() {
        assert_eq!(format!("{:?}", Excerpt("a\"b")), r#""a\"b""#);
        assert_eq!(format!("{:?}", Excerpt(&"é".repeat(60))), format!("{:?}", "é".repeat(60)));
        assert_eq!(format!("{:?}", Excerpt(&"é".repeat(61))), format!("\"{}\"… (122 bytes)", "é".repeat(60)));
        assert_eq!(format!("{:?}", Shape(&[1u8; 8])), format!("{:?}", [1; 8]));
        assert_eq!(format!("{:?}", Shape(&[1u8; 9])), format!("{:?}… (9 dimensions)", [1; 8]));
        for length in [0, 59, 60, 61, 120, 150] {
            let text = "e".repeat(length);
            assert_eq!(shorten(text.clone()), text);
        }
        let long = shorten(format!("{}{}{}", "a".repeat(60), "é".repeat(1000), "z".repeat(60)));
        assert_eq!(long, format!("{}…{}", "a".repeat(60), "z".repeat(60)));
    }
}
