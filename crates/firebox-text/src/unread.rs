//! What of a template's source the engine does not read as tags.

/// How much of `rest`, which begins with a brace, is a comment or a raw block; nothing if it is neither.
///
/// This must be minijinja's own opinion: what is skipped here and read there has no limits.
pub(crate) fn unread(rest: &str) -> Option<usize> {
    if let Some(comment) = rest.strip_prefix("{#") {
        // The end is looked for behind the beginning: `{#}` is no comment yet.
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

/// The length of a tag that is nothing but its name, its opening bracket and that one's sign excepted. minijinja takes one
/// sign on either side, and white space of ASCII alone.
fn basic_tag(tag: &str, name: &str) -> Option<usize> {
    let is_space = |character: char| character.is_ascii_whitespace();
    let rest = tag.trim_start_matches(is_space).strip_prefix(name)?.trim_start_matches(is_space);
    let rest = rest.strip_prefix(['-', '+']).unwrap_or(rest).strip_prefix("%}")?;
    Some(tag.len() - rest.len())
}

#[cfg(test)]
mod tests {
    use super::unread;

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
            assert_eq!(unread(source).map(|length| &source[..length]), expected, "{source}");
        }
    }
}
