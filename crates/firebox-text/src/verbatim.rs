//! Parts of a template's source that the engine does not parse as tags.

/// The length of a comment or raw block at the beginning of `rest`, which begins with a brace; `None` if there is neither.
///
/// This must agree with minijinja's lexer: code skipped here but executed there would have no limits.
pub(crate) fn verbatim_len(rest: &str) -> Option<usize> {
    if let Some(comment) = rest.strip_prefix("{#") {
        // The end is searched behind the opening: `{#}` is not a complete comment.
        return Some(comment.find("#}").map_or(rest.len(), |end| end + 4));
    }
    let tag = rest.strip_prefix("{%")?;
    let tag = tag.strip_prefix(['-', '+']).unwrap_or(tag);
    let mut raw = &tag[basic_tag(tag, "raw")?..];
    while let Some(start) = raw.find("{%") {
        raw = &raw[start + 2..];
        let tag = raw.strip_prefix(['-', '+']).unwrap_or(raw);
        if let Some(length) = basic_tag(tag, "endraw") {
            return Some(rest.len() - tag.len() + length);
        }
    }
    Some(rest.len())
}

/// The length of a tag that consists of a name only, without its opening bracket and that bracket's sign. minijinja accepts one
/// sign on either side, and only ASCII white space.
fn basic_tag(tag: &str, name: &str) -> Option<usize> {
    let is_space = |character: char| character.is_ascii_whitespace();
    let rest = tag.trim_start_matches(is_space).strip_prefix(name)?.trim_start_matches(is_space);
    let rest = rest.strip_prefix(['-', '+']).unwrap_or(rest).strip_prefix("%}")?;
    Some(tag.len() - rest.len())
}

#[cfg(test)]
mod tests {
    use super::verbatim_len;

    #[test]
    fn comments_and_raw_blocks_end_where_the_engine_ends_them() {
        let cases = [
            ("{# a #}b", Some("{# a #}")),
            ("{#}#}b", Some("{#}#}")),
            ("{#-#}b", Some("{#-#}")),
            ("{# a", Some("{# a")),
            ("{%- raw -%}{{ a }}{%+endraw+%}b", Some("{%- raw -%}{{ a }}{%+endraw+%}")),
            ("{%raw%}{%--endraw%}{% endraw %}b", Some("{%raw%}{%--endraw%}{% endraw %}")),
            ("{%raw%}{%\u{a0}endraw%}b", Some("{%raw%}{%\u{a0}endraw%}b")),
            ("{%raw%}{% {% endraw %}b", Some("{%raw%}{% {% endraw %}")),
            ("{%--raw%}{% endraw %}", None),
            ("{% rawness %}", None),
            ("{{ a }}", None),
            ("{", None),
        ];
        for (source, expected) in cases {
            assert_eq!(verbatim_len(source).map(|length| &source[..length]), expected, "{source}");
        }
    }
}
