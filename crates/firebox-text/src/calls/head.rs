use super::reader::LONGEST_NAME;

/// What the beginning of an object tells of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Head {
    /// Nothing yet.
    More,
    /// It is a call of this tool, whose arguments begin at this byte, within so many objects.
    Call { name: String, at: usize, objects: usize },
    /// Only the whole of it will tell.
    Whole,
}

/// Looks at a text that begins with `{`. A call is known by its beginning if the name comes before the arguments, and
/// nothing before them but what kind of a call it is.
pub(super) fn head(text: &str) -> Head {
    let mut cursor = Cursor { text, at: 1 };
    let mut name = None;
    let mut objects = 1;
    match loop {
        match entry(&mut cursor, &mut name, &mut objects) {
            Ok(None) => {}
            other => break other,
        }
    } {
        Ok(Some(at)) => Head::Call { name: name.unwrap_or_default(), at, objects },
        Ok(None) | Err(Stop::Short) => Head::More,
        Err(Stop::Other) => Head::Whole,
    }
}

/// Whether an object of arguments may begin here, at `{`: nothing if more has to come to tell.
pub(super) fn begins_object(text: &str) -> Option<bool> {
    let next = text.strip_prefix('{')?.trim_start().chars().next()?;
    Some(matches!(next, '"' | '}'))
}

/// Why there is nothing to be read.
enum Stop {
    /// The text ends before it.
    Short,
    /// There is something else.
    Other,
}

struct Cursor<'t> {
    text: &'t str,
    at: usize,
}

/// Reads a key and its value. Where the arguments begin, once that is known.
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
    /// Goes past white space to this sign.
    fn peek(&mut self, sign: u8) -> Result<(), Stop> {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start().len();
        match self.text.as_bytes().get(self.at) {
            None => Err(Stop::Short),
            Some(&found) if found == sign => Ok(()),
            Some(_) => Err(Stop::Other),
        }
    }

    /// Goes past this sign.
    fn sign(&mut self, sign: u8) -> Result<(), Stop> {
        self.peek(sign)?;
        self.at += 1;
        Ok(())
    }

    /// A text in quotes, no longer than a name may be.
    fn string(&mut self) -> Result<String, Stop> {
        self.peek(b'"')?;
        let rest = &self.text.as_bytes()[self.at..];
        let mut escaped = false;
        for (at, &byte) in rest.iter().enumerate().skip(1) {
            match byte {
                _ if at > LONGEST_NAME => return Err(Stop::Other),
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
    fn a_name_before_arguments_is_enough() {
        let call = |text: &str, name: &str, arguments: &str, objects| {
            let at = text.len() - arguments.len();
            assert_eq!(head(text), Head::Call { name: name.into(), at, objects });
        };
        call(r#"{"name": "a\"", "arguments": { "x"#, "a\"", r#"{ "x"#, 1);
        call(r#"{"type":"function","function":{"name":"a","parameters":{}"#, "a", "{}", 2);
        assert_eq!(head(r#"{"id": "1", "name": "a", "arguments":{"#), Head::More);
        for begun in ["{", "{\"na", "{\"name\" ", "{\"name\": \"a", "{\"name\": \"a\",", "{\"function\":"] {
            assert_eq!(head(begun), Head::More, "{begun}");
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
            let expected = if other == "{\"x\"" { Head::More } else { Head::Whole };
            assert_eq!(head(other), expected, "{other}");
        }
    }
}
