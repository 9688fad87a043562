//! Python functions and methods that chat templates use.

use crate::control_tokens::is_mark;
use crate::template_limits;
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Error, ErrorKind, Output, State, escape_formatter, filters};
use std::fmt::Write;

/// The deepest nesting that `tojson` writes.
const MAX_DEPTH: usize = 128;

/// The filter `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`: Python's `json.dumps`, as provided by
/// `transformers`.
pub(crate) fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let named: Option<bool> = kwargs.get("ensure_ascii")?;
    let ascii = named.unwrap_or_else(|| args.first().is_some_and(Value::is_true));
    let indent: Option<Value> = kwargs.get::<Option<Value>>("indent")?.or_else(|| args.get(1).cloned());
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    kwargs.assert_all_used()?;

    let indent = indent.filter(|indent| !indent.is_none()).map(|indent| match indent.as_str() {
        Some(text) => text.to_owned(),
        None => " ".repeat(usize::try_from(indent.clone()).unwrap_or(0).min(64)),
    });
    let (between, after_key) = match separators.as_deref() {
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
        Some([between, after_key]) => (between.clone(), after_key.clone()),
        Some(_) => return Err(invalid("tojson: `separators` are two strings")),
    };
    let mut writer = JsonWriter { text: String::new(), ascii, indent, between, after_key, sort_keys };
    template_limits::check_size(value)?;
    writer.value(value, 0)?;
    template_limits::charge(writer.text.len())?;
    Ok(writer.text)
}

struct JsonWriter {
    text: String,
    ascii: bool,
    indent: Option<String>,
    between: String,
    after_key: String,
    sort_keys: bool,
}

impl JsonWriter {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid("tojson: the value is nested too deeply"));
        }
        template_limits::check(self.text.len())?;
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self.text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.text.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
                self.text.push('[');
                for (index, item) in items.iter().enumerate() {
                    self.separate(index, depth + 1);
                    self.value(item, depth + 1)?;
                }
                self.close(']', items.is_empty(), depth);
            }
            ValueKind::Map => {
                let mut keys = value.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
                if self.sort_keys {
                    keys.sort();
                }
                self.text.push('{');
                for (index, key) in keys.iter().enumerate() {
                    self.separate(index, depth + 1);
                    self.string(&key_text(key));
                    self.text.push_str(&self.after_key.clone());
                    self.value(&value.get_item(key)?, depth + 1)?;
                }
                self.close('}', keys.is_empty(), depth);
            }
            kind => return Err(invalid(format!("tojson: a value of kind {kind} is no JSON"))),
        }
        Ok(())
    }

    fn separate(&mut self, index: usize, depth: usize) {
        if index > 0 {
            self.text.push_str(&self.between);
        }
        self.new_line(depth);
    }

    fn close(&mut self, bracket: char, empty: bool, depth: usize) {
        if !empty {
            self.new_line(depth);
        }
        self.text.push(bracket);
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.text.push('\n');
            self.text.push_str(&indent.repeat(depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.text.push('"');
        for character in text.chars() {
            match character {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{c}' => self.text.push_str("\\f"),
                c if c < ' ' || (self.ascii && !(' '..='~').contains(&c) && !is_mark(c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        // Writing to a string cannot fail.
                        let _ = write!(self.text, "\\u{unit:04x}");
                    }
                }
                c => self.text.push(c),
            }
        }
        self.text.push('"');
    }
}

fn key_text(key: &Value) -> String {
    match key.kind() {
        ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
        ValueKind::None => "null".to_owned(),
        ValueKind::Bool => if key.is_true() { "true" } else { "false" }.to_owned(),
        ValueKind::Number => number(key),
        _ => key.to_string(),
    }
}

fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => python_float(float),
        _ => value.to_string(),
    }
}

/// A float in the format of Python's `repr`: the shortest digits that parse to the same number, with an exponent below 1e-4 and
/// from 1e16 on.
fn python_float(float: f64) -> String {
    if float.is_nan() {
        return "NaN".to_owned();
    }
    if float.is_infinite() {
        return if float > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if float != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = format!("{float}");
    if plain.contains('.') { plain } else { format!("{plain}.0") }
}

/// Methods of Python values: those of minijinja's own collection, and others that chat templates use.
pub(crate) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if value.kind() == ValueKind::String {
        let all: Vec<Value> = std::iter::once(value).chain(args).cloned().collect();
        template_limits::before(name, &all, true)?;
    }
    template_limits::fit(&unbounded(state, value, name, args)?)
}

