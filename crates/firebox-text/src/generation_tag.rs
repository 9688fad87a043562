//! The `{% generation %}` tag of `transformers`.

use std::borrow::Cow;

const TAGS: [(&str, &str); 2] = [("generation", "with"), ("endgeneration", "endwith")];

/// Turns `{% generation %} … {% endgeneration %}` into a plain scope.
///
/// `transformers` marks the assistant's words with this tag, to train on them alone. For rendering it does nothing
/// beyond opening a scope, and that is what `with` does.
pub(crate) fn without_generation_tags(source: &str) -> Cow<'_, str> {
    if !source.contains("endgeneration") {
        return Cow::Borrowed(source);
    }
    let mut plain = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%").into_iter().chain(rest.find("{#")).min() {
        let (before, at) = rest.split_at(start);
        plain.push_str(before);
        let end = if at.starts_with("{#") { "#}" } else { "%}" };
        let length = at.find(end).map_or(at.len(), |position| position + end.len());
        let (tag, after) = at.split_at(length);
        plain.push_str(&renamed(tag));
        rest = after;
        if name(tag) == "raw" {
            let length = raw_length(rest);
            plain.push_str(&rest[..length]);
            rest = &rest[length..];
        }
    }
    plain.push_str(rest);
    Cow::Owned(plain)
}

/// What stands between a tag's brackets, without the marks that trim white space.
pub(crate) fn name(tag: &str) -> &str {
    let inside = tag.strip_prefix("{%").unwrap_or_default();
    let inside = inside.strip_suffix("%}").unwrap_or(inside);
    inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim()
}

fn renamed(tag: &str) -> Cow<'_, str> {
    match TAGS.iter().find(|(from, _)| name(tag) == *from) {
        Some((from, to)) => Cow::Owned(tag.replacen(from, to, 1)),
        None => Cow::Borrowed(tag),
    }
}

/// How much of `rest` belongs to the raw text before `{% endraw %}`.
pub(crate) fn raw_length(rest: &str) -> usize {
    let tags = rest.match_indices("{%").map(|(start, _)| start);
    let mut ends = tags.filter(|&start| {
        let length = rest[start..].find("%}").map_or(0, |position| position + 2);
        name(&rest[start..start + length]) == "endraw"
    });
    ends.next().unwrap_or(rest.len())
}

#[cfg(test)]
mod tests {
    use super::without_generation_tags;

    #[test]
    fn only_the_tags_change() {
        let source = "a{%- generation -%}b{% endgeneration %}{# {% generation %} #}{% raw %}{% generation %}{% endraw %}";
        let plain = "a{%- with -%}b{% endwith %}{# {% generation %} #}{% raw %}{% generation %}{% endraw %}";
        assert_eq!(without_generation_tags(source), plain);
        assert_eq!(without_generation_tags("{{ endgeneration }} {% x"), "{{ endgeneration }} {% x");
    }
}
