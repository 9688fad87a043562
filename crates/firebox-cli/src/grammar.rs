//! The command-line options that constrain an answer by a grammar.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use firebox_runtime::Grammar;

use crate::outcome::usage;

/// Options that hold an answer to a form.
#[derive(Debug, Clone, Args)]
#[group(id = "form", multiple = false)]
pub struct GrammarArgs {
    /// Answer with JSON that fits a schema: a file, or the schema itself
    #[arg(long, value_name = "FILE|SCHEMA")]
    json_schema: Option<String>,
    /// Answer with a JSON object
    #[arg(long)]
    json_object: bool,
    /// Answer with a text that matches a regular expression from beginning to end
    #[arg(long, value_name = "EXPRESSION", allow_hyphen_values = true)]
    regex: Option<String>,
    /// Answer by a grammar: a file in the notation of Lark, or of llama.cpp (GBNF)
    #[arg(long, value_name = "FILE")]
    grammar: Option<PathBuf>,
}

impl GrammarArgs {
    /// The grammar, if there is to be one.
    pub fn grammar(&self) -> anyhow::Result<Option<Grammar>> {
        if let Some(schema) = &self.json_schema {
            return Ok(Some(Grammar::JsonSchema(read_schema(schema)?)));
        }
        if let Some(expression) = &self.regex {
            return Ok(Some(Grammar::Regex(expression.clone())));
        }
        if let Some(path) = &self.grammar {
            let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            return Ok(Some(of_notation(path, text)));
        }
        Ok(self.json_object.then_some(Grammar::JsonObject))
    }
}

fn read_schema(given: &str) -> anyhow::Result<serde_json::Value> {
    let (text, name) = match given.trim_start().starts_with('{') {
        true => (given.to_owned(), "--json-schema"),
        false => (fs::read_to_string(given).with_context(|| format!("cannot read {given}"))?, given),
    };
    serde_json::from_str(&text).map_err(|error| usage(format!("{name}: this is no JSON: {error}")))
}

/// A grammar by the name of its file, or else by what only one of the two notations has.
fn of_notation(path: &Path, text: String) -> Grammar {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("gbnf") => Grammar::Gbnf(text),
        Some("lark") => Grammar::Lark(text),
        _ if text.contains("::=") => Grammar::Gbnf(text),
        _ => Grammar::Lark(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notation_is_told_by_name_or_content() {
        let of = |name: &str, text: &str| of_notation(Path::new(name), text.to_owned());
        assert!(matches!(of("a.gbnf", "start: \"a\""), Grammar::Gbnf(_)));
        assert!(matches!(of("a.lark", "root ::= \"a\""), Grammar::Lark(_)));
        assert!(matches!(of("a", "root ::= \"a\""), Grammar::Gbnf(_)));
        assert!(matches!(of("a.txt", "start: \"a\""), Grammar::Lark(_)));
    }
}