fn unbounded(state: &mut State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        let part = |index: usize| args.get(index).and_then(Value::as_str);
        match (name, part(0)) {
            ("removeprefix", Some(prefix)) => return Ok(text.strip_prefix(prefix).unwrap_or(text).into()),
            ("removesuffix", Some(suffix)) => return Ok(text.strip_suffix(suffix).unwrap_or(text).into()),
            ("partition", Some(mark)) if !mark.is_empty() => {
                let parts = text.split_once(mark).map_or([text, "", ""], |(left, right)| [left, mark, right]);
                return Ok(parts.into_iter().map(Value::from).collect());
            }
            ("rpartition", Some(mark)) if !mark.is_empty() => {
                let parts =
                    text.rsplit_once(mark).map_or(["", "", text], |(left, right)| [left, mark, right]);
                return Ok(parts.into_iter().map(Value::from).collect());
            }
            ("rsplit", Some(mark)) if !mark.is_empty() => {
                let most =
                    args.get(1).and_then(Value::as_usize).map_or(usize::MAX, |most| most.saturating_add(1));
                let mut parts: Vec<Value> = text.rsplitn(most, mark).map(Value::from).collect();
                parts.reverse();
                return Ok(parts.into());
            }
            ("title", None) => return Ok(title(text).into()),
            ("casefold", None) => return Ok(text.to_lowercase().into()),
            _ => {}
        }
    }
    if value.kind() == ValueKind::Map && name == "copy" && args.is_empty() {
        return Ok(value.clone());
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

/// Upper case for every letter that does not follow a letter.
fn title(text: &str) -> String {
    let mut titled = String::with_capacity(text.len());
    let mut in_word = false;
    for character in text.chars() {
        match in_word {
            true => titled.extend(character.to_lowercase()),
            false => titled.extend(character.to_uppercase()),
        }
        in_word = character.is_alphabetic();
    }
    titled
}

/// The test `iterable`. Unlike in minijinja, an undefined value is not iterable.
pub(crate) fn is_iterable(value: &Value) -> bool {
    is_sequence(value) || value.kind() == ValueKind::Iterable
}

/// The test `sequence`. As in Python it holds for everything with a length and items, strings and dictionaries included.
pub(crate) fn is_sequence(value: &Value) -> bool {
    value.is_undefined() || matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map)
}

/// Writes a value into the prompt. Only floats differ from minijinja's format.
pub(crate) fn write(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    // Values of `{% set %}` blocks pass here as well.
    template_limits::charge(template_limits::check_size(value)?)?;
    match text(value)? {
        Some(text) => out.write_str(&text).map_err(Error::from),
        None => escape_formatter(out, state, value),
    }
}

/// The filter `string`.
pub(crate) fn string(state: &State<'_, '_>, value: &Value) -> Result<Value, Error> {
    match text(value)? {
        Some(text) => Ok(text.into()),
        None => filters::string(state, value),
    }
}

/// An operand of `~`.
pub(crate) fn operand(value: &Value) -> Result<Value, Error> {
    Ok(text(value)?.map_or_else(|| value.clone(), Value::from))
}

/// The filters `length` and `count`, which accept undefined values.
pub(crate) fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() { Ok(0) } else { filters::length(value) }
}

/// The filter around values that loops iterate over. minijinja accepts `none` as an empty list.
pub(crate) fn each(value: &Value) -> Result<Value, Error> {
    if value.is_none() { Err(invalid("None is nothing to loop over")) } else { Ok(value.clone()) }
}

/// The text of a value in the format of Python's `str`; `None` if it contains no floats, because minijinja's format is equal then.
fn text(value: &Value) -> Result<Option<String>, Error> {
    if !has_float(value, 0)? {
        return Ok(None);
    }
    let mut text = String::new();
    represent(value, &mut text)?;
    Ok(Some(text))
}

fn has_float(value: &Value, depth: usize) -> Result<bool, Error> {
    if depth > MAX_DEPTH {
        return Err(invalid("the value is nested too deeply"));
    }
    Ok(match value.kind() {
        ValueKind::Number => !value.is_integer(),
        ValueKind::Seq => any(value.try_iter()?, |item| has_float(&item, depth + 1))?,
        ValueKind::Map => any(value.try_iter()?, |key| has_float(&value.get_item(&key)?, depth + 1))?,
        _ => false,
    })
}

fn any(
    values: impl Iterator<Item = Value>,
    mut holds: impl FnMut(Value) -> Result<bool, Error>,
) -> Result<bool, Error> {
    for value in values {
        if holds(value)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The format of Python's `repr`. Size and depth of the value have been checked.
fn represent(value: &Value, text: &mut String) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Number => text.push_str(&number(value)),
        ValueKind::Seq => {
            text.push('[');
            for (index, item) in value.try_iter()?.enumerate() {
                text.push_str(if index > 0 { ", " } else { "" });
                represent(&item, text)?;
            }
            text.push(']');
        }
        ValueKind::Map => {
            text.push('{');
            for (index, key) in value.try_iter()?.enumerate() {
                text.push_str(if index > 0 { ", " } else { "" });
                represent(&key, text)?;
                text.push_str(": ");
                represent(&value.get_item(&key)?, text)?;
            }
            text.push('}');
        }
        // A quoted string, and `None`, `True` and `False`.
        _ => {
            // Writing to a string cannot fail.
            let _ = write!(text, "{value:?}");
        }
    }
    Ok(())
}

/// The message given to `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct TemplateException(pub String);

pub(crate) fn raise_exception(message: Option<Value>) -> Result<String, Error> {
    let message = message.map(|message| message.to_string()).unwrap_or_default();
    Err(invalid(message.clone()).with_source(TemplateException(message)))
}

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

#[cfg(test)]
mod tests {
    use super::python_float;

    #[test]
    fn floats_are_formatted_as_in_python() {
        let cases = [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-0.0, "-0.0"),
            (1e16, "1e+16"),
            (123456789012345.6, "123456789012345.6"),
            (1e-5, "1e-05"),
            (0.0001, "0.0001"),
            (1.5e300, "1.5e+300"),
        ];
        for (float, text) in cases {
            assert_eq!(python_float(float), text);
        }
    }
}
