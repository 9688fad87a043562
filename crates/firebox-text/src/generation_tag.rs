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
        let raw = basic_tag(at, "raw").map(|length| length + raw_length(&at[length..]));
        let untouched = raw.or_else(|| at.starts_with("{#").then(|| comment(at)));
        let length = untouched.unwrap_or_else(|| at.find("%}").map_or(at.len(), |position| position + 2));
        let (tag, after) = at.split_at(length);
        plain.push_str(&if untouched.is_some() { Cow::Borrowed(tag) } else { renamed(tag) });
        rest = after;
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

/// The length of the comment that a text begins with. What ends it stands behind what begins it.
pub(crate) fn comment(text: &str) -> usize {
    text[2..].find("#}").map_or(text.len(), |end| end + 4)
}

/// The length of the tag that a text begins with, if it is nothing but this word, as minijinja reads the tags around raw text:
/// whatever reads them otherwise takes code for text.
pub(crate) fn basic_tag(text: &str, word: &str) -> Option<usize> {
    let sign = |text: &'_ str| usize::from(text.starts_with(['-', '+']));
    let trimmed = |text: &'_ str| text.len() - text.trim_ascii_start().len();
    let mut at = "{%".len();
    text.strip_prefix("{%")?;
    at += sign(&text[at..]);
    at += trimmed(&text[at..]);
    text[at..].strip_prefix(word)?;
    at += word.len();
    at += trimmed(&text[at..]);
    at += sign(&text[at..]);
    text[at..].starts_with("%}").then_some(at + "%}".len())
}

/// How much of `rest` belongs to the raw text before `{% endraw %}`.
pub(crate) fn raw_length(rest: &str) -> usize {
    let mut tags = rest.match_indices("{%").map(|(start, _)| start);
    tags.find(|&start| basic_tag(&rest[start..], "endraw").is_some()).unwrap_or(rest.len())
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
