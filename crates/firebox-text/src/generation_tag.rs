//! The `{% generation %}` tag of `transformers`.

use std::ops::Range;

const TAGS: [(&str, &str); 2] = [("generation", "with"), ("endgeneration", "endwith")];

/// Where the name stands in a tag `{% generation %}` or `{% endgeneration %}`, and what to write instead.
///
/// `transformers` marks the assistant's words with these tags, to train on them alone. For rendering they do nothing beyond
/// opening a scope, and that is what `with` does.
pub(crate) fn renamed(tag: &str) -> Option<(Range<usize>, &'static str)> {
    let (from, to) = TAGS.into_iter().find(|(from, _)| name(tag) == *from)?;
    let at = tag.find(from)?;
    Some((at..at + from.len(), to))
}

/// What stands between a tag's brackets, without the marks that trim white space.
pub(crate) fn name(tag: &str) -> &str {
    let inside = tag.strip_prefix("{%").unwrap_or_default();
    let inside = inside.strip_suffix("%}").unwrap_or(inside);
    inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim()
}
