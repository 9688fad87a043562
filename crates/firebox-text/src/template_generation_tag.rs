//! The `{% generation %}` tag of `transformers`.

use std::ops::Range;

const TAGS: [(&str, &str); 2] = [("generation", "with"), ("endgeneration", "endwith")];

/// The position of the name in a `{% generation %}` or `{% endgeneration %}` tag, and its replacement.
///
/// `transformers` marks the assistant's words with these tags for training. In rendering they only open a scope, which is what
/// `with` does.
pub(crate) fn renamed(tag: &str) -> Option<(Range<usize>, &'static str)> {
    let (from, to) = TAGS.into_iter().find(|(from, _)| name(tag) == *from)?;
    let at = tag.find(from)?;
    Some((at..at + from.len(), to))
}

/// The content of a tag without brackets and white space control.
pub(crate) fn name(tag: &str) -> &str {
    let inside = tag.strip_prefix("{%").unwrap_or_default();
    let inside = inside.strip_suffix("%}").unwrap_or(inside);
    inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim()
}
