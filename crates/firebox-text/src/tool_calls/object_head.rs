//! Recognizes a tool call by the beginning of its JSON object.

use super::tool_name::MAX_TOOL_NAME;

/// The result of inspecting the beginning of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ObjectHead {
    /// Undecided; more text is needed.
    More,
    /// A call of this tool, whose arguments begin at byte `at`, nested in so many objects.
    Call { name: String, at: usize, objects: usize },
    /// Only the complete object can tell.
    Whole,
}

/// Inspects a text that begins with `{`. A call is recognized early if the name precedes the arguments, with only the kind or id
/// of the call before them.
pub(super) fn inspect_object(text: &str) -> ObjectHead {
    let mut cursor = Cursor { text, at: 1 };
    let mut name = None;
    let mut objects = 1;
    match loop {
        match entry(&mut cursor, &mut name, &mut objects) {
            Ok(None) => {}
            other => break other,
        }
    } {
        Ok(Some(at)) => ObjectHead::Call { name: name.unwrap_or_default(), at, objects },
        Ok(None) | Err(Stop::Short) => ObjectHead::More,
        Err(Stop::Other) => ObjectHead::Whole,
    }
}

/// Returns whether an object of arguments begins here, at `{`; `None` if more text is needed.
pub(super) fn begins_object(text: &str) -> Option<bool> {
    let next = text.strip_prefix('{')?.trim_start().chars().next()?;
    Some(matches!(next, '"' | '}'))
}

/// The reason why reading stopped.
enum Stop {
    /// The text ended.
    Short,
    /// Something else was found.
    Other,
}

struct Cursor<'t> {
    text: &'t str,
    at: usize,
}

/// Reads a key and its value. Returns the position of the arguments once it is known.
fn entry(
    cursor: &mut Cursor<'_>,
    name: &mut Option<String>,
    objects: &mut usize,
) -> Result<Option<usize>, Stop> {
    let key = cursor.string()?;
    cursor.sign(b':')?;
    match key.as_str() {
        "name" => *name = Some(cursor.string()?).filter(|name| !name.is_empty()),
        "type" | "id" => {
            cursor.string()?;
        }
        "function" => {
            cursor.sign(b'{')?;
            *name = None;
            *objects += 1;
            return Ok(None);
        }
        "arguments" | "parameters" if name.is_some() => {
            cursor.peek(b'{')?;
            return match begins_object(&cursor.text[cursor.at..]) {
                Some(true) => Ok(Some(cursor.at)),
                Some(false) => Err(Stop::Other),
                None => Err(Stop::Short),
            };
        }
        _ => return Err(Stop::Other),
    }
    cursor.sign(b',')?;
    Ok(None)
}

impl Cursor<'_> {
    /// Skips white space up to this character.
    fn peek(&mut self, sign: u8) -> Result<(), Stop> {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start().len();
        match self.text.as_bytes().get(self.at) {
            None => Err(Stop::Short),
            Some(&found) if found == sign => Ok(()),
            Some(_) => Err(Stop::Other),
        }
    }

    /// Skips white space and this character.
    fn sign(&mut self, sign: u8) -> Result<(), Stop> {
        self.peek(sign)?;
        self.at += 1;
        Ok(())
    }

    /// Reads a quoted string of at most the length of a name.
    fn string(&mut self) -> Result<String, Stop> {
        self.peek(b'"')?;
        let rest = &self.text.as_bytes()[self.at..];
        let mut escaped = false;
        for (at, &byte) in rest.iter().enumerate().skip(1) {
            match byte {
                _ if at > MAX_TOOL_NAME => return Err(Stop::Other),
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => {
                    let literal = &self.text[self.at..self.at + at + 1];
                    self.at += at + 1;
                    return serde_json::from_str(literal).map_err(|_| Stop::Other);
                }
                _ => {}
            }
        }
        Err(Stop::Short)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_before_arguments_identifies_a_call() {
        let call = |text: &str, name: &str, arguments: &str, objects| {
            let at = text.len() - arguments.len();
            assert_eq!(inspect_object(text), ObjectHead::Call { name: name.into(), at, objects });
        };
        call(r#"{"name": "a\"", "arguments": { "x"#, "a\"", r#"{ "x"#, 1);
        call(r#"{"type":"function","function":{"name":"a","parameters":{}"#, "a", "{}", 2);
        assert_eq!(inspect_object(r#"{"id": "1", "name": "a", "arguments":{"#), ObjectHead::More);
        for begun in ["{", "{\"na", "{\"name\" ", "{\"name\": \"a", "{\"name\": \"a\",", "{\"function\":"] {
            assert_eq!(inspect_object(begun), ObjectHead::More, "{begun}");
        }
        let long = format!("{{\"name\": \"{}", "a".repeat(400));
        for other in [
            "{}",
            "{1",
            "{\"arguments\": {}, \"name\": \"a\"}",
            "{\"name\": \"a\"}",
            "{\"name\": \"\", \"arguments\": {}}",
            "{\"name\": \"a\", \"arguments\": \"{}\"",
            "{\"name\": \"a\", \"arguments\": {'b'",
            "{\"name\": \"a\", \"function\": {\"arguments\": {}",
            "{\"x\"",
            "{\"x\":",
            &long,
        ] {
            let expected = if other == "{\"x\"" { ObjectHead::More } else { ObjectHead::Whole };
            assert_eq!(inspect_object(other), expected, "{other}");
        }
    }
}
