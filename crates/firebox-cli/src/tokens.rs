//! Tokens as people and programs write them: texts and lists of ids.

use std::io::Read as _;
use std::path::Path;

use anyhow::Context as _;
use firebox_eval::expected_input_ids;
use firebox_runtime::Model;

use crate::outcome::usage;

/// Reads the tokens of a text file, of stdin for `-`, or the `input_ids` of a safetensors file. `ids` says that the text is a list of
/// ids.
pub fn read_tokens(path: &Path, ids: bool, model: &Model) -> anyhow::Result<Vec<u32>> {
    if path.extension().is_some_and(|extension| extension == "safetensors") {
        return Ok(expected_input_ids(path)?);
    }
    let text = if path.as_os_str() == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).map(|_| text)
    } else {
        std::fs::read_to_string(path)
    };
    let text = text.with_context(|| format!("cannot read {}", path.display()))?;
    if ids {
        return parse_ids(&text).with_context(|| path.display().to_string());
    }
    Ok(model.tokenizer()?.encode(&text, true)?)
}

/// Ids as a JSON list, or separated by commas or spaces.
pub fn parse_ids(text: &str) -> anyhow::Result<Vec<u32>> {
    let text = text.trim();
    let inner = match (text.strip_prefix('['), text.ends_with(']')) {
        (Some(rest), true) => &rest[..rest.len() - 1],
        (None, false) => text,
        _ => return Err(usage("token ids: one bracket is missing; write [1, 2, 3] or 1,2,3")),
    };
    let words = inner.split(|c: char| c == ',' || c.is_whitespace()).filter(|word| !word.is_empty());
    words
        .map(|word| {
            word.parse().map_err(|_| {
                usage(format!(
                    "{word:?} is no token id; write ids as 1,2,3, as [1, 2, 3] or one after the other"
                ))
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_come_in_three_spellings() {
        for text in ["1,2,30", "[1, 2, 30]", " 1 2\n30\n", "[1 2 30]"] {
            assert_eq!(parse_ids(text).unwrap(), [1, 2, 30], "{text}");
        }
        assert!(parse_ids("").unwrap().is_empty());
        for bad in ["1,-2", "[1,2", "1,2]", "one", "1.5", "4294967296", "]["] {
            assert!(parse_ids(bad).is_err(), "{bad}");
        }
    }
}
